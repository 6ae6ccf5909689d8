"""Reads what other hosts hold, for the processes of a host: changes that are not published yet, and their chunks.

The process connects to the hosts itself, with its host's identity. It finds them in a file that the flusher keeps. A
host that fails rests, so that a read waits for it only a short time. Each block is verified against the chunk's name,
so a holder is not trusted.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tierfs import digest
from tierfs.checked_json import parse_object
from tierfs.clock import Clock, Pace
from tierfs.digest import BLOCK_BYTES, CHUNK_BLOCKS, DigestKind
from tierfs.errors import CorruptionError, FormatError, NotFoundError, StoreError, TierfsError
from tierfs.format.envelope import block_count
from tierfs.format.keys import is_at_or_below
from tierfs.format.lease import PeerRecord
from tierfs.format.manifest import Manifest
from tierfs.host.chunk_sources import BlockTable, ChunkRequest
from tierfs.host.events import Counters
from tierfs.host.pending.record import Draft
from tierfs.host.rpc.client import FlusherClient
from tierfs.peers.client import PeerClient
from tierfs.peers.members import MEMBERS_FILE, REST_S_MAX, REST_S_MIN
from tierfs.peers.settings import Identity
from tierfs.peers.wire import Connection

LAUNCH_S = 10.0
"""How long to wait for a flusher that lists the hosts."""
UNLISTED_S = 5.0
"""How long not to ask again after that failed."""
KNOWN_S = 1.0
"""How long the drafts of the last look count."""
LOOK_S = 2.0
"""How long one host may take to say what it holds."""
MEET_S = 4.0
"""How long a host that was never reached may refuse this host, because it has not read its certificate yet."""
READ_S, READ_RATE = 2.0, 8 << 20
"""A host may take `READ_S` for a read, and longer if it sends this many bytes per second."""
ASKS_MAX = 5
"""How often a host that fetches a chunk from the object tier is asked, as long as it answers something else at once."""
LOOKS_MAX = 16
_ERRORS = OSError, TierfsError, ValueError, KeyError, TypeError
"""A host failed, or sent something that is no answer."""
_logger = logging.getLogger("tierfs.peers")


@dataclass(slots=True)
class _Holder:
    """Another host, or this one: its connections and the drafts that it holds."""

    record: PeerRecord
    client: PeerClient
    changes: int | None = None  # of the drafts below
    drafts: list[Draft] = field(default_factory=list)
    rests_until: float = 0.0
    rest_s: float = 0.0


class PeerReader:
    """The drafts and chunks that hosts hold for others: `RemoteDrafts`.

    Args:
        directory: The store's directory on this host.
        store: The store's uuid.
        flusher: The client of this host's flusher, which keeps the list of hosts.
        counters: Receives ``peer_read_bytes``, ``peer_read_failures``, ``peer_bad_copies`` and fallbacks.
        clock: Measures rests.
        reads_once: Whether a whole chunk of the object tier is read from the host that fetches it for all.
    """

    name, is_here, blocks_at_once = "peer", False, CHUNK_BLOCKS

    def __init__(
        self, directory: Path, store: str, flusher: FlusherClient, counters: Counters, clock: Clock, *, reads_once: bool
    ) -> None:
        self._directory = directory
        self._store = store
        self._flusher = flusher
        self._counters = counters
        self._clock = clock
        self._reads_once = reads_once
        self._lock = threading.Lock()  # held while the hosts are asked for their drafts
        self._me = ""
        self._identity: Identity | None = None
        self._hosts: dict[str, _Holder] = {}
        self._listed_at: tuple[int, int] | None = None  # identifies the version of the file that was read
        self._next_s = float("-inf")
        self._paths: dict[str, dict[bytes, Draft]] = {}
        self._holders: dict[bytes, list[str]] = {}  # by the name of a chunk
        self._bad: set[tuple[str, bytes]] = set()  # copies that had another digest

    def __repr__(self) -> str:
        return f"PeerReader({self._me!r}, {len(self._hosts)} hosts)"

    def close(self) -> None:
        for host in self._hosts.values():
            host.client.hang_up()
            host.client.close()

    def drafts(self, path: str) -> list[Draft]:
        self._look()
        return list(self._paths.get(path, {}).values())

    def paths_below(self, path: str) -> list[str]:
        self._look()
        return [each for each in self._paths if is_at_or_below(each, path)]

    def copies(self, wanted: ChunkRequest) -> Iterator[_HostCopy]:
        """Yield the copies of hosts that hold a draft with the chunk, then that of the host that fetches it for all."""
        name, row = wanted.name, wanted.row
        is_stored = row is not None and bool(row.stored_length)
        if not is_stored and name not in self._holders:
            self._look()
        holders = self._holders.get(name, ())
        # This host first, then another order for each process, so that they share the load.
        ordered = sorted(holders, key=lambda each: (each != self._me, zlib.crc32(f"{self._me}{each}".encode())))
        # If only these hosts have the chunk, those that rest are asked after the others: one may be back.
        for is_last in (False, True) if not is_stored else (False,):
            for host in ordered:
                if (is_last or not self._is_resting(host)) and host in self._hosts and (host, name) not in self._bad:
                    yield _HostCopy(self, self._hosts[host], wanted)
        if self._reads_once and row is not None and is_stored and wanted.is_whole:
            first = self._first(name)
            if first is not None:
                named = {"generation": row.name.generation, "recipe": row.name.recipe.hex()}
                yield _HostCopy(self, first, wanted, {"stored": row.stored_length, **named})

    def holds(self, name: bytes) -> bool:
        return name in self._holders

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        self._look()
        drafts = [draft for each in list(self._paths.values()) for draft in each.values()]
        rows = [(draft.names, draft.record.rows) for draft in drafts if isinstance(draft.record, Manifest)]
        found = {name: row.raw_length for names, some in rows for name, row in zip(names, some, strict=True)}
        yield from sorted(found.items())

    def silent(self, name: bytes) -> str:
        hosts = [self._hosts[host].record for host in self._holders.get(name, ()) if self._is_resting(host)]
        return ", ".join(f"{record.host} at {record.address}:{record.port}" for record in hosts)

    def _is_resting(self, host: str) -> bool:
        known = self._hosts.get(host)
        return known is not None and known.rests_until > self._clock.monotonic()

    def _first(self, name: bytes) -> _Holder | None:
        """Return the host that fetches a chunk for all: the first one by a hash of the host and the chunk."""
        self._look()
        now = self._clock.monotonic()
        awake = [host for host, known in self._hosts.items() if known.rests_until <= now]
        if len(self._hosts) < 2 or not awake:  # noqa: PLR2004 - this host alone
            return None
        return self._hosts[min(awake, key=lambda host: xxhash.xxh3_64_intdigest(host.encode() + name))]

    def _is_there(self, host: _Holder) -> bool:
        with contextlib.suppress(OSError, TierfsError):
            host.client.fetch("room", lambda *_: None, timeout_s=READ_S, bytes=0)
            return True
        return False

    def _rest(self, host: _Holder, text: str, error: Exception) -> None:
        """Do not ask a host for a while: twice as long after each failure in a row."""
        host.rest_s = min(max(REST_S_MIN, 2 * host.rest_s), REST_S_MAX)
        host.rests_until = self._clock.monotonic() + host.rest_s
        self._counters.fall_back(
            "peer_read_failures", text, host.record.host, f"{host.record.address}:{host.record.port}", error
        )

    # -- the drafts ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Ask the hosts what they hold, unless they were asked a moment ago."""
        with self._lock:
            if self._clock.monotonic() < self._next_s:
                return
            try:
                self._list()
            except (OSError, TierfsError, ValueError, TimeoutError) as error:
                self._next_s = self._clock.monotonic() + UNLISTED_S
                self._counters.fall_back("peers_unlisted", "the changes that other hosts hold are not seen: %s", error)
                return
            now = self._clock.monotonic()
            awake = [host for host in self._hosts.values() if host.rests_until <= now]
            changed = self._ask_all(awake)
            if any(changed):
                self._note()
            self._next_s = self._clock.monotonic() + KNOWN_S

    def _ask_all(self, hosts: Sequence[_Holder]) -> Iterable[bool]:
        if len(hosts) < 2:  # noqa: PLR2004 - one needs no thread
            return [self._ask(host) for host in hosts]
        with ThreadPoolExecutor(min(LOOKS_MAX, len(hosts)), thread_name_prefix="tierfs-look") as threads:
            return list(threads.map(self._ask, hosts))

    def _list(self) -> None:
        """Read the file of the hosts if it has changed. Let the flusher write it, if none keeps it."""
        file = self._directory / MEMBERS_FILE
        if not file.exists() or not self._flusher.is_running():
            self._flusher.request("peers", timeout_s=LAUNCH_S)
        if not file.exists():
            raise StoreError(
                "this host's flusher has no list of the other hosts: `tierfs status` says why", tier="peer"
            )
        status = file.stat()
        if (status.st_ino, status.st_mtime_ns) == self._listed_at:
            return
        if self._identity is None:
            self._identity = Identity(self._directory)
            self._me = self._identity.id
        records = [
            PeerRecord.decode(bytes.fromhex(data), str(file))
            for data in parse_object(file.read_bytes(), str(file)).values()
        ]
        found: dict[str, _Holder] = {}
        for record in records:
            known = self._hosts.get(record.id)
            if known is not None and known.record == record:
                found[record.id] = known
                continue
            context = self._identity.context([record.certificate], server=False)
            found[record.id] = _Holder(record, PeerClient(record, context, self._store, Pace(self._clock, 0)))
        gone = [host for name, host in self._hosts.items() if found.get(name) is not host]
        self._hosts, self._listed_at = found, (status.st_ino, status.st_mtime_ns)
        for host in gone:
            host.client.close()
        if gone:
            self._note()

    def problems(self) -> dict[str, str]:
        with self._lock:
            self._list()
            others = [host for name, host in self._hosts.items() if name != self._me]
        found = {}
        for host in others:
            where = f"{host.record.host} at {host.record.address}:{host.record.port}"
            try:
                self._meet(host)
                found[where] = ""
            except _ERRORS as error:
                found[where] = str(error)
        return found

    def _ask(self, host: _Holder) -> bool:
        """Fetch the drafts of a host. Return whether they have changed."""
        try:
            return self._meet(host)
        except _ERRORS as error:
            self._rest(host, "changes that only %s at %s holds are not seen: %s", error)
            return False

    def _meet(self, host: _Holder) -> bool:
        """Fetch the drafts of a host, which may have to read this host's certificate first."""
        ends = self._clock.monotonic() + (MEET_S if host.changes is None else 0.0)
        while True:
            try:
                return self._fetch_drafts(host)
            except _ERRORS as error:  # noqa: PERF203 - it sleeps
                # The last one: another host has the address now, for example this one, which came back empty.
                is_gone = isinstance(error, (ConnectionRefusedError, TimeoutError, ssl.SSLCertVerificationError))
                if is_gone or self._clock.monotonic() > ends:
                    raise
                self._clock.sleep(REST_S_MIN / 4)

    def _fetch_drafts(self, host: _Holder) -> bool:
        drafts, at, seen, first = list[Draft](), 0, host.changes, None
        while True:
            data: list[memoryview] = []

            def take(connection: Connection, answer: dict[str, Any], sent: int, data: list[memoryview] = data) -> None:
                lengths = answer["lengths"]
                if sum(lengths) != sent or any(length < 1 for length in lengths):
                    raise FormatError("a peer's answer has a body of a wrong length")
                for length in lengths:
                    data.append(memoryview(bytearray(length)))
                    connection.read_into(data[-1])

            answer = host.client.fetch("drafts", take, timeout_s=LOOK_S, seen=seen, after=at)
            host.rest_s = 0.0
            changes = int(answer["changes"])
            if changes == seen:
                return False
            first = changes if first is None else first
            where = f"a draft that {host.record.host} holds"
            drafts += [Draft.decode(each, where) for each in data]
            if answer["next"] is None:
                # If they changed between two pages, some may be missing: look again next time.
                host.changes, host.drafts = changes if changes == first else None, drafts
                return True
            at, seen = int(answer["next"]), None

    def _note(self) -> None:
        """Index the drafts of all hosts by path and by chunk."""
        paths: dict[str, dict[bytes, Draft]] = {}
        holders: dict[bytes, list[str]] = {}
        for name, host in self._hosts.items():
            for draft in host.drafts:
                paths.setdefault(draft.path, {})[draft.write_id] = draft
                for chunk in {*draft.names}:
                    holders.setdefault(chunk, []).append(name)
        self._paths, self._holders = paths, holders


