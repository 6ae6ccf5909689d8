"""Memory that O_DIRECT can use: pages lent from a pool, and copies that let other threads run meanwhile."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Iterator

import numpy as np

from tierfs.host.ground import PAGE_BYTES

__all__ = ["AlignedBuffers", "copy_bytes", "is_aligned"]


class AlignedBuffers:
    """Page-aligned buffers of one size, used again and again, since the first touch of fresh pages costs more than a copy.

    Safe for use by many threads without a lock, so also after a fork.

    Args:
        size: Bytes of each buffer.
        keep_max: How many stay for the next caller; more may be lent at a time.
    """

    def __init__(self, size: int, *, keep_max: int) -> None:
        self.size = size
        self._free: deque[memoryview] = deque(maxlen=keep_max)

    def __repr__(self) -> str:
        return f"AlignedBuffers({self.size}, free={len(self._free)}, keep_max={self._free.maxlen})"

    @contextlib.contextmanager
    def lend(self) -> Iterator[memoryview]:
        """A writable buffer for as long as the block runs. Its content is whatever was left in it."""
        try:
            buffer = self._free.pop()
        except IndexError:
            # Private: the pages that mmap shares by default would be one and the same in a forked child.
            buffer = memoryview(mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        try:
            yield buffer
        finally:
            self._free.append(buffer)


def is_aligned(data: memoryview) -> bool:
    """Whether the bytes begin at a page in memory."""
    if not len(data):
        return True
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal length. Releases the GIL, unlike assigning a slice of a memoryview."""
    if len(target):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
