"""Memory of this process that others can map: those that encode for it."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from typing import NamedTuple

from tierfs._fork import PerProcess

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
    number: int
    start: int
    descriptor: int


class SharedMemory:
    """Regions that are shared, each for as long as somebody has a view of it. Safe for use by many threads.

    Attributes:
        is_on: Whether what is allocated is to be shared.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._lock = threading.Lock()
        self._regions: weakref.WeakKeyDictionary[mmap.mmap, _Region] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()

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
            self._regions[memory] = _Region(next(self._numbers), _address(view), descriptor)
        weakref.finalize(memory, _free, descriptor)
        return view

    def find(self, view: memoryview) -> Place | None:
        """Where bytes lie, if they are shared."""
        if not isinstance(view.obj, mmap.mmap):
            return None
        with self._lock:
            region = self._regions.get(view.obj)
        return None if region is None else Place(region.number, _address(view) - region.start, len(view))

    def descriptors(self) -> dict[int, int]:
        """The file descriptors of all regions, by number. Each counts for as long as somebody has a view of that."""
        with self._lock:
            return {region.number: region.descriptor for region in self._regions.values()}


def _free(descriptor: int) -> None:
    """Have nobody's memory taken by it, also where another process has it mapped. Garbage is collected anywhere: nothing waits here."""
    os.ftruncate(descriptor, 0)
    os.close(descriptor)


def _address(view: memoryview) -> int:
    import numpy as np  # noqa: PLC0415 - importing the package must not bring it

    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


shared_memory = PerProcess(SharedMemory)
"""This process's `SharedMemory`."""
