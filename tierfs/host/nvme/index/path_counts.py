"""nvme.paths: how many drafts of the index lie at or below each path, for readers that have nothing to look for there.

A query of the index waits while the writer commits, which it does all the time while small files are saved. Most files that are looked
for are not in it. The counts are kept by a hash of the path, so several paths share one; 0 means that no draft is there.

A count is never too low for those who look. The writer raises it before it commits a draft, and lowers it after the row is gone. A file
of another run of the kernel, or of an index that was replaced, says nothing: after a crash of the host it may be old.
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

__all__ = ["PathCounter", "PathCounts"]

COUNTS = 1 << 16
_HEAD = struct.Struct("<8s16sQQ")
_MAGIC = b"TFSPATH1"
_COUNT = struct.Struct("<I")
_SIZE = _HEAD.size + COUNTS * _COUNT.size


def _head(index: Path) -> bytes:
    """What the file begins with if it is of the index that is there now, in this run of the kernel."""
    status = os.stat(index)
    return _HEAD.pack(_MAGIC, bytes.fromhex(_BOOT), status.st_dev, status.st_ino)


def _place(path: str) -> int:
    return _HEAD.size + _COUNT.size * (xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogateescape")) % COUNTS)


def _places(path: str) -> list[int]:
    """Where the counts of a path are, and of all directories above it."""
    parts = path.split("/")
    return [_place("/".join(parts[:depth])) for depth in range(len(parts) + 1)]


class PathCounter:
    """The writer's side; the index is locked for each call.

    Args:
        path: The file; made where it is missing. Where the disk has no room for it, readers ask the index.
        index: The database.

    Raises:
        StoreError: It cannot be opened.
    """

    def __init__(self, path: Path, index: Path) -> None:
        self._path = path
        self._index = index
        with disk_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._closing = weakref.finalize(self, os.close, self._fd)
            self._closing.atexit = False  # at exit a thread may still write there, and the number be another file's
            self._is_whole = os.fstat(self._fd).st_size >= _SIZE
        if not self._is_whole:
            with contextlib.suppress(OSError):
                os.posix_fallocate(self._fd, 0, _SIZE)
                self._is_whole = True

    def renew(self, paths: Iterable[str]) -> None:
        """Count anew, since the index was opened."""
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
        """Count so many drafts more of each path: 1 before they are committed, -1 when their rows are gone."""
        if not self._is_whole:
            return
        with disk_errors(self._path):
            for path in paths:
                for place in _places(path):
                    (count,) = _COUNT.unpack(os.pread(self._fd, _COUNT.size, place))
                    os.pwrite(self._fd, _COUNT.pack(max(count + by, 0)), place)

    def close(self) -> None:
        """Close the file."""
        self._is_whole = False
        self._closing()


class PathCounts:
    """The readers' side. Safe for use by many threads.

    Args:
        path: The file; need not be there.
        index: The database.
    """

    def __init__(self, path: Path, index: Path) -> None:
        self._path = path
        self._index = index
        self._lock = threading.Lock()
        self._fd = -1
        self._closing: weakref.finalize[..., PathCounts] | None = None

    def is_clear(self, path: str) -> bool:
        """Whether it is certain that the index has no draft at or below ``path``; ``""`` is the root."""
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
        """Close the file; the next look opens it again."""
        with self._lock:
            if self._closing is not None:
                self._closing()
                self._closing = None


_BOOT = boot_id()
