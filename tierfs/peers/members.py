"""Which hosts are there, and which of them hold this host's changes.

Each host renews an object under ``.tierfs/peers/``. A host counts as gone when a reader has looked at its object for the
time that the object says, by the reader's own monotonic clock, and it has not changed. So no two clocks are compared,
and nobody is gone because the reader could not look.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import xxhash

from tierfs.clock import Clock
from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format import keys
from tierfs.format.lease import PEER_BYTES_MAX, PeerRecord, peer_id
from tierfs.host.filesystems import disk_errors
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import OVERWRITE, ObjectInfo, ObjectTier, Version, objects_below
from tierfs.peers.settings import Identity, PeerSettings
from tierfs.threads import transfers

MEMBERS_FILE = "peers.members"
REST_S_MIN, REST_S_MAX = 1.0, 30.0
"""How long a host that failed or was full is not asked again: twice as long after each failure in a row."""


@dataclass(slots=True)
class _Member:
    """A host's record, its version, when that last changed, and how long it counts without a change."""

    record: PeerRecord
    version: Version
    changed_s: float


class Members:
    """The hosts that share a store. Thread-safe.

    Args:
        identity: This host. Its processes find the hosts in `MEMBERS_FILE` in its directory.
        settings: Its settings.
        clock: Measures how long a record has not changed.

    Attributes:
        unreadable: The problem of each record, by its name, that the last `refresh` left out.

    Raises:
        StoreError, ReadOnlyError, CapacityError: The directory cannot be used.
    """

    def __init__(self, identity: Identity, settings: PeerSettings, clock: Clock) -> None:
        self.me = identity.id
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self.unreadable: Mapping[str, str] = {}
        self._resting: dict[str, tuple[float, float]] = {}  # until when, and for how long
        self._sequence = clock.now_ns()
        self._listed_s: float | None = None  # when `refresh` last succeeded
        self._places: dict[str, tuple[str, int]] = {}  # where hosts answered, of the addresses that were given
        self._file = identity.directory / MEMBERS_FILE
        self._written: dict[str, str] | None = None  # the file's content
        self.is_listed = threading.Event()
        """Set once the file of the hosts is there, for the processes of this host, or could not be made."""
        with disk_errors(self._file):
            self._file.unlink(missing_ok=True)  # an earlier flusher's

    def __repr__(self) -> str:
        return f"Members({self.me}, {len(self._members)} others)"

    def refresh(self, objects: ObjectTier, port: int, duration_s: int, owners: Collection[str] = ()) -> None:
        """Renew this host's record, and read those of the others.

        Args:
            objects: The object tier.
            port: The port at which this host listens.
            duration_s: How long the record counts.
            owners: Hosts whose records are read even if they do not answer at the addresses that were given.

        Raises:
            StoreError, CapacityError, ReadOnlyError: The object tier failed. The hosts known so far stay known.
        """
        mine = self._settings
        self._sequence += 1
        record = PeerRecord(
            self._sequence,
            duration_s,
            mine.address,
            port,
            mine.domain,
            socket.gethostname(),
            self._identity.certificate,
        )
        objects.put(peer_key(self.me), [record.encode()], mode=OVERWRITE)
        found, unreadable = dict[str, _Member](), dict[str, str]()
        listed = self._called(objects, owners) if mine.hosts else list(objects_below(objects, keys.PEERS))
        now = self._clock.monotonic()
        # After a time in which this host could not look, the others' time begins again: they could not renew either.
        is_late = self._listed_s is not None and now - self._listed_s > duration_s / 2
        for info in listed:
            name = info.key.removeprefix(keys.PEERS)
            known = self._members.get(name)
            if name == self.me:
                continue
            is_changed = known is None or known.version != info.version
            if known is not None and not (is_changed and (name in self._resting or not self._is_alive(known))):
                changed_s = now if is_changed or (is_late and self._is_alive(known)) else known.changed_s
                found[name] = _Member(known.record, info.version, changed_s)
                continue
            # A host that is new, comes back, or did not answer may have another address.
            try:
                other, _, _ = read_decoded(objects, info.key, PEER_BYTES_MAX, PeerRecord.decode, info.key)
                if other.id != name:
                    raise FormatError(f"{info.key}: the certificate is not the one of that name", path=info.key)
                # A certificate that OpenSSL cannot read would end every connection of this host.
                self._identity.context([other.certificate], server=False)
            except NotFoundError:
                continue
            except (CorruptionError, ValueError, ssl.SSLError) as error:
                unreadable[name] = str(error)
                continue
            address, port = self._places.get(name, (other.address, other.port))
            found[name] = _Member(replace(other, address=address, port=port), info.version, now)
        with self._lock:
            self._members, self._listed_s, self.unreadable = found, now, unreadable
        self._write({**self.live(), self.me: record})
        self.is_listed.set()

    def _called(self, objects: ObjectTier, owners: Collection[str]) -> list[ObjectInfo]:
        """Return the records of the hosts at the addresses that were given, without listing the object tier.

        The certificate that a host presents names its record. So a peer has to be able to write the object tier.
        """
        known = {place for name, place in self._places.items() if not self.is_gone(name)}

        def call(place: tuple[str, int]) -> None:
            if place not in known:
                with contextlib.suppress(OSError):  # it is called again at the next refresh
                    self._places[peer_id(self._identity.certificate_at(*place))] = place

        def look(name: str) -> ObjectInfo | None:
            try:
                return objects.head(peer_key(name))
            except NotFoundError:
                return None

        transfers().map(call, self._settings.hosts)
        return [info for info in transfers().map(look, {*self._places, *owners}) if info is not None]

    def _write(self, hosts: Mapping[str, PeerRecord]) -> None:
        """Write the file of the hosts if it has changed, whatever their renewals."""
        content = {name: replace(record, sequence=0).encode().hex() for name, record in hosts.items()}
        if content != self._written:
            with disk_errors(self._file):
                temporary = self._file.with_suffix(".new")
                temporary.write_text(json.dumps(content), encoding="ascii")
                temporary.replace(self._file)
            self._written = content

    def leave(self, objects: ObjectTier) -> None:
        """Remove this host's record. Call it only if no other host's changes are held here."""
        self._file.unlink(missing_ok=True)
        objects.delete([peer_key(self.me)])

    def live(self) -> dict[str, PeerRecord]:
        """Return the records of the other hosts that are there, by their ids."""
        with self._lock:
            return {name: each.record for name, each in self._members.items() if self._is_alive(each)}

    def certificates(self) -> list[bytes]:
        """Return the certificates of all other hosts that have a record."""
        with self._lock:
            return sorted(each.record.certificate for each in self._members.values())

    def is_gone(self, host: str) -> bool:
        """Return whether a host has left or has not renewed its record in time. False before the first `refresh`."""
        with self._lock:
            known = self._members.get(host)
            return self._listed_s is not None and (known is None or not self._is_alive(known))

    def knows(self, host: str) -> bool:
        """Return whether a host has a record, live or not. True before the first `refresh`."""
        with self._lock:
            return host in self._members or self._listed_s is None

    def rests(self, host: str) -> bool:
        """Return whether a host has failed and is not to be asked yet."""
        with self._lock:
            return self._resting.get(host, (0.0, 0.0))[0] > self._clock.monotonic()

    def rest(self, host: str) -> None:
        """Do not choose this host for a while, because it failed or is full."""
        with self._lock:
            _, before_s = self._resting.get(host, (0.0, 0.0))
            rest_s = min(max(REST_S_MIN, 2 * before_s), REST_S_MAX)
            self._resting[host] = self._clock.monotonic() + rest_s, rest_s

    def end_rest(self, host: str) -> None:
        """Note that a host has answered."""
        with self._lock:
            self._resting.pop(host, None)

    def chosen(self) -> dict[str, PeerRecord]:
        """Return the hosts that are to hold this host's changes, at most as many as were asked for.

        They are the first by a hash of both ids (rendezvous hashing, Thaler and Ravishankar 1998), in as many failure
        domains as possible, and never in this host's. A host that comes or goes changes only the choices of its own.
        """
        mine = self._settings.domain
        candidates = {
            name: record
            for name, record in self.live().items()
            if not self.rests(name) and (not mine or record.domain != mine)
        }
        ranked = sorted(candidates, key=lambda name: xxhash.xxh3_64_intdigest(f"{self.me}{name}".encode()))
        firsts: dict[str, str] = {}
        for name in ranked:
            firsts.setdefault(candidates[name].domain or name, name)
        ordered = [*firsts.values(), *(name for name in ranked if name not in firsts.values())]
        return {name: candidates[name] for name in ordered[: self._settings.count]}

    def _is_alive(self, member: _Member) -> bool:
        """Return whether a record had changed not too long before the last look."""
        return (self._listed_s or 0.0) - member.changed_s < member.record.duration_s


def peer_key(host: str) -> str:
    """Return the key of a host's record."""
    return f"{keys.PEERS}{host}"
