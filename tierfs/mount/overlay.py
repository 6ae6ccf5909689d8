"""The content of a file that is being written, until all of it is published at once as the next version.

The content is a private local file laid over the version that was opened. The local file has no name, so it disappears
with the mount's process. Blocks that were not written come from the opened version. A block that is written in part is
first copied to the local file.

A new file that is written from start to end goes to a `Writer` instead. Its bytes are then copied once, and little work
is left for ``close``. Any other operation, such as a read or a change before its end, first copies the bytes back to
the local file.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import TierfsError
from tierfs.format.manifest import Manifest
from tierfs.mount.wire import refusal
from tierfs.store import Reader, Writer

COPY_BYTES = 8 << 20
AHEAD_FROM_BYTES = 2 * BLOCK_BYTES
"""For a smaller file, it does not pay to read the record of its path before ``close``."""
AHEAD_WITHIN_S = 10.0
"""A file that takes longer to reach that size may be a log, and stay open for days. A writer's chunks are not safe from
garbage collection for so long."""
AHEAD_MAX = 4
"""Files that go to a writer at a time. Each holds a chunk of the ram tier that cannot be freed before it is full."""
_logger = logging.getLogger("tierfs.mount")
ahead_free = threading.BoundedSemaphore(AHEAD_MAX)


class Change(enum.Enum):
    """The change of a file since it was published. `_REACHED_FROM` has the transitions."""

    NONE = "the file is as it was published"
    LENGTH = "its length was changed, which is published after its last ``close``"
    BYTES = "bytes were written, which ``close`` publishes"
    REFUSED = "another writer changed the file, so it cannot be published any more"


_REACHED_FROM = {
    Change.NONE: set(Change) - {Change.REFUSED},
    Change.LENGTH: {Change.NONE},
    Change.BYTES: {Change.NONE, Change.LENGTH},
    Change.REFUSED: set(Change),
}


class OverlaidInode:
    """The content of a file that is being written. Not thread-safe: the caller holds the lock of the node.

    Args:
        directory: Holds the local file.
        base: The version that was opened. ``None`` for a new or emptied file.
        change: The change at the beginning.

    Attributes:
        length: Current length of the file in bytes.
        kept: Number of bytes at the start that equal the published version.
        change: The change since the file was published.
        begun_s: When the first bytes were written, by `time.monotonic`.
        error: The reason why the bytes are lost, which ``fsync`` and ``close`` report. ``None`` if they are not lost.
    """

    def __init__(self, directory: Path, base: Reader | None, change: Change = Change.NONE) -> None:
        self._fd = _nameless(directory)
        self._base = base
        self.length = base.length if base is not None else 0
        self._base_length = self.length  # bytes behind it were cut off, and must not reappear
        self._own: set[int] = set()  # blocks that lie in the local file
        self.kept = self.length
        self.change = change
        self.error: BaseException | None = None
        self._writer: Writer | None = None  # if set, it has all bytes, and the local file has none
        self._is_in_order = base is None  # a new file, with every byte written once from start to end
        self.begun_s = 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether a writer has the bytes already."""
        return self._writer is not None

    def read(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset``, fewer at the end of the file.

        Raises the errors of `Reader.read_into`.
        """
        end = min(offset + size, self.length)
        if offset >= end:
            return b""
        self.take_back()
        out = bytearray(end - offset)
        self._read_into(offset, memoryview(out))
        return bytes(out)

    def write(self, offset: int, data: memoryview) -> int:
        """Write bytes at ``offset``. Zeros fill a gap behind the end of the file.

        Raises:
            OSError: The local file cannot take the bytes.
            TierfsError: The rest of a block that is written in part cannot be read, or the writer failed.
        """
        end = offset + len(data)
        if not self.length:
            self.begun_s = time.monotonic()
        if self._writer is not None and offset == self.length:
            with self._losing():
                self._writer.write(data)
        else:
            self.take_back()
            self._write_here(offset, data)
        self._is_in_order = self._is_in_order and offset == self.length
        self.length = max(self.length, end)
        self._changed(offset, Change.BYTES)
        return len(data)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Record an error of the writer, because the bytes that it holds are lost then."""
        try:
            yield
        except BaseException as error:
            self.error = error
            raise

    def _write_here(self, offset: int, data: memoryview) -> None:
        end = offset + len(data)
        if offset > self.length and self.length % BLOCK_BYTES:
            self._take_over(self.length // BLOCK_BYTES)
        first, last = offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        for block in {first, last}:
            is_whole = offset <= block * BLOCK_BYTES and end >= min((block + 1) * BLOCK_BYTES, self._base_length)
            if not is_whole:
                self._take_over(block)
        try:
            self._write_local(offset, data)
        except OSError:
            if end > self.length:
                os.ftruncate(self._fd, self.length)  # part of the data may lie behind the end
            raise
        self._own.update(range(first, last + 1))

    def write_ahead(self, make: Callable[[], Writer | None]) -> None:
        """Move a new file to a writer, if it was written from start to end so far. Later bytes go there directly.

        ``make`` makes the writer, or returns ``None`` to keep the local file. If the writer fails here, nothing
        changes: the local file has all bytes, and publishing them raises the error.
        """
        if self._writer is not None or not self._is_in_order or self.length < AHEAD_FROM_BYTES:
            return
        if time.monotonic() - self.begun_s > AHEAD_WITHIN_S:
            self._is_in_order = False
            return
        if not ahead_free.acquire(blocking=False):
            return
        self._is_in_order = False  # so it is tried once
        writer = None
        try:
            writer = make()
            if writer is not None:
                self.feed(writer)
                os.ftruncate(self._fd, 0)
                self._own.clear()
                self._writer = writer
        except (TierfsError, OSError) as error:
            _logger.debug("a file cannot be stored while it is being written: %r", error)
        finally:
            if self._writer is None:
                ahead_free.release()
                if writer is not None:
                    writer.abort()

    def take_writer(self, path: str, base: Manifest | None) -> Writer | None:
        """Return the writer that has all bytes, if there is one. The caller owns it then.

        If the writer does not publish at ``path``, or replaces another version than ``base``, copy its bytes back to
        the local file and return ``None``. Raises as `take_back` does.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self._writer is not None and (self._writer.path != path or not replaces(self._writer, base)):
            self.take_back()
        writer, self._writer = self._writer, None
        if writer is not None:
            ahead_free.release()
        return writer

    def take_back(self) -> None:
        """Copy all bytes from the writer back to the local file, where they can be read and changed in any order.

        Raises:
            TierfsError, OSError: The bytes cannot be read or written, and stay in the writer. Or they are lost, and
                this is the reason (`error`).
        """
        if self.error is not None:
            raise self.error.with_traceback(None)
        writer = self._writer
        if writer is None:
            return
        with self._losing():
            reader = writer.read_back()
        try:
            self.fill_from(reader)
        except BaseException:
            os.ftruncate(self._fd, 0)
            raise
        self._end_writer()

    def fill_from(self, reader: Reader) -> None:
        """Copy all bytes of a version to the local file, which must be empty. Raises the errors of `take_back`."""
        with buffers().lend(COPY_BYTES) as buffer:
            for offset in range(0, reader.length, COPY_BYTES):
                piece = buffer[: min(COPY_BYTES, reader.length - offset)]
                reader.read_into(offset, piece)
                self._write_local(offset, piece)
        self._own.update(range(-(-reader.length // BLOCK_BYTES)))
        self.length = reader.length
        self._is_in_order = False

    def _end_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            ahead_free.release()
            writer.abort()

    def resize(self, length: int) -> None:
        """Cut the file at ``length``, or append zeros up to it.

        Raises:
            OSError: The local file cannot have this length. The content is unchanged.
            TierfsError: The last block that stays cannot be read, or the writer failed.
        """
        if length == self.length:
            return
        if length or self.error is not None:
            self.take_back()
        else:
            self._end_writer()
        self._is_in_order = False
        if length < self.length:
            if length % BLOCK_BYTES:
                self._take_over(length // BLOCK_BYTES)
            self._base_length = min(self._base_length, length)
            os.ftruncate(self._fd, length)
        else:
            if self.length % BLOCK_BYTES:
                self._take_over(self.length // BLOCK_BYTES)
            os.ftruncate(self._fd, length)  # the local disk has a largest size of a file
        self._changed(min(length, self.length), Change.LENGTH)
        self.length = length

    def allocate(self, offset: int, length: int) -> None:
        """Reserve room for these bytes on the local disk."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, offset, length)

    def feed(self, writer: Writer, start: int = 0, check: Callable[[], object] = lambda: None) -> None:
        """Pass all bytes from ``start`` to a writer, and call ``check`` before each piece. Raises the errors of all."""
        with buffers().lend(COPY_BYTES) as buffer:
            for offset in range(start, self.length, COPY_BYTES):
                check()
                piece = buffer[: min(COPY_BYTES, self.length - offset)]
                self._read_into(offset, piece)
                writer.write(piece)

    def published(self, base: Reader) -> None:
        """Use the version that was just published as the base."""
        self._base, self._base_length, self.kept = base, base.length, base.length
        self.enter(Change.NONE)
        self._is_in_order = False

    def close(self) -> None:
        """Close the local file, and abort the writer."""
        self._end_writer()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def enter(self, change: Change) -> None:
        """Note a change, if `_REACHED_FROM` allows it after the present one."""
        if self.change in _REACHED_FROM[change]:
            self.change = change

    def _changed(self, offset: int, change: Change) -> None:
        self.kept = min(self.kept, offset)
        self.enter(change)

    def _take_over(self, block: int) -> None:
        """Copy a block of the base to the local file, unless it lies there already."""
        start = block * BLOCK_BYTES
        count = min(BLOCK_BYTES, self._base_length - start)
        if block in self._own or self._base is None or count <= 0:
            self._own.add(block)
            return
        piece = memoryview(bytearray(count))
        self._base.read_into(start, piece)
        self._write_local(start, piece)
        self._own.add(block)

    def _write_local(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)

    def _read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` from the local file and the base. Both may be shorter than the file; the rest is zeros."""
        for is_own, start, count in self._runs(offset, len(out)):
            part = out[start - offset : start - offset + count]
            if is_own:
                done = 0
                while done < count and (got := os.preadv(self._fd, [part[done:]], start + done)):
                    done += got
            else:
                done = max(0, min(count, self._base_length - start))
                if done and self._base is not None:
                    self._base.read_into(start, part[:done])
            if done < count:
                part[done:] = bytes(count - done)

    def _runs(self, offset: int, size: int) -> Iterator[tuple[bool, int, int]]:
        """Split a range into runs of one source. Yields whether it is the local file, the offset and the length."""
        at, end = offset, offset + size
        while at < end:
            is_own = self._base is None or at // BLOCK_BYTES in self._own
            stop = min(end, (at // BLOCK_BYTES + 1) * BLOCK_BYTES)
            while stop < end and (self._base is None or stop // BLOCK_BYTES in self._own) == is_own:
                stop = min(end, stop + BLOCK_BYTES)
            yield is_own, at, stop - at
            at = stop


def replaces(writer: Writer, base: Manifest | None) -> bool:
    """Whether a writer found this version at its path when it was made, and so replaces it."""
    there = writer.replaces
    return (there.write_id if there is not None else None) == (base.write_id if base is not None else None)


def _nameless(directory: Path) -> int:
    """Open a file without a name in ``directory``. Returns its descriptor.

    Raises:
        OSError: The file cannot be made. ENOSPC if the disk is full.
    """
    with contextlib.suppress(OSError, AttributeError):
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fd, name = tempfile.mkstemp(dir=directory)
    except OSError as error:
        raise refusal(error.errno or errno.EIO, f"a file cannot be staged in {directory}: {error.strerror}") from error
    os.unlink(name)
    return fd
