"""Memory of this process that others can map: those that encode for it."""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from collections import deque
from typing import NamedTuple

from tierfs.forks import PerProcess

__all__ = ["Place", "SharedMemory", "shared_memory"]


class Place(NamedTuple):
    """Where bytes lie.

    Attributes:
        region: Its number, that no other one of this process has.
        at: Offset in it.
        length: How many.
    """

    region: int
    at: int
    length: int


class _Region(NamedTuple):
    start: int
    length: int
    number: int
    descriptor: int


class SharedMemory:
    """Regions that are shared, each for as long as somebody has a view of it. Safe for use by many threads.

    Attributes:
        is_on: Whether what is allocated is to be shared.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._lock = threading.Lock()
        self._regions: list[_Region] = []  # by where they start
        self._gone: deque[_Region] = deque()  # nobody has a view of them; what lies there now may be another's
        self._count = 0

    def __repr__(self) -> str:
        return f"SharedMemory({len(self._regions)} regions)"

    def allocate(self, length: int) -> memoryview | None:
        """So many zero bytes that can be shared; ``None`` where there can be none."""
        try:
            descriptor = os.memfd_create("tierfs-work", os.MFD_CLOEXEC)
        except OSError:
            return None
        try:
            os.ftruncate(descriptor, length)
            memory = mmap.mmap(descriptor, length)
        except OSError:
            os.close(descriptor)
            return None
        view = memoryview(memory)
        with self._lock:
            self._forget_gone()
            self._count += 1
            region = _Region(_address(view), length, self._count, descriptor)
            bisect.insort(self._regions, region)
        weakref.finalize(memory, self._gone.append, region)  # wherever garbage is collected: nothing waits there
        return view

    def find(self, view: memoryview) -> Place | None:
        """Where bytes lie, if they are shared."""
        address = _address(view)
        with self._lock:
            self._forget_gone()
            index = bisect.bisect_right(self._regions, address, key=lambda region: region.start) - 1
            if index < 0:
                return None
            region = self._regions[index]
        at = address - region.start
        return Place(region.number, at, len(view)) if at + len(view) <= region.length else None

    def descriptors(self) -> dict[int, int]:
        """The file descriptors of all regions, by number."""
        with self._lock:
            self._forget_gone()
            return {region.number: region.descriptor for region in self._regions}

    def _forget_gone(self) -> None:
        while self._gone:
            region = self._gone.popleft()
            self._regions.remove(region)
            os.close(region.descriptor)


def _address(view: memoryview) -> int:
    import numpy as np  # noqa: PLC0415 - importing the package must not bring it

    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


shared_memory = PerProcess(SharedMemory)
"""This process's `SharedMemory`."""
