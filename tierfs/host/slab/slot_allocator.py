"""The owner's record of the free slots and bytes of its segment: faster to search than the shared table."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from tierfs.digest import CHUNK_BYTES
from tierfs.host.slab.table import Layout, padded


class FreeRanges:
    """The free parts of a range of bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # in ascending order; no two of them touch

    def take(self, size: int, *, at_end: bool = False) -> int | None:
        """Take ``size`` bytes from the first range that has them, or from the last one. Return their offset."""
        for number in range(len(self._free))[:: -1 if at_end else 1]:
            begin, end = self._free[number]
            if end - begin >= size:
                at = end - size if at_end else begin
                rest = (begin, at) if at_end else (at + size, end)
                self._free[number : number + 1] = [rest] if rest[0] < rest[1] else []
                return at
        return None

    def has(self, size: int) -> bool:
        """Return whether a range has ``size`` bytes. Any thread may ask; the answer may be out of date."""
        return any(end - begin >= size for begin, end in tuple(self._free))

    def give(self, begin: int, end: int) -> None:
        """Add a range. It overlaps no free one."""
        if begin == end:
            return
        number = bisect.bisect(self._free, (begin, end))
        if number < len(self._free) and self._free[number][0] == end:
            end = self._free.pop(number)[1]
        if number and self._free[number - 1][1] == begin:
            number, begin = number - 1, self._free.pop(number - 1)[0]
        self._free.insert(number, (begin, end))


class SlotAllocator:
    """The free slots and pages of a segment, which is assumed to be empty at first. Not thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._slots = list(range(layout.slots))  # free slots, a heap
        self._sizes: dict[int, int] = {}  # bytes of each allocated slot
        self._serial = 0
        self._free = FreeRanges()
        self._free.give(layout.data_at, layout.data_at + layout.data_bytes // padded(1) * padded(1))

    def may_take(self, lengths: Sequence[int]) -> bool:
        """Return whether `take` would find room. Any thread may ask; the answer may be out of date."""
        return len(lengths) <= len(self._slots) and self._free.has(sum(padded(max(each, 1)) for each in lengths))

    def take(self, lengths: Sequence[int]) -> list[tuple[int, int, int]] | None:
        """Allocate adjacent slots of these lengths in bytes. Each starts on a page boundary.

        Return the index, new serial and offset in the segment of each slot; None if there is no room.
        """
        sizes = [padded(max(length, 1)) for length in lengths]
        total = sum(sizes)
        # Small slots lie at the end of the segment, so that whole chunks find contiguous room.
        at = self._free.take(total, at_end=total < CHUNK_BYTES // 2) if len(sizes) <= len(self._slots) else None
        if at is None:
            return None
        places = []
        for size in sizes:
            index, self._serial = heapq.heappop(self._slots), self._serial + 1
            self._sizes[index] = size
            places.append((index, self._serial, at))
            at += size
        return places

    def shrink(self, index: int, offset: int, length: int) -> None:
        """Release the pages behind the first ``length`` bytes of a slot."""
        kept, size = padded(max(length, 1)), self._sizes[index]
        self._free.give(offset + kept, offset + size)
        self._sizes[index] = kept

    def give(self, index: int, offset: int) -> None:
        """Free a slot and its bytes."""
        self._free.give(offset, offset + self._sizes.pop(index))
        heapq.heappush(self._slots, index)
