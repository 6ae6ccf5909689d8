"""Allocation of parts of a region, for segments. Pure bookkeeping; stores nothing itself."""

from __future__ import annotations

from bisect import bisect_right


class Extents:
    """The free and allocated parts of a region, in units of ``align``. First fit or last fit. Not thread-safe.

    All lengths are rounded up to whole units. A caller frees with the length that it allocated.

    Args:
        size: Size of the region in bytes; a rest behind the last whole unit is not used.
        align: Bytes of one unit.
    """

    def __init__(self, size: int, *, align: int = 4096) -> None:
        if size < 0 or align < 1:
            raise ValueError(f"a region of {size} bytes in units of {align} is invalid")
        self._align = align
        self._size = self._free_bytes = size - size % align
        # The free parts, in ascending order; no two of them touch.
        self._starts = [0] if self._size else []
        self._ends = [self._size] if self._size else []

    def __repr__(self) -> str:
        return f"Extents({self._size}, align={self._align}, used={self.used_bytes}, free_parts={len(self._starts)})"

    @property
    def size(self) -> int:
        """Capacity in bytes: the whole units of the region."""
        return self._size

    @property
    def used_bytes(self) -> int:
        """Bytes that are allocated."""
        return self._size - self._free_bytes

    def take(self, length: int, *, last: bool = False) -> int | None:
        """Allocate the first free part that is long enough, at its start; with ``last`` the last one, at its end.

        Returns:
            Its offset, a multiple of ``align``; None if there is no such part.

        Raises:
            ValueError: The length is not positive.
        """
        length = self._rounded(length)
        indexes = range(len(self._starts))
        for index in reversed(indexes) if last else indexes:
            start, end = self._starts[index], self._ends[index]
            if end - start >= length:
                at = end - length if last else start
                self._cut(index, at, at + length)
                return at
        return None

    def take_at(self, offset: int, length: int) -> bool:
        """Allocate this part, which the caller knows to be in use.

        Returns:
            False, with nothing changed, if any of it is allocated already or out of bounds, or if the offset is not a
            multiple of ``align``.

        Raises:
            ValueError: The length is not positive.
        """
        end = offset + self._rounded(length)
        index = bisect_right(self._starts, offset) - 1
        if offset % self._align or index < 0 or self._ends[index] < end:
            return False
        self._cut(index, offset, end)
        return True

    def give(self, offset: int, length: int) -> None:
        """Free an allocated part, or a piece of one.

        Raises:
            ValueError: Some of it is not allocated, the offset is not a multiple of ``align``, or the length is not
                positive. Nothing is changed.
        """
        end = offset + self._rounded(length)
        index = bisect_right(self._starts, offset)  # index of the next free part
        before = self._ends[index - 1] if index else 0
        behind = self._starts[index] if index < len(self._starts) else self._size
        if offset % self._align or offset < before or end > behind:
            raise ValueError(f"{length} bytes at {offset} are not all allocated")
        self._add(index, offset, end)

    def _rounded(self, length: int) -> int:
        if length < 1:
            raise ValueError(f"an extent of {length} bytes is invalid")
        return length + -length % self._align

    def _cut(self, index: int, start: int, end: int) -> None:
        """Remove a range from one free part."""
        first, last = self._starts[index], self._ends[index]
        left = [(first, start)] * (first < start) + [(end, last)] * (end < last)
        self._starts[index : index + 1] = [start for start, _ in left]
        self._ends[index : index + 1] = [end for _, end in left]
        self._free_bytes -= end - start

    def _add(self, index: int, start: int, end: int) -> None:
        """Add a free range before the free part ``index``, and merge it with the parts that it touches."""
        self._free_bytes += end - start
        first, last = index, index
        if index > 0 and self._ends[index - 1] == start:
            first, start = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == end:
            last, end = index + 1, self._ends[index]
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
