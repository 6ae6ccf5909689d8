"""Which parts of a region are taken: the bookkeeping behind a segment and the arena. Pure; stores nothing itself."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Extents"]


class Extents:
    """The free and taken parts of a region, in units of ``align``. First fit, or last. Not safe for use by many threads.

    Lengths are rounded up to whole units everywhere, so whoever took a length gives the same length back.

    Args:
        size: The region's in bytes; the rest behind the last whole unit is not used.
        align: Bytes of one unit.
    """

    def __init__(self, size: int, *, align: int = 4096) -> None:
        if size < 0 or align < 1:
            raise ValueError(f"a region of {size} bytes in units of {align}")
        self._align = align
        self._size = self._free_bytes = size - size % align
        # The free parts, in order; no two of them touch.
        self._starts = [0] if self._size else []
        self._ends = [self._size] if self._size else []

    def __repr__(self) -> str:
        return f"Extents({self._size}, align={self._align}, used={self.used_bytes}, free_parts={len(self._starts)})"

    @property
    def size(self) -> int:
        """Bytes that can be taken or are: whole units."""
        return self._size

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        return self._size - self._free_bytes

    def take(self, length: int, *, last: bool = False) -> int | None:
        """Take the first part that is free and long enough; with ``last`` the last one, at its end.

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
        """Take this part, as it is known from elsewhere to be in use.

        Returns:
            False, with nothing taken, if some of it is taken or out of bounds, or if it begins within a unit.

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
        """Free what was taken, or a part of it.

        Raises:
            ValueError: Some of it is not taken, or it begins within a unit, or its length is not positive. Nothing is changed.
        """
        end = offset + self._rounded(length)
        index = bisect_right(self._starts, offset)  # of the free part behind it
        before = self._ends[index - 1] if index else 0
        behind = self._starts[index] if index < len(self._starts) else self._size
        if offset % self._align or offset < before or end > behind:
            raise ValueError(f"{length} bytes at {offset} are not all taken")
        self._add(index, offset, end)

    def _rounded(self, length: int) -> int:
        if length < 1:
            raise ValueError(f"{length} bytes are no extent")
        return length + -length % self._align

    def _cut(self, index: int, start: int, end: int) -> None:
        """Take a stretch out of one free part."""
        first, last = self._starts[index], self._ends[index]
        left = [(first, start)] * (first < start) + [(end, last)] * (end < last)
        self._starts[index : index + 1] = [start for start, _ in left]
        self._ends[index : index + 1] = [end for _, end in left]
        self._free_bytes -= end - start

    def _add(self, index: int, start: int, end: int) -> None:
        """Free a stretch that lies before the free part ``index``, and join it with those it touches."""
        self._free_bytes += end - start
        first, last = index, index
        if index > 0 and self._ends[index - 1] == start:
            first, start = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == end:
            last, end = index + 1, self._ends[index]
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
