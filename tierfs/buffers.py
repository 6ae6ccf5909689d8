"""Memory that is used again and again: touching fresh memory takes longer than copying into warm memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

from tierfs._fork import PerProcess
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES

__all__ = ["KEPT_MAX", "Buffers", "block_buffers", "buffers", "fresh"]

KEPT_MAX = 8
# What is smaller than this part of a buffer is had as fast without.
POOLED_PART = 16


class Buffers:
    """Buffers of one size. Safe for use by many threads.

    As many are kept for whoever is next as are in use at the time, and a few where those are fewer.

    Args:
        size: Bytes of each.
        kept: How many are a few.
    """

    def __init__(self, size: int = CHUNK_BYTES, kept: int = KEPT_MAX) -> None:
        self._size = size
        self._kept_max = kept
        self._taken = 0
        # Garbage may be collected while it is held, and what is collected may hand a buffer back.
        self._lock = threading.RLock()
        self._free: list[memoryview] = []

    def __repr__(self) -> str:
        return f"Buffers({self._taken} taken, {len(self._free)} free)"

    def take(self) -> memoryview:
        """A buffer. Its content is undefined; give it back with `give`."""
        with self._lock:
            if self._free:
                self._taken += 1
                return self._free.pop()
        memory = fresh(self._size)
        with self._lock:
            self._taken += 1
        return memory

    def give(self, buffer: memoryview) -> None:
        """Hand a buffer back; the caller must not use it any more."""
        with self._lock:
            self._taken -= 1
            self._free.append(buffer)
            # Of those that are never given back, since a write was discarded, none keeps more than one.
            del self._free[max(self._kept_max, self._taken) :]

    @contextlib.contextmanager
    def lend(self, length: int) -> Iterator[memoryview]:
        """So much writable memory, of undefined content, for the time of a ``with`` block: a buffer's, where it fits one."""
        if not self._size // POOLED_PART <= length <= self._size:
            yield memoryview(bytearray(length))
            return
        buffer = self.take()
        try:
            yield buffer[:length]
        finally:
            self.give(buffer)


def fresh(length: int) -> memoryview:
    """So many zero bytes, of which this process has only those pages in memory that it writes to."""
    # Mapped, not allocated: that would be cleared at once, and no other thread could run meanwhile.
    return memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


buffers = PerProcess(Buffers)
"""This process's `Buffers` of 16 MiB, a chunk's size."""
block_buffers = PerProcess(lambda: Buffers(BLOCK_BYTES))
"""Those of 1 MiB, a block's size."""
