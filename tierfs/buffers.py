"""Pools of reusable buffers: touching fresh memory takes longer than copying into warm memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

from tierfs._fork import PerProcess
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES

PAGE_BYTES = 4096
"""Alignment of all data in the local tiers."""
KEPT_MAX = 8
# Below this fraction of a buffer's size, allocating memory is as fast as pooling it.
POOLED_PART = 16


class Buffers:
    """A pool of buffers of one size. Safe for use by many threads.

    Keeps as many free buffers as are in use, and at least ``kept``.

    Args:
        size: Bytes of each buffer.
        kept: Number of free buffers to keep if fewer are in use.
    """

    def __init__(self, size: int = CHUNK_BYTES, kept: int = KEPT_MAX) -> None:
        self._size = size
        self._kept_max = kept
        self._taken = 0
        # Reentrant: the garbage collector may run while the lock is held, and a collected object may return a buffer.
        self._lock = threading.RLock()
        self._free: list[memoryview] = []

    def __repr__(self) -> str:
        return f"Buffers({self._taken} taken, {len(self._free)} free)"

    def take(self) -> memoryview:
        """Take a buffer. Its content is undefined; return it with `give`."""
        with self._lock:
            if self._free:
                self._taken += 1
                return self._free.pop()
        memory = fresh(self._size)
        with self._lock:
            self._taken += 1
        return memory

    def give(self, buffer: memoryview) -> None:
        """Return a buffer; the caller must not use it any more."""
        with self._lock:
            self._taken -= 1
            self._free.append(buffer)
            # A discarded write may never return its buffer. Each such buffer makes the pool keep at most one more.
            del self._free[max(self._kept_max, self._taken) :]

    @contextlib.contextmanager
    def lend(self, length: int) -> Iterator[memoryview]:
        """Yield ``length`` writable bytes of undefined content, valid in the ``with`` block.

        They are part of a pooled buffer if they fit into one and are not much smaller.
        """
        if not self._size // POOLED_PART <= length <= self._size:
            yield memoryview(bytearray(length))
            return
        buffer = self.take()
        try:
            yield buffer[:length]
        finally:
            self.give(buffer)


def fresh(length: int) -> memoryview:
    """Return ``length`` zero bytes; only the pages that this process writes to take memory."""
    # Mapped, because `bytearray` would clear the memory at once, and hold the GIL while it does.
    return memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


buffers = PerProcess(Buffers)
"""This process's `Buffers` of 16 MiB, a chunk's size."""
block_buffers = PerProcess(lambda: Buffers(BLOCK_BYTES))
"""This process's `Buffers` of 1 MiB, a block's size."""
