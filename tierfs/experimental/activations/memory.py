"""The memory that offloaded bytes may take: slots of host memory within a budget, and extents of one unlinked file."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import weakref
from collections import deque
from pathlib import Path

from tierfs.buffers import PAGE_BYTES
from tierfs.digest import CHUNK_BYTES
from tierfs.host.filesystems import disk_errors
from tierfs.host.nvme.chunk_file import padded_pages, transfer
from tierfs.host.slab.allocate import FreeRanges
from tierfs.host.slab.table import padded

_logger = logging.getLogger("tierfs.activations")


class PageRange:
    """A part of a `Space`: page-aligned, whole pages. It is free again once its last reference is gone."""

    def __init__(self, at: int, length: int, gone: deque[tuple[int, int]]) -> None:
        self.at, self.length, self._gone = at, length, gone

    def __del__(self) -> None:
        self._gone.append((self.at, self.length))  # any thread may run this, even one that holds a lock


class Space:
    """A range of bytes. Not thread-safe. ``most_bytes`` is the most that was taken at once."""

    def __init__(self, size: int) -> None:
        self.size = size // PAGE_BYTES * PAGE_BYTES
        self.most_bytes = self._taken_bytes = 0
        self._free = FreeRanges()
        self._free.give(0, self.size)
        self._gone: deque[tuple[int, int]] = deque()

    @property
    def taken_bytes(self) -> int:
        """Bytes of all parts."""
        while self._gone:
            at, length = self._gone.popleft()
            self._free.give(at, at + length)
            self._taken_bytes -= length
        return self._taken_bytes

    def take(self, length: int) -> PageRange | None:
        """Return a free part, or None if there is no room."""
        taken, length = self.taken_bytes, padded(length)
        at = self._free.take(length)
        if at is None:
            return None
        self._taken_bytes = taken + length
        self.most_bytes = max(self.most_bytes, self._taken_bytes)
        return PageRange(at, length, self._gone)


class SpillFile(Space):
    """A file without a name: the kernel frees it when the process ends, however it ends. With ``size=0`` there is none.

    `write` and `read` are thread-safe, on different parts.
    """

    def __init__(self, directory: Path, size: int) -> None:
        super().__init__(size)
        self._directory = directory
        if not self.size:
            return
        with disk_errors(directory):
            self._file = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115 - open as long as this object
        weakref.finalize(self, self._file.close)
        fd = self._file.fileno()
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:
            _logger.warning("%s: the filesystem refuses O_DIRECT, so activations pass the page cache", directory)

    def write(self, part: PageRange, data: memoryview) -> None:
        """Write bytes to a part. Page-aligned memory saves a copy.

        Raises:
            CapacityError, StoreError: The disk is full, or fails. The part's content is undefined.
        """
        with disk_errors(self._directory):
            for begin in range(0, len(data), CHUNK_BYTES):
                with padded_pages(data[begin : begin + CHUNK_BYTES]) as pieces:
                    transfer(os.pwritev, self._file.fileno(), pieces, part.at + begin)

    def read(self, part: PageRange, out: memoryview) -> None:
        """Fill page-aligned memory, whole pages, from a part. Raises `StoreError` if the disk fails."""
        with disk_errors(self._directory):
            transfer(os.preadv, self._file.fileno(), [out], part.at)
