"""The room for other hosts: their drafts and chunks, in files in memory and on the disk.

Each of the two is a tier of files like the nvme tier, with a budget of its own. A draft and all of its chunks lie in
one of them. They stay until the owner says that the object tier has them, or until this host has brought them there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tierfs import digest
from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import CapacityError, CorruptionError, TierfsError
from tierfs.format.envelope import STORE, Block, Envelope
from tierfs.format.manifest import Manifest
from tierfs.host.events import Faults, no_faults
from tierfs.host.filesystems import disk_errors
from tierfs.host.nvme.batch import EncodedDraft
from tierfs.host.nvme.chunks import ChunksGoneError
from tierfs.host.nvme.head import BUDGET_BYTES_MIN
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.record import Draft

if TYPE_CHECKING:
    from tierfs.clock import Clock
    from tierfs.peers.wire import Connection

_OWNER_BYTES = 16
_logger = logging.getLogger("tierfs.peers")


@dataclass(frozen=True, slots=True)
class HeldDraft:
    """A draft of another host.

    Attributes:
        owner: The other host's id.
        draft: The draft.
        tier: The tier of files that holds it.
        seq: Its seq there.
        is_conflict: Whether this host has tried to publish it, and another writer had changed the path.
    """

    owner: str
    draft: Draft
    tier: NvmeTier
    seq: int
    is_conflict: bool

    def is_whole(self) -> bool:
        """Return whether the tier has all chunks of the draft that the object tier is not known to have."""
        return all(map(self.tier.holds, {*self.draft.names} - {*elsewhere(self.draft)}))


class PeerRoom:
    """The drafts of other hosts: a `LentRoom`.

    Args:
        places: A directory and a budget in bytes for each tier, the preferred one first. A budget below the smallest
            one of a tier switches it off.
        record: The file that names the drafts which this host has published for others.
        clock: The source of time.
        faults: See `NvmeTier`.

    Raises:
        CapacityError, ReadOnlyError, StoreError: A directory cannot be used.
    """

    def __init__(
        self, places: Sequence[tuple[Path, int]], record: Path, clock: Clock, faults: Faults = no_faults
    ) -> None:
        self._record = record
        self.tiers = [
            NvmeTier(directory, budget_bytes=budget, clock=clock, faults=faults)
            for directory, budget in places
            if budget >= BUDGET_BYTES_MIN
        ]
        self._lock = threading.Lock()  # held while drafts come and go
        self._held: dict[bytes, HeldDraft] = {}
        self.changes = clock.now_ns()
        """Changes with the drafts that are held, and is another number after a restart."""
        for tier in self.tiers:
            for stored in tier.drafts():
                owner, data = stored.data[:_OWNER_BYTES].hex(), stored.data[_OWNER_BYTES:]
                try:
                    draft = Draft.decode(data, f"draft {stored.seq} of a peer")
                except TierfsError as error:
                    _logger.error("%s of another host cannot be read and stays: %s", stored.path or "a file", error)  # noqa: TRY400 - a trace adds nothing
                    continue
                is_conflict = stored.state == "conflict"
                self._held[draft.write_id] = HeldDraft(owner, draft, tier, stored.seq, is_conflict)
        # Write ids that were published here, and their owners. An owner that comes back sends these drafts again.
        self._published = self._read_record()

    def _read_record(self) -> dict[bytes, str]:
        try:
            lines = self._record.read_text(encoding="ascii").splitlines()
            return {bytes.fromhex(write_id): owner for write_id, owner in map(str.split, lines)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _logger.warning("%s cannot be read: a host that comes back may find conflicts: %s", self._record, error)
            return {}

    def _write_record(self) -> None:
        """Write down what was published here. The caller holds the lock."""
        text = "".join(f"{write_id.hex()} {owner}\n" for write_id, owner in self._published.items())
        with disk_errors(self._record):
            temporary = self._record.with_suffix(".new")
            temporary.write_text(text, encoding="ascii")
            temporary.replace(self._record)

    def __repr__(self) -> str:
        return f"PeerRoom({len(self._held)} drafts, {self.tiers!r})"

    def __len__(self) -> int:
        return len(self._held)

    def owner_of(self, write_id: bytes) -> str | None:
        """Return the id of the host whose draft this is; None if it is not held."""
        held = self._held.get(write_id)
        return None if held is None else held.owner

    def held(self, owner: str | None = None) -> list[HeldDraft]:
        """Return the drafts of one host, or of all, in the order in which they were closed."""
        with self._lock:
            found = [each for each in self._held.values() if owner in {None, each.owner}]
        return sorted(found, key=lambda each: (each.owner, each.draft.boot, each.draft.stamp_ns))

    def owners(self) -> set[str]:
        """Return the ids of the hosts whose drafts are here."""
        with self._lock:
            return {each.owner for each in self._held.values()}

    def write_ids(self, owner: str) -> list[bytes]:
        """Return the write ids of a host's drafts that are held, or were published here.

        A draft is left out if a copy of one of its chunks was damaged, so that its owner sends it again.
        """
        with self._lock:
            held = [each.draft.write_id for each in self._held.values() if each.owner == owner and each.is_whole()]
            return [*held, *(write_id for write_id, host in self._published.items() if host == owner)]

    def choose(self, size: int) -> int | None:
        """Return the number of the first tier with room for a draft of this many bytes; None if none has."""
        for number, tier in enumerate(self.tiers):
            usage = tier.usage()
            if usage.dirty_bytes + size <= usage.budget_bytes:
                return number
        return None

    def lacking(self, number: int, names: Sequence[bytes]) -> list[int]:
        """Return the indexes of the chunks that a tier lacks. The others are kept for some time, for a draft."""
        tier = self.tiers[number]
        tier.protect(names)
        return [index for index, name in enumerate(names) if not tier.holds(name)]

    def take_chunk(self, number: int, name: bytes, length: int, connection: Connection) -> None:
        """Receive a chunk, compute its digest, and store it.

        Raises:
            CapacityError: The tier has no room.
            CorruptionError: The bytes that arrived have another digest than the name says.
            OSError: The connection ended.
        """
        kind, digests = DigestKind(name[0]), []
        with buffers().lend(length) as out:
            connection.read_into(out, lambda piece: digests.append(digest.hash_bytes(kind, piece)))
            if digest.combine(kind, length, digests) != name[1:]:
                raise CorruptionError(f"chunk {name.hex()} was damaged on its way to this host", tier="peer")
            _write(self.tiers[number], name, digests, out, keep=True)

    def keep_read(self, name: bytes, digests: Sequence[bytes], data: memoryview) -> None:
        """Keep a chunk of the object tier for other hosts, as long as no change needs the room.

        Raises:
            CapacityError: No tier has room.
            StoreError: The chunk could not be written.
        """
        for tier in self.tiers:
            try:
                return _write(tier, name, digests, data, keep=False)
            except CapacityError:  # noqa: PERF203 - two tiers at most
                continue
        raise CapacityError(f"no room for a chunk of {len(data)} bytes that other hosts read", tier="peer")

    def take_draft(self, number: int, owner: str, data: bytes) -> list[bytes]:
        """Store a draft durably, as far as the tier's filesystem can.

        Args:
            number: The tier, which has the draft's chunks.
            owner: The id of the host that sent it.
            data: The encoded draft.

        Returns:
            The names of the chunks that the tier lacks; empty if the draft is held now.

        Raises:
            CorruptionError, FormatError: It is not a draft.
            CapacityError: The tier has no room.
        """
        draft, tier = Draft.decode(data, "a peer's draft"), self.tiers[number]
        whole = bytes.fromhex(owner) + data
        with self._lock:
            if draft.write_id in self._held or draft.write_id in self._published:
                return []
            try:
                encoded = EncodedDraft(draft.write_id, draft.path, whole, draft.names)
                seqs = tier.commit([encoded], elsewhere=elsewhere(draft))
            except ChunksGoneError as error:
                return list(error.names)
            self._held[draft.write_id] = HeldDraft(owner, draft, tier, seqs[0], is_conflict=False)
            self.changes += 1
        return []

    def finish(self, write_ids: Sequence[bytes]) -> None:
        with self._lock:
            held = [self._held[write_id] for write_id in write_ids if write_id in self._held]
            if not held:
                return
            self._published |= {each.draft.write_id: each.owner for each in held}
            self._write_record()
        self._remove(write_ids)

    def forget(self, write_ids: Sequence[bytes]) -> None:
        self._remove(write_ids)
        with self._lock:
            if not self._published.keys().isdisjoint(write_ids):
                self._published = {each: owner for each, owner in self._published.items() if each not in write_ids}
                self._write_record()

    def forget_hosts(self, is_known: Callable[[str], bool]) -> None:
        """Forget what was published for hosts that will not come back."""
        with self._lock:
            kept = {each: owner for each, owner in self._published.items() if is_known(owner)}
            if len(kept) < len(self._published):
                self._published = kept
                self._write_record()

    def _remove(self, write_ids: Sequence[bytes]) -> None:
        with self._lock:
            gone = [each for each in map(self._held.get, write_ids) if each is not None]
            for tier in self.tiers:
                tier.forget_drafts(*[each.seq for each in gone if each.tier is tier])
            for each in gone:
                del self._held[each.draft.write_id]
            self.changes += 1

    def keep_as_conflict(self, write_id: bytes, note: str) -> None:
        with self._lock:
            held = self._held.get(write_id)
            if held is not None:
                held.tier.keep_as_conflict(held.seq, note)
                self._held[write_id] = replace(held, is_conflict=True)
                self.changes += 1


def _write(tier: NvmeTier, name: bytes, digests: Sequence[bytes], data: memoryview, *, keep: bool) -> None:
    length = len(data)
    sizes = [min(BLOCK_BYTES, length - at) for at in range(0, length, BLOCK_BYTES)]
    blocks = tuple(Block(each, STORE, size) for each, size in zip(digests, sizes, strict=True))
    meta = Envelope(DigestKind(name[0]), name[1:], length, blocks).encode()
    tier.write(name, meta, data, keep=keep)


def elsewhere(draft: Draft) -> list[bytes]:
    """Return the names of a draft's chunks that the object tier is known to have."""
    if not isinstance(draft.record, Manifest):
        return []
    return [name for name, row in zip(draft.names, draft.record.rows, strict=True) if row.stored_length]
