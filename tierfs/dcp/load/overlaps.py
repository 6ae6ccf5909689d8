"""The memory that tensors are read into, so that no two read into the same memory at once.

Tied weights have two names for one tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any


class Destinations:
    """The memory of the destinations that are read into at once, by name. No two names overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # sorted; `_stops` has the same order
        self._stops: list[int] = []
        self._spans: dict[str, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"Destinations({len(self._spans)} names)"

    def add(self, name: str, tensor: Any) -> bool:
        """Add a destination. Several destinations of one name are assumed not to overlap.

        Args:
            name: The loaded tensor's name.
            tensor: The destination, or a part of it.

        Returns:
            False if the memory from its first to its last byte may overlap another name's. Then it is not added.
        """
        start = tensor.data_ptr()
        if not tensor.numel() or not start:
            return True
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (reach + 1) * tensor.itemsize
        known = self._spans.get(name)
        if known is not None:
            start, stop = min(start, known[0]), max(stop, known[1])
            if (start, stop) == known:
                return True
            self._remove(known)
        before = bisect_left(self._starts, stop)
        is_free = not before or self._stops[before - 1] <= start
        if not is_free:
            if known is None:
                return False
            start, stop = known
            before = bisect_left(self._starts, stop)
        self._starts.insert(before, start)
        self._stops.insert(before, stop)
        self._spans[name] = start, stop
        return is_free

    def _remove(self, span: tuple[int, int]) -> None:
        index = bisect_left(self._starts, span[0])
        del self._starts[index], self._stops[index]
