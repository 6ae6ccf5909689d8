"""Finds the copies of a chunk on this host for the flusher: in a draft's slots, in any slot, in the nvme tier.

Nothing is pinned. A slot or a file may be reused while a thread reads it, which is detected afterwards.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from tierfs import digest
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import CorruptionError, NotFoundError
from tierfs.format import keys
from tierfs.host.pending.record import SlotRef, local_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierfs.format.manifest import Row
    from tierfs.host.nvme.tier import NvmeTier
    from tierfs.host.slab.ram import RamTier
    from tierfs.host.slab.segment import Slot

_logger = logging.getLogger("tierfs.flush")


class ChunkSources:
    """The copies of chunks in this host's tiers. Thread-safe.

    Args:
        kind: The kind of the chunks' digests.
        ram: The ram tier.
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