@dataclass(eq=False, slots=True)
class _HostCopy:
    """A host's copy of a chunk. ``stored`` tells the host the chunk's object, to fetch the chunk if it lacks it."""

    reader: PeerReader
    host: _Holder
    wanted: ChunkRequest
    stored: Mapping[str, Any] = field(default_factory=dict)
    named: list[bytes] = field(default_factory=list)

    def read(self, start: int, out: memoryview) -> None:
        for asks_left in reversed(range(ASKS_MAX if self.stored else 1)):
            try:
                self._ask(start, out)
                break
            except _ERRORS as error:
                # Its fetch may go on, or it is too busy for a new connection.
                if not asks_left or not isinstance(error, OSError) or not self.reader._is_there(self.host):
                    self.reader._rest(self.host, "a chunk is read elsewhere, because %s at %s failed: %s", error)
                    raise NotFoundError(f"{self.host.record.host} cannot be read", tier="peer") from error
        if not self.named:  # it was dropped since the look, or is damaged there
            raise NotFoundError(f"{self.host.record.host} does not have this chunk", tier="peer")
        self.table()  # a host that names other digests is not asked again

    def _ask(self, start: int, out: memoryview) -> None:
        length, first = self.wanted.length, start // BLOCK_BYTES

        def take(connection: Connection, answer: dict[str, Any], sent: int) -> None:
            if sent not in {0, len(out)} or bool(sent) != bool(answer["digests"]):
                raise FormatError("a peer's answer has a body of a wrong length")
            connection.read_into(out[:sent])

        answer = self.host.client.fetch(
            "read",
            take,
            timeout_s=READ_S + len(out) / READ_RATE,
            name=self.wanted.name.hex(),
            length=length,
            blocks=list(range(first, first + block_count(len(out)))),
            **self.stored,
        )
        self.named = [bytes.fromhex(each) for each in answer["digests"] or ()]
        self.host.rest_s = self.host.rests_until = 0.0

    def table(self) -> BlockTable:
        name, length = self.wanted.name, self.wanted.length
        kind = DigestKind(name[0])
        if len(self.named) != block_count(length) or digest.combine(kind, length, self.named) != name[1:]:
            raise CorruptionError(f"{self.host.record.host} has another chunk than {name.hex()}", tier="peer")
        return BlockTable(kind, self.named)

    def quarantine(self, error: Exception) -> None:
        self.reader._bad.add((self.host.record.id, self.wanted.name))
        self.reader._counters["peer_bad_copies"] += 1
        where = self.host.record.host
        _logger.error("chunk %s as %s sent it is damaged: %s", self.wanted.name.hex(), where, error)
