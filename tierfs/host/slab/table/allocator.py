"""The owner's record of the free slots and free bytes of its segment.

The shared table holds the same information; this form is faster to search.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tierfs.digest import CHUNK_BYTES
from tierfs.host.extents import Extents
from tierfs.host.slab.table.table import Layout, padded


class SlotAllocator:
    """The free slots and extents of a segment, which is assumed to be empty at first. Not thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._data_at = layout.data_at
        self._extents = Extents(layout.data_bytes)
        self._free = list(range(layout.slots))
        self._capacity: dict[int, int] = {}
        self._serial = 0

    def take(self, lengths: Sequence[int]) -> list[tuple[int, int, int]] | None:
        """Allocate adjacent slots of these lengths in bytes. Each starts on a page boundary.

        Returns:
            Index, new serial and offset in the segment of each slot; None if there is no room.
        """
        sizes = [padded(max(length, 1)) for length in lengths]
        length = sum(sizes)
        # Allocate small slots at the end of the segment, so that whole chunks find contiguous room.
        if len(self._free) < len(sizes):
            return None
        at = self._extents.take(length, last=length < CHUNK_BYTES // 2)
        if at is None:
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
        """Release the pages behind the first ``length`` bytes of a slot."""
        kept, capacity = padded(max(length, 1)), self._capacity[index]
        if kept < capacity:
            self._extents.give(offset - self._data_at + kept, capacity - kept)
            self._capacity[index] = kept

    def give(self, index: int, offset: int) -> None:
        """Free a slot and its bytes."""
        self._extents.give(offset - self._data_at, self._capacity.pop(index))
        heapq.heappush(self._free, index)
