"""Copies of a chunk, from near to far: who may have one, and how the first sound one is read.

`ChunkTier` is all that a tier does for readers: it finds copies of a chunk, copies bytes of one, and puts a damaged one
aside. `ChunkSources` is the list of a store's tiers in the order in which every read, fetch, repair and scrub asks them.

Readers pin nothing. A slot or file may be reused for another chunk while a thread reads it. The digests of the blocks
detect this, like a flipped bit. A copy that is damaged is read once more, and after that the next one is read.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tierfs import digest
from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES, CHUNK_BLOCKS, DigestKind, local_name
from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format.envelope import BlockTargets, Envelope, Part, block_count
from tierfs.host.pending.record import SlotRef

if TYPE_CHECKING:
    from tierfs.format.manifest import Row
    from tierfs.host.nvme.reader import NvmeReader
    from tierfs.host.nvme.tier import NvmeTier
    from tierfs.host.slab.ram import RamTier
    from tierfs.host.slab.segment import Slot

_KINDS = {int(kind): kind for kind in DigestKind}
_logger = logging.getLogger("tierfs.flush")


class ChunkRequest(NamedTuple):
    """The chunk that a reader wants.

    Attributes:
        name: Its local name.
        length: Its bytes.
        row: Its row, if it is known; a piece of a file that tierfs did not write has none.
        is_whole: Whether all of its bytes are wanted.
    """

    name: bytes
    length: int
    row: Row | None = None
    is_whole: bool = True


class BlockTable(NamedTuple):
    """The kind of a chunk's digests, and the digest of each block."""

    kind: DigestKind
    digests: Sequence[bytes]


