"""A file read and written past the page cache, or through it where the filesystem refuses that."""

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

__all__ = ["DirectFile"]

CALL_BYTES = 1 << 20
"""Bytes of one call to the disk. With more, it gets requests of several MiB, of which it was measured to take less in the same time.
docs/decisions/0046."""

_logger = logging.getLogger("tierfs.local")
_pages = AlignedBuffers(PAGE_BYTES, keep_max=8)


class DirectFile:
    """An open file. Offsets, lengths and the memory that is lent are page-aligned; safe for use by many threads.

    Args:
        path: An existing file's.
        writable: Whether it will be written.

    Attributes:
        direct: Whether the page cache is passed by.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        with disk_errors(path):
            self.fd, self.direct = self._open((os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        # Other threads may be reading while a successor takes this one's place: the last of them closes it.
        self._close = weakref.finalize(self, os.close, self.fd)

    def __repr__(self) -> str:
        return f"DirectFile({str(self.path)!r}, direct={self.direct})"

    def size(self) -> int:
        """Bytes of the file now."""
        with disk_errors(self.path):
            return os.fstat(self.fd).st_size

    def read(self, pieces: list[memoryview], offset: int) -> None:
        """Fill all pieces from ``offset`` on.

        Raises:
            StoreError: It could not be read, or ends before.
        """
        with disk_errors(self.path):
            while pieces:
                count = os.preadv(self.fd, _first(pieces), offset)
                if not count:
                    raise StoreError(f"{self.path}: ends before byte {offset}: it was cut short", tier="nvme")
                pieces, offset = _rest(pieces, count), offset + count

    def write(self, pieces: list[memoryview], offset: int) -> None:
        """Write all pieces from ``offset`` on. Not flushed."""
        with disk_errors(self.path):
            while pieces:
                count = os.pwritev(self.fd, _first(pieces), offset)
                pieces, offset = _rest(pieces, count), offset + count

    def next_data(self, at: int) -> int | None:
        """Where, from ``at`` on, something was written for the first time; None if nowhere; ``at`` if that is not known."""
        try:
            return os.lseek(self.fd, at, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else at

    def close(self) -> None:
        """Close it. Nobody may be using it."""
        self._close()

    def _open(self, flags: int) -> tuple[int, bool]:
        with contextlib.suppress(OSError):
            fd = os.open(self.path, flags | os.O_DIRECT)
            try:
                with _pages.lend() as page:
                    # Some filesystems refuse only when it comes to reading.
                    os.preadv(fd, [page], 0)
            except OSError:
                os.close(fd)
            else:
                return fd, True
        fd = os.open(self.path, flags)
        _logger.warning("%s: the filesystem refuses O_DIRECT; reading and writing through the page cache", self.path)
        return fd, False


def _first(pieces: list[memoryview]) -> list[memoryview]:
    """The part of ``pieces`` for one call."""
    found, length = [], 0
    for piece in pieces:
        found.append(piece[: CALL_BYTES - length])
        length += len(found[-1])
        if length == CALL_BYTES:
            break
    return found


def _rest(pieces: list[memoryview], done: int) -> list[memoryview]:
    """The rest of ``pieces`` when their first ``done`` bytes are through."""
    for index, piece in enumerate(pieces):
        if done < len(piece):
            return [piece[done:], *pieces[index + 1 :]]
        done -= len(piece)
    return []
