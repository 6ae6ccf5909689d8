"""Reads chunks from the host's local tiers: the nearest copy whose bytes pass verification.

Readers pin nothing. A slot or extent may be reused for another chunk while a thread reads it. The digests of the blocks
detect this, like a flipped bit. `ChunkReader` then looks the chunk up once more, and after that goes to the next tier.
`ChunkSources` finds copies for the flusher: in a draft's slots, in any slot, in the nvme tier.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierfs import digest
from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import CorruptionError, FormatError, NotFoundError, TierfsError
from tierfs.format import keys
from tierfs.format.envelope import BlockTargets, Envelope, Part, block_runs
from tierfs.host.events import Counters
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.pending.record import SlotRef, local_name
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.slab.ram import RamTier

if TYPE_CHECKING:
    from tierfs.format.manifest import Row
    from tierfs.host.nvme.tier import NvmeTier
    from tierfs.host.slab.segment import Slot

QUARANTINE_S = 10.0
_logger = logging.getLogger("tierfs.flush")


class ChunkReader:
    """Reads and verifies chunks of one store. Thread-safe. Reports damaged copies in the nvme tier to the flusher."""

    def __init__(self, ram: RamTier, nvme: NvmeReader, flusher: FlusherClient, counters: Counters) -> None:
        self._ram = ram
        self._nvme = nvme
        self._flusher = flusher
        self._counters = counters

    def read(self, name: bytes, raw_length: int, parts: Sequence[Part]) -> str | None:
        """Copy verified bytes of a chunk into ``parts``, from the nearest local tier that has them.

        Args:
            raw_length: Bytes of the whole chunk.
            parts: The wanted parts. The content of their memory is undefined if no tier has them.

        Returns:
            The tier, ``"ram"`` or ``"nvme"``; None if neither has a good copy.
        """
        for tier in ("ram", "nvme"):
            if self._read(tier, name, raw_length, parts) == "":
                self._counters[f"{tier}_read_bytes"] += sum(len(out) for _, out in parts)
                return tier
        return None

    def copy(self, name: bytes, raw_length: int, out: memoryview) -> list[bytes] | None:
        """Copy a whole chunk from the nearest local tier, for a caller that verifies it itself.

        Args:
            raw_length: Bytes of the whole chunk.
            out: Memory of this length.

        Returns:
            The digests that its blocks should have; None if no tier has a copy with sound metadata.
        """
        for tier, attempt in (("ram", self._copy_ram), ("nvme", lambda name, out: self._nvme.read(name, 0, out))):
            with contextlib.suppress(CorruptionError, FormatError, NotFoundError):  # `read` reports them
                meta = attempt(name, out)
                if meta is not None:
                    envelope = envelope_of(name, raw_length, meta, tier)
                    self._counters[f"{tier}_read_bytes"] += raw_length
                    return [block.digest for block in envelope.blocks]
        return None

    def check_copy(self, tier: str, name: bytes, raw_length: int) -> str | None:
        """Read the whole copy of a chunk in ``"ram"`` or ``"nvme"``, and quarantine it if it is damaged.

        Returns:
            The error message; "" if the copy is intact, None if there is no copy any more.
        """
        with buffers().lend(raw_length) as out:
            return self._read(tier, name, raw_length, [(0, out)])

    def _read(self, tier: str, name: bytes, raw_length: int, parts: Sequence[Part]) -> str | None:
        """Read from one tier. Return as `check_copy`."""
        attempt = self._read_ram if tier == "ram" else self._read_nvme
        for last in (False, True):  # the first time, the slot or extent may have been reused
            try:
                return "" if attempt(name, raw_length, parts) else None
            except NotFoundError:  # noqa: PERF203 - twice at most
                continue  # its slot was used anew, or its segment was closed, while it was being read
            except (CorruptionError, FormatError) as error:
                if last:
                    self._quarantine(tier, name, raw_length, error)
                    return str(error)
        return None

    def holds(self, name: bytes, tier: str) -> bool:
        """Return whether ``"ram"`` or ``"nvme"`` seems to have a chunk. In the ram tier this counts as a use."""
        if tier == "nvme":
            return self._nvme.holds(name)
        slot = self._ram.find(name)
        if slot is not None:
            slot.segment.touch(slot)
        return slot is not None

    def _read_ram(self, name: bytes, raw_length: int, parts: Sequence[Part]) -> bool:
        slot = self._ram.find(name)
        if slot is None:
            return False
        meta = slot.segment.meta(slot)
        if not slot.segment.is_still(slot):
            raise NotFoundError(f"{slot.segment} no longer has this chunk")
        envelope = envelope_of(name, raw_length, meta, "ram")
        source = np.frombuffer(slot.segment.view(slot), dtype=np.uint8)
        with contextlib.ExitStack() as lent:
            targets = BlockTargets(raw_length, parts, lambda length: lent.enter_context(buffers().lend(length)))
            for index in targets.blocks:
                block = targets.view(index)
                # Copy through the mapping: the system call takes twice as long.
                np.copyto(np.frombuffer(block, dtype=np.uint8), source[index * BLOCK_BYTES :][: len(block)])
                check_block(envelope, index, block, "ram")
            targets.finish()
        slot.segment.touch(slot)
        return True

    def _copy_ram(self, name: bytes, out: memoryview) -> bytes | None:
        slot = self._ram.find(name)
        if slot is None or slot.length != len(out):
            return None
        meta = slot.segment.meta(slot)
        np.copyto(np.frombuffer(out, dtype=np.uint8), np.frombuffer(slot.segment.view(slot), dtype=np.uint8))
        if not slot.segment.is_still(slot):
            return None
        slot.segment.touch(slot)
        return meta

    def _read_nvme(self, name: bytes, raw_length: int, parts: Sequence[Part]) -> bool:
        runs = block_runs(parts)
        first, end = runs[0].start * BLOCK_BYTES, min(runs[-1].stop * BLOCK_BYTES, raw_length)
        if len(parts) == 1 and parts[0][0] == first and len(parts[0][1]) == end - first:
            return read_blocks(self._nvme.read, name, raw_length, runs[0], parts[0][1])
        with buffers().lend(end - first) as whole:
            for run in runs:
                begin = run.start * BLOCK_BYTES - first
                out = whole[begin : begin + len(run) * BLOCK_BYTES]
                if not read_blocks(self._nvme.read, name, raw_length, run, out):
                    return False
            for start, out in parts:
                out[:] = whole[start - first : start - first + len(out)]
        return True

    def _quarantine(self, tier: str, name: bytes, raw_length: int, error: Exception) -> None:
        self._counters[f"{tier}_quarantined"] += 1
        _logger.error("a damaged copy is quarantined, and the next tier is read: %s", error)
        if tier == "ram":
            slot = self._ram.find(name)
            if slot is not None:
                slot.segment.hide(slot)
        elif self._flusher.is_running():
            try:
                self._flusher.request("quarantine", {"name": name.hex(), "length": raw_length}, timeout_s=QUARANTINE_S)
            except (TierfsError, TimeoutError) as failure:
                self._counters.fall_back("kept_damage", "the flusher was not told of a damaged copy: %s", failure)


def read_blocks(
    read: Callable[[bytes, int, memoryview], bytes | None], name: bytes, raw_length: int, blocks: range, out: memoryview
) -> bool:
    """Read and verify blocks of a chunk in the nvme tier. Return whether the tier has the chunk.

    Args:
        read: `NvmeReader.read` or `NvmeTier.read`.
        raw_length: Bytes of the whole chunk.
        out: Memory of their length.

    Raises:
        CorruptionError, FormatError: A block or the metadata is damaged, or of another version.
    """
    first = blocks.start * BLOCK_BYTES
    meta = read(name, first, out)
    if meta is None:
        return False
    envelope = envelope_of(name, raw_length, meta, "nvme")
    for index in blocks:
        begin = index * BLOCK_BYTES - first
        check_block(envelope, index, out[begin : begin + BLOCK_BYTES], "nvme")
    return True


def envelope_of(name: bytes, raw_length: int, meta: bytes, tier: str) -> Envelope:
    """Decode the metadata that a tier keeps with a chunk.

    Raises:
        CorruptionError: The metadata is damaged, or belongs to another chunk.
        FormatError: Another version of tierfs wrote it.
    """
    where = f"chunk {name.hex()} in the {tier} tier"
    envelope = Envelope.decode(meta, where, stored_length=len(meta) + raw_length)
    if name[0] == envelope.digest_kind and envelope.digest != name[1:]:
        raise CorruptionError(f"{where} has the metadata of another chunk", tier=tier)
    return envelope


def check_block(envelope: Envelope, index: int, block: memoryview, tier: str) -> None:
    """Verify one block of a chunk.

    Raises:
        CorruptionError: The block is damaged.
    """
    if digest.hash_bytes(envelope.digest_kind, block) != envelope.blocks[index].digest:
        raise CorruptionError(
            f"chunk {envelope.digest.hex()} in the {tier} tier: block {index} is damaged", tier=tier, block=index
        )


class ChunkSources:
    """The copies of chunks in this host's tiers. Thread-safe.

    Args:
        kind: The kind of the chunks' digests.
        nvme: The nvme tier; ``None`` if there is none.
        slots: The slots to try first, by the digest of their chunk.
        counters: ``bad_local_copies`` counts the copies that were read and do not have their digest.
        others: The tiers with the changes of other hosts.
    """

    def __init__(
        self,
        kind: DigestKind,
        ram: RamTier,
        nvme: NvmeTier | None,
        slots: Mapping[bytes, SlotRef | None],
        counters: Counter[str],
        others: Sequence[NvmeTier] = (),
    ) -> None:
        self._others = others
        self._kind = kind
        self._ram = ram
        self._nvme = nvme
        self._slots = slots
        self._counters = counters

    def read(self, row: Row, start: int, out: memoryview) -> bool:
        """Copy bytes of a chunk from ``start`` on, unverified. Return whether a tier had them."""
        return any(copy(start, out) is not None for copy, _ in self.copies(row))

    def read_whole(self, row: Row, out: memoryview) -> list[bytes] | None:
        """Copy a whole chunk into memory of its length, and verify it.

        Returns:
            The digests of its blocks; ``None`` if no tier has a sound copy. ``out`` is undefined then.

        Raises:
            StoreError: The nvme tier cannot be read.
        """
        for copy, _ in self.copies(row):
            digests = []
            for start in range(0, len(out), BLOCK_BYTES):
                block = out[start : start + BLOCK_BYTES]
                if copy(start, block) is None:
                    break
                digests.append(digest.hash_bytes(self._kind, block))  # while the block is in the CPU caches
            else:
                if digest.combine(self._kind, len(out), digests) == row.name.digest:
                    return digests
                self._counters["bad_local_copies"] += 1
                _logger.error("a local copy of %s is damaged and not used", keys.chunk_key(row.name))
        return None

    def copies(self, row: Row) -> Iterator[tuple[Callable[[int, memoryview], bytes | None], NvmeTier | None]]:
        """Yield a function for each copy and its tier of files, nearest first.

        The function copies bytes from an offset on, and returns the copy's metadata if it has them.
        """
        name, reference = local_name(self._kind, row.name.digest), self._slots.get(row.name.digest)
        given = None if reference is None else slot_at(self._ram, reference)
        if given is not None:
            yield partial(_read_slot, given), None
        found = self._ram.find(name)
        if found is not None and (given is None or SlotRef.of(found) != reference):
            yield partial(_read_slot, found), None
        for tier in (*([] if self._nvme is None else [self._nvme]), *self._others):
            yield partial(_read_file, tier, name), tier


def slot_at(ram: RamTier, reference: SlotRef) -> Slot | None:
    """Return the slot that a draft refers to, or None if the slot was reused or its segment cannot be opened."""
    segment = ram.segment(reference.segment)
    slot = None if segment is None else segment.slot(reference.index)
    return slot if slot is not None and slot.serial == reference.serial else None


def _read_file(tier: NvmeTier, name: bytes, start: int, out: memoryview) -> bytes | None:
    try:
        return tier.read(name, start, out)
    except CorruptionError as error:
        _logger.error("a local copy is damaged and not used: %s", error)  # noqa: TRY400 - a trace adds nothing
        tier.quarantine(name)
        return None


def _read_slot(slot: Slot, start: int, out: memoryview) -> bytes | None:
    if start + len(out) > slot.length:
        return None
    try:
        meta = slot.segment.meta(slot)
        slot.segment.read(slot, start, out)
    except (CorruptionError, NotFoundError) as error:
        _logger.warning("a chunk cannot be read from its slab: %s", error)  # the segment was cut short or closed
        return None
    return meta if slot.segment.is_still(slot) else None
