"""nvme.paths: how many drafts of the index lie at or below each path, so that readers can skip most queries.

A query of the index waits while the writer commits, and the writer commits all the time while small files are saved.
Most files that readers look up have no draft. The counts are kept by a hash of the path, so several paths share a
count. A count of 0 means that no draft is at or below the path.

A count is never too low. The writer raises it before it commits a draft, and lowers it after it has removed the row.
Readers ignore a file that belongs to another run of the kernel or to a replaced index: its counts may be out of date.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash

from tierfs.clock import boot_id
from tierfs.host.nvme.disk_errors import disk_errors

COUNTS = 1 << 16
_HEAD = struct.Struct("<8s16sQQ")
_MAGIC = b"TFSPATH1"
_COUNT = struct.Struct("<I")
_SIZE = _HEAD.size + COUNTS * _COUNT.size


def _head(index: Path) -> bytes:
    """Return the head that the file has if it belongs to the present index and this run of the kernel."""
    status = os.stat(index)
    return _HEAD.pack(_MAGIC, bytes.fromhex(_BOOT), status.st_dev, status.st_ino)


def _place(path: str) -> int:
    return _HEAD.size + _COUNT.size * (xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogateescape")) % COUNTS)


def _places(path: str) -> list[int]:
    """Return the offsets of the counts of a path and of all directories above it."""
    parts = path.split("/")
    return [_place("/".join(parts[:depth])) for depth in range(len(parts) + 1)]


class PathCounter:
    """Maintains the counts for the writer. Its caller holds the lock of the index during each call.

    Args:
        path: The file, created if missing. If the disk has no room for it, readers query the index.
        index: The database.

    Raises:
        StoreError: The file cannot be opened.
    """

    def __init__(self, path: Path, index: Path) -> None:
        self._path = path
        self._index = index
        with disk_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._closing = weakref.finalize(self, os.close, self._fd)
            # At exit a thread may still write here, and the descriptor may be reused meanwhile.
            self._closing.atexit = False
            self._is_whole = os.fstat(self._fd).st_size >= _SIZE
        if not self._is_whole:
            with contextlib.suppress(OSError):
                os.posix_fallocate(self._fd, 0, _SIZE)
                self._is_whole = True

    def renew(self, paths: Iterable[str]) -> None:
        """Count the drafts at these paths from scratch. The writer calls this after it opens the index."""
        if not self._is_whole:
            return
        counts = np.zeros(COUNTS, "<u4")
        for path in paths:
            for place in _places(path):
                counts[(place - _HEAD.size) // _COUNT.size] += 1
        with disk_errors(self._path):
            head = _head(self._index)
            if os.pread(self._fd, len(head), 0) != head:
                os.pwrite(self._fd, bytes(len(head)), 0)
            os.pwrite(self._fd, counts.tobytes(), _HEAD.size)
            os.pwrite(self._fd, head, 0)

    def add(self, paths: Iterable[str], by: int) -> None:
        """Add ``by`` to the counts of each path: 1 before drafts are committed, -1 after their rows are removed."""
        if not self._is_whole:
            return
        with disk_errors(self._path):
            for path in paths:
                for place in _places(path):
                    (count,) = _COUNT.unpack(os.pread(self._fd, _COUNT.size, place))
                    os.pwrite(self._fd, _COUNT.pack(max(count + by, 0)), place)

    def close(self) -> None:
        self._is_whole = False
        self._closing()


class PathCounts:
    """Reads the counts. Thread-safe.

    Args:
        path: The file. It need not exist.
        index: The database.
    """

    def __init__(self, path: Path, index: Path) -> None:
        self._path = path
        self._index = index
        self._lock = threading.Lock()
        self._fd = -1
        self._closing: weakref.finalize[..., PathCounts] | None = None

    def is_clear(self, path: str) -> bool:
        """Return whether the index certainly has no draft at or below ``path``; ``""`` is the root."""
        try:
            with self._lock:
                if self._closing is None:
                    self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                    self._closing = weakref.finalize(self, os.close, self._fd)
                    self._closing.atexit = False
                if os.pread(self._fd, _HEAD.size, 0) != _head(self._index):
                    return False
                return os.pread(self._fd, _COUNT.size, _place(path)) == bytes(_COUNT.size)
        except OSError:
            return False

    def close(self) -> None:
        """Close the file. The next `is_clear` opens it again."""
        with self._lock:
            if self._closing is not None:
                self._closing()
                self._closing = None


_BOOT = boot_id()
