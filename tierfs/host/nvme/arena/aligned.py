"""Page-aligned memory for O_DIRECT: a pool of buffers, and a copy that releases the GIL."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Iterator

import numpy as np

from tierfs.host.ground import PAGE_BYTES


class AlignedBuffers:
    """A pool of page-aligned buffers of one size. Touching new pages for the first time costs more than a copy.

    Thread-safe without a lock, and therefore usable after a fork.

    Args:
        size: Bytes of each buffer.
        keep_max: Number of free buffers that the pool keeps. More may be lent at a time.
    """

    def __init__(self, size: int, *, keep_max: int) -> None:
        self.size = size
        self._free: deque[memoryview] = deque(maxlen=keep_max)

    def __repr__(self) -> str:
        return f"AlignedBuffers({self.size}, free={len(self._free)}, keep_max={self._free.maxlen})"

    @contextlib.contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Lend a writable buffer until the block ends. Its content is undefined."""
        try:
            buffer = self._free.pop()
        except IndexError:
            # Private: mmap shares pages by default, also with a forked child.
            buffer = memoryview(mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        try:
            yield buffer
        finally:
            self._free.append(buffer)


def is_aligned(data: memoryview) -> bool:
    """Return whether the bytes begin at a page boundary in memory, or are empty."""
    if not len(data):
        return True
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal length. Releases the GIL, unlike assigning a slice of a memoryview."""
    if len(target):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