class ChunkCopy(Protocol):
    """One copy of a chunk that a tier has found. It may vanish at any time, and its bytes are not verified."""

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the chunk's bytes from ``start`` on.

        Raises:
            NotFoundError: The copy is gone.
            CorruptionError: It is damaged: it has less than these bytes, or does not say whose bytes it has.
            StoreError: It cannot be read now.
        """

    def table(self) -> BlockTable:
        """Return the digests that the chunk's blocks should have. Call it after `read`.

        Raises:
            NotFoundError: The bytes that were read may be those of another chunk, which took the copy's place.
            CorruptionError, FormatError: The copy's metadata is damaged, or of another version.
        """

    def quarantine(self, error: Exception) -> None:
        """Count and log a damaged copy, and keep it from being found again. Does nothing if it is gone."""


class ChunkTier(Protocol):
    """A place that may have copies of chunks. Thread-safe.

    Attributes:
        name: Its name in counters and reports: ``"ram"``, ``"nvme"`` or ``"peer"``.
        is_here: Whether it is on this host.
        blocks_at_once: The most blocks for one `ChunkCopy.read`, so that their digests are computed in the CPU's caches,
            or that a request is worth its cost.
    """

    name: str
    is_here: bool
    blocks_at_once: int

    def copies(self, wanted: ChunkRequest) -> Iterator[ChunkCopy]:
        """Yield the tier's copies of a chunk, the preferred one first. It looks again when a copy was of no use."""

    def holds(self, name: bytes) -> bool:
        """Return whether the tier seems to have a chunk. This may count as a use of it."""

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Yield names and lengths of the chunks that the tier seems to have, sorted by name."""


class ChunkSources:
    """The tiers that may have copies of one store's chunks. Thread-safe.

    Args:
        kind: The kind of the chunks' digests.
        tiers: From near to far.
        counters: Counts the bytes that each tier serves, as ``ram_read_bytes``; None to count nothing.
    """

    def __init__(self, kind: DigestKind, tiers: Sequence[ChunkTier], counters: Counter[str] | None = None) -> None:
        self.tiers = list(tiers)
        self._kind = kind
        self._counters = counters

    def read(
        self, wanted: ChunkRequest, parts: Sequence[Part], *, is_here: bool | None = None
    ) -> tuple[str, list[bytes]] | None:
        """Copy verified bytes of a chunk into ``parts``, from the nearest tier that has them.

        Args:
            wanted: The chunk.
            parts: The wanted parts. The content of their memory is undefined if no tier has them.
            is_here: Ask only the tiers of this host, or only the others; None asks all.

        Returns:
            The tier, and the digests of the blocks that were read; None if no tier has a sound copy.

        Raises:
            StoreError: A tier cannot be read now.
        """
        wanted = wanted._replace(is_whole=len(parts) == 1 and len(parts[0][1]) == wanted.length)
        for tier in self.tiers:
            digests = _read(tier, wanted, parts)[0] if is_here in {None, tier.is_here} else None
            if digests is not None:
                self._count(tier, sum(len(out) for _, out in parts))
                return tier.name, digests
        return None

    def read_whole(self, row: Row, out: memoryview) -> list[bytes] | None:
        """Copy a whole chunk into memory of its length. Raises as `read` does.

        Returns:
            The digests of its blocks; ``None`` if no tier has a sound copy. ``out`` is undefined then.
        """
        found = self.read(self._wanted(row), [(0, out)])
        return None if found is None else found[1]

    def peek(self, row: Row, start: int, out: memoryview) -> bool:
        """Copy bytes of a chunk from ``start`` on, unverified. Return whether a tier had them."""
        for tier in self.tiers:
            for copy in tier.copies(self._wanted(row)):
                with contextlib.suppress(CorruptionError, NotFoundError):  # `read` reports damage
                    copy.read(start, out)
                    return True
        return False

    def copy(self, wanted: ChunkRequest, out: memoryview) -> Sequence[bytes] | None:
        """Copy a whole chunk from the nearest tier of this host, for a caller that verifies it itself.

        Returns:
            The digests that its blocks should have; None if no tier has a copy with sound metadata.
        """
        for tier in filter(lambda each: each.is_here, self.tiers):
            for copy in tier.copies(wanted):
                with contextlib.suppress(CorruptionError, FormatError, NotFoundError):  # `read` reports damage
                    copy.read(0, out)
                    digests = copy.table().digests
                    self._count(tier, wanted.length)
                    return digests
        return None

    def holds(self, name: bytes, tier: str) -> bool:
        """Return whether a tier seems to have a chunk: see `ChunkTier.holds`."""
        return self.tier(tier).holds(name)

    def holding(self, names: Sequence[bytes]) -> list[str]:
        """Return the tiers of this host that seem to have all these chunks, from near to far."""
        return [tier.name for tier in self.tiers if tier.is_here and all(map(tier.holds, names))]

    def tier(self, name: str) -> ChunkTier:
        return next(tier for tier in self.tiers if tier.name == name)

    def _wanted(self, row: Row) -> ChunkRequest:
        return ChunkRequest(local_name(self._kind, row.name.digest), row.raw_length, row)

    def _count(self, tier: ChunkTier, length: int) -> None:
        if self._counters is not None:
            self._counters[f"{tier.name}_read_bytes"] += length


def check_copies(tier: ChunkTier, wanted: ChunkRequest) -> str | None:
    """Read a tier's copies of a chunk up to the first sound one, and quarantine those that are damaged.

    Returns:
        The last error message; "" if the first copy is sound, None if there is no copy any more.
    """
    with buffers().lend(wanted.length) as out:
        digests, problem = _read(tier, wanted, [(0, out)])
    return problem or (None if digests is None else "")


def _read(tier: ChunkTier, wanted: ChunkRequest, parts: Sequence[Part]) -> tuple[list[bytes] | None, str | None]:
    """Read from one tier. Return the digests, if a copy is sound, and the last problem of a copy before it."""
    problem = None
    for copy in tier.copies(wanted):
        for is_last in (False, True):
            try:
                return _fill(tier, copy, wanted, parts), problem
            except NotFoundError:  # noqa: PERF203 - twice at most
                break
            except (CorruptionError, FormatError) as error:
                if is_last:
                    copy.quarantine(error)
                    problem = str(error)
    return None, problem


def _fill(tier: ChunkTier, copy: ChunkCopy, wanted: ChunkRequest, parts: Sequence[Part]) -> list[bytes]:
    """Fill the parts from one copy, and verify its blocks. A whole chunk is verified by its name alone.

    Raises:
        NotFoundError: The copy is gone.
        CorruptionError, FormatError: It is damaged, or of another version.
    """
    name, length = wanted.name, wanted.length
    kind = _KINDS.get(name[0])  # a piece of a file that tierfs did not write is not named by its digest
    found: list[bytes] = []
    with contextlib.ExitStack() as lent:
        targets = BlockTargets(length, parts, lambda size: lent.enter_context(buffers().lend(size)))
        for first, out in targets.pieces(tier.blocks_at_once):
            copy.read(first * BLOCK_BYTES, out)
            found += [] if kind is None else digest.hash_blocks(kind, out)
        is_whole = kind is not None and len(found) == block_count(length)
        if targets.blocks and not (is_whole and digest.combine(_KINDS[name[0]], length, found) == name[1:]):
            table = copy.table()
            found = found or [digest.hash_bytes(table.kind, targets.view(index)) for index in targets.blocks]
            for index, its_digest in zip(targets.blocks, found, strict=True):
                if table.digests[index] != its_digest:
                    text = f"chunk {name[1:].hex()} in the {tier.name} tier: block {index} is damaged"
                    raise CorruptionError(text, tier=tier.name, block=index)
        targets.finish()
    return found


def table_of(wanted: ChunkRequest, meta: bytes, tier: str) -> BlockTable:
    """Decode the metadata that a tier keeps with a chunk.

    Raises:
        CorruptionError: The metadata is damaged, or belongs to another chunk.
        FormatError: Another version of tierfs wrote it.
    """
    where = f"chunk {wanted.name.hex()} in the {tier} tier"
    envelope = Envelope.decode(meta, where, stored_length=len(meta) + wanted.length)
    if wanted.name[0] == envelope.digest_kind and envelope.digest != wanted.name[1:]:
        raise CorruptionError(f"{where} has the metadata of another chunk", tier=tier)
    return BlockTable(envelope.digest_kind, [block.digest for block in envelope.blocks])


@dataclass(eq=False)
class RamChunks:
    """The ram tier as a `ChunkTier`.

    Attributes:
        counters: Count damaged copies, as ``bad``.
        slots: The slots to try first, by the digest of their chunk.
        is_mapped: Whether to copy through the mapping, which takes half as long as a system call. A process that must
            outlive others, whose segment files may be truncated, does not map them.
    """

    ram: RamTier
    counters: Counter[str]
    bad: str = "ram_quarantined"
    slots: Mapping[bytes, SlotRef | None] = field(default_factory=dict)
    is_mapped: bool = True
    name: str = "ram"
    is_here: bool = True
    blocks_at_once: int = 1

    def copies(self, wanted: ChunkRequest) -> Iterator[_SlotCopy]:
        reference = self.slots.get(wanted.name[1:])
        given = None if reference is None else slot_at(self.ram, reference)
        if given is not None:
            yield _SlotCopy(given, wanted, self)
        for _ in range(2):  # the second time, the slot of the first was reused, or is quarantined
            found = self.ram.find(wanted.name)
            if found is None:
                return
            if given is None or SlotRef.of(found) != reference:
                yield _SlotCopy(found, wanted, self)

    def holds(self, name: bytes) -> bool:
        slot = self.ram.find(name)
        if slot is not None:
            slot.segment.touch(slot)
        return slot is not None

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        return iter(self.ram.chunks())


@dataclass(eq=False, slots=True)
class _SlotCopy:
    slot: Slot
    wanted: ChunkRequest
    tier: RamChunks

    def read(self, start: int, out: memoryview) -> None:
        slot = self.slot
        if start + len(out) > slot.length:
            raise NotFoundError(f"{slot.segment} has another chunk in this slot", tier="ram")
        if self.tier.is_mapped:
            slot.segment.copy(slot, start, out)
            slot.segment.touch(slot)
        else:
            slot.segment.read(slot, start, out)

    def table(self) -> BlockTable:
        meta = self.slot.segment.meta(self.slot)
        if not self.slot.segment.is_still(self.slot):
            raise NotFoundError(f"{self.slot.segment} no longer has this chunk", tier="ram")
        return table_of(self.wanted, meta, self.tier.name)

    def quarantine(self, error: Exception) -> None:
        if self.slot.segment.hide(self.slot):
            _put_aside(self.tier, error)


@dataclass(eq=False)
class FileChunks:
    """A folder of chunk files as a `ChunkTier`: the nvme tier, or the room that this host lends to others.

    Attributes:
        quarantine: Called with the name and the length of a damaged chunk.
        counters: Count damaged copies, as ``bad``.
    """

    files: NvmeReader | NvmeTier
    quarantine: Callable[[bytes, int], object]
    counters: Counter[str]
    bad: str = "nvme_quarantined"
    name: str = "nvme"
    is_here: bool = True
    blocks_at_once: int = CHUNK_BLOCKS

    def copies(self, wanted: ChunkRequest) -> Iterator[_FileCopy]:
        yield _FileCopy(wanted, self)

    def holds(self, name: bytes) -> bool:
        return self.files.holds(name)

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        return self.files.chunks()


@dataclass(eq=False, slots=True)
class _FileCopy:
    wanted: ChunkRequest
    tier: FileChunks
    meta: bytes = b""

    def read(self, start: int, out: memoryview) -> None:
        meta = self.tier.files.read(self.wanted.name, start, out)
        if meta is None:
            raise NotFoundError(f"the {self.tier.name} tier does not have this chunk", tier=self.tier.name)
        self.meta = meta

    def table(self) -> BlockTable:
        return table_of(self.wanted, self.meta, self.tier.name)

    def quarantine(self, error: Exception) -> None:
        _put_aside(self.tier, error)
        self.tier.quarantine(self.wanted.name, self.wanted.length)


def _put_aside(tier: RamChunks | FileChunks, error: Exception) -> None:
    tier.counters[tier.bad] += 1
    _logger.error("a damaged copy is quarantined, and the next one is read: %s", error)


def slot_at(ram: RamTier, reference: SlotRef) -> Slot | None:
    """Return the slot that a draft refers to, or None if the slot was reused or its segment cannot be opened."""
    segment = ram.segment(reference.segment)
    slot = None if segment is None else segment.slot(reference.index)
    return slot if slot is not None and slot.serial == reference.serial else None
