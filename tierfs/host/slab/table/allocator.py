"""The owner's own record of its segment: which slots and which bytes are free. The table says the same, less handily."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CorruptionError
from tierfs.host.extents import Extents
from tierfs.host.slab.table.table import Layout, SlotState, Table, padded

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """The free slots and extents of one segment. Not safe for use by many threads.

    Args:
        layout: Of the segment, which is taken to be empty.
    """

    def __init__(self, layout: Layout) -> None:
        self._data_at = layout.data_at
        self._extents = Extents(layout.data_bytes)
        self._free = list(range(layout.slots))
        self._capacity: dict[int, int] = {}
        self._serial = 0
        self._refused_bytes: float = math.inf  # the least for which there was no room since something was freed

    @classmethod
    def of(cls, table: Table, path: str) -> SlotAllocator:
        """What a table says that somebody else filled; what was being filled counts as free.

        Raises:
            CorruptionError: It contradicts itself.
        """
        allocator = cls(table.layout)
        free = set(allocator._free)
        for index in np.nonzero(table.state)[0].tolist():
            row = table.row(index)
            if row.state == SlotState.FILLING:
                continue
            capacity = padded(max(row.length, 1))
            if not row.is_sound(table.layout) or not allocator._extents.take_at(
                row.offset - allocator._data_at, capacity
            ):
                raise CorruptionError(f"slot {index} of {path} cannot be what it says", path=path, tier="ram")
            allocator._capacity[index] = capacity
            free.discard(index)
        allocator._free = sorted(free)
        # In the table lies the highest serial ever given, since a slot that is freed keeps its own.
        allocator._serial = int(table.serial.max())
        return allocator

    def is_known_full(self, lengths: Sequence[int]) -> bool:
        """Whether so little as this was refused since something was freed last. Any thread may ask."""
        return sum(padded(max(length, 1)) for length in lengths) >= self._refused_bytes

    def take(self, lengths: Sequence[int]) -> list[tuple[int, int, int]] | None:
        """Take slots of so many bytes that lie side by side, each from a whole page on.

        Returns:
            For each the slot's index, a new serial and the offset in the segment; None if there is no room.
        """
        sizes = [padded(max(length, 1)) for length in lengths]
        length = sum(sizes)
        # What is much smaller than a chunk lies at the end, where it leaves room for whole chunks in one piece.
        if len(self._free) < len(sizes):
            return None
        at = self._extents.take(length, last=length < CHUNK_BYTES // 2)
        if at is None:
            self._refused_bytes = min(self._refused_bytes, length)
            return None
        places = []
        for size in sizes:
            index = heapq.heappop(self._free)
            self._capacity[index] = size
            self._serial += 1
            places.append((index, self._serial, self._data_at + at))
            at += size
        return places

    def shrink(self, index: int, offset: int, length: int) -> None:
        """Free what a slot does not need any more."""
        kept, capacity = padded(max(length, 1)), self._capacity[index]
        if kept < capacity:
            self._extents.give(offset - self._data_at + kept, capacity - kept)
            self._refused_bytes = math.inf
            self._capacity[index] = kept

    def give(self, index: int, offset: int) -> None:
        """Free a slot and its bytes."""
        self._extents.give(offset - self._data_at, self._capacity.pop(index))
        heapq.heappush(self._free, index)
        self._refused_bytes = math.inf
