"""A file with O_DIRECT, or with the page cache if the filesystem does not support O_DIRECT."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import weakref
from pathlib import Path

from tierfs.errors import StoreError
from tierfs.host.ground import PAGE_BYTES
from tierfs.host.nvme.arena.aligned import AlignedBuffers
from tierfs.host.nvme.disk_errors import disk_errors

CALL_BYTES = 1 << 20
"""Bytes of one call. Longer calls make requests of several MiB, which the measured disk processes more slowly:
docs/decisions/0046."""

_logger = logging.getLogger("tierfs.local")
_pages = AlignedBuffers(PAGE_BYTES, keep_max=8)


class DirectFile:
    """An open file. The caller passes page-aligned offsets, lengths and memory. Thread-safe.

    Args:
        path: An existing file.
        writable: Whether to open it for writing, too.

    Attributes:
        direct: Whether reads and writes bypass the page cache.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        with disk_errors(path):
            self.fd, self.direct = self._open((os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        # Other threads may still read when a new object replaces this one. The last reference closes the file.
        self._close = weakref.finalize(self, os.close, self.fd)

    def __repr__(self) -> str:
        return f"DirectFile({str(self.path)!r}, direct={self.direct})"

    def size(self) -> int:
        """Return the present size of the file in bytes."""
        with disk_errors(self.path):
            return os.fstat(self.fd).st_size

    def read(self, pieces: list[memoryview], offset: int) -> None:
        """Fill all pieces with the bytes from ``offset`` on.

        Raises:
            StoreError: The file could not be read, or is too short.
        """
        with disk_errors(self.path):
            while pieces:
                count = os.preadv(self.fd, _first(pieces), offset)
                if not count:
                    raise StoreError(f"{self.path}: ends before byte {offset}: it was cut short", tier="nvme")
                pieces, offset = _rest(pieces, count), offset + count

    def write(self, pieces: list[memoryview], offset: int) -> None:
        """Write all pieces at ``offset``, one after the other. This does not flush them."""
        with disk_errors(self.path):
            while pieces:
                count = os.pwritev(self.fd, _first(pieces), offset)
                pieces, offset = _rest(pieces, count), offset + count

    def next_data(self, at: int) -> int | None:
        """Return the first offset from ``at`` on that holds written data.

        None if there is none; ``at`` if the filesystem cannot tell.
        """
        try:
            return os.lseek(self.fd, at, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else at

    def close(self) -> None:
        """Close the file. No other thread may be using it."""
        self._close()

    def _open(self, flags: int) -> tuple[int, bool]:
        with contextlib.suppress(OSError):
            fd = os.open(self.path, flags | os.O_DIRECT)
            try:
                with _pages.lend() as page:
                    # Some filesystems accept O_DIRECT at open and fail at the first read.
                    os.preadv(fd, [page], 0)
            except OSError:
                os.close(fd)
            else:
                return fd, True
        fd = os.open(self.path, flags)
        _logger.warning("%s: the filesystem refuses O_DIRECT; reading and writing through the page cache", self.path)
        return fd, False


def _first(pieces: list[memoryview]) -> list[memoryview]:
    """Return the part of ``pieces`` for one call: at most `CALL_BYTES`."""
    found, length = [], 0
    for piece in pieces:
        found.append(piece[: CALL_BYTES - length])
        length += len(found[-1])
        if length == CALL_BYTES:
            break
    return found


def _rest(pieces: list[memoryview], done: int) -> list[memoryview]:
    """Return ``pieces`` without their first ``done`` bytes."""
    for index, piece in enumerate(pieces):
        if done < len(piece):
            return [piece[done:], *pieces[index + 1 :]]
        done -= len(piece)
    return []
