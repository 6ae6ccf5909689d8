"""The content of a file that is being written, until all of it becomes the file's next version at once.

It lies in a private local file over the version that was opened. The local file has no name, so nothing of it outlives the mount's
process. Blocks that were not written come from the version opened; one that is written in part is taken over first.

A new file that is written from start to end lies in a `Writer` instead, so its bytes are copied once, and little is left to do when
it is closed. Whatever else is done to it, a read or a change before its end, first takes its bytes back into the local file.
"""

from __future__ import annotations

import contextlib
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
from tierfs.mount.errnos import refusal
from tierfs.store import Reader, Writer

__all__ = ["AHEAD_MAX", "StagedInode", "replaces"]

COPY_BYTES = 8 << 20
AHEAD_FROM_BYTES = 2 * BLOCK_BYTES
"""A smaller file is not worth a look at what its path holds before it is closed."""
AHEAD_WITHIN_S = 10.0
"""A file that takes longer until then is a log, say, and may stay open for days. A writer's chunks are not safe from garbage collection
for so long."""
AHEAD_MAX = 4
"""Files at a time. Each holds a chunk of the ram tier that cannot be freed before it is full."""
_logger = logging.getLogger("tierfs.mount")
_ahead_free = threading.BoundedSemaphore(AHEAD_MAX)


class StagedInode:
    """See the module. For one thread at a time; its node's lock sees to that.

    Args:
        directory: Where the local file lies.
        base: The version that was opened; ``None`` for a new or emptied file.

    Attributes:
        length: Bytes of the file now.
        kept: The first so many bytes are those of the version that is published.
        is_dirty: Whether something changed since it was published.
        was_written: Whether bytes were written since, and not only the length changed.
        is_refused: Whether it cannot be published any more, since somebody else changed the file.
        error: Why the bytes are lost, which `fsync` and ``close`` have to tell; ``None`` while they are not.
    """

    def __init__(self, directory: Path, base: Reader | None) -> None:
        self._fd = _nameless(directory)
        self._base = base
        self.length = base.length if base is not None else 0
        self._base_length = self.length  # what is behind was cut off once, and must not come back
        self._own: set[int] = set()  # blocks that lie in the local file
        self.kept = self.length
        self.is_dirty = self.was_written = self.is_refused = False
        self.error: BaseException | None = None
        self._writer: Writer | None = None  # has all bytes, and the local file none
        self._is_in_order = base is None  # every byte was written once, from start to end
        self._begun_s = 0.0  # when its first bytes were written

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from ``offset``, fewer at the end of the file. Raises as `Reader.read_into` does."""
        end = min(offset + size, self.length)
        if offset >= end:
            return b""
        self.take_back()
        out = bytearray(end - offset)
        self._read_into(offset, memoryview(out))
        return bytes(out)

    def write(self, offset: int, data: memoryview) -> int:
        """Put bytes at ``offset``, behind a hole of zeros where that is past the end.

        Raises:
            OSError: The local file cannot take them.
            TierfsError: The rest of a block that is written in part cannot be read.
        """
        end = offset + len(data)
        if not self.length:
            self._begun_s = time.monotonic()
        if self._writer is not None and offset == self.length:
            with self._losing():
                self._writer.write(data)
        else:
            self.take_back()
            self._write_here(offset, data)
        self._is_in_order = self._is_in_order and offset == self.length
        self.length = max(self.length, end)
        self._changed(offset)
        self.was_written = True
        return len(data)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """What the writer does; where it fails, the bytes that it has are lost."""
        try:
            yield
        except BaseException as error:
            self.error = error
            raise

    def _write_here(self, offset: int, data: memoryview) -> None:
        end = offset + len(data)
        if offset > self.length:
            self.resize(offset)
        first, last = offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        for block in {first, last}:
            is_whole = offset <= block * BLOCK_BYTES and end >= min((block + 1) * BLOCK_BYTES, self._base_length)
            if not is_whole:
                self._take_over(block)
        self._write_local(offset, data)
        self._own.update(range(first, last + 1))

    def write_ahead(self, make: Callable[[], Writer | None]) -> None:
        """Have a new file that was written from start to end so far go on in a writer, which ``make`` makes if there is to be one.

        A writer that fails here changes nothing: the local file has all bytes, and publishing them says what is wrong.
        """
        if self._writer is not None or not self._is_in_order or self.length < AHEAD_FROM_BYTES:
            return
        if time.monotonic() - self._begun_s > AHEAD_WITHIN_S:
            self._is_in_order = False
            return
        if not _ahead_free.acquire(blocking=False):
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
            _logger.debug("a file is not stored while it is written: %r", error)
        finally:
            if self._writer is None:
                _ahead_free.release()
                if writer is not None:
                    writer.abort()

    def take_writer(self, path: str, base: Manifest | None) -> Writer | None:
        """The writer that has all bytes, if there is one, now the caller's. One that does something else is taken back first.

        Args:
            path: What it is to write.
            base: What it is to replace there.

        Raises:
            TierfsError, OSError: As `take_back`; or what made the bytes be lost.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self._writer is not None and (self._writer.path != path or not replaces(self._writer, base)):
            self.take_back()
        writer, self._writer = self._writer, None
        if writer is not None:
            _ahead_free.release()
        return writer

    def take_back(self) -> None:
        """Have all bytes in the local file, where they can be read and changed in any order.

        Raises:
            TierfsError, OSError: They cannot be read, or the local file cannot take them. Then they are still where they were; or
                they are lost.
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
        """Have all bytes of a version in the local file, which has nothing else yet. Raises as `take_back` does."""
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
            _ahead_free.release()
            writer.abort()

    def resize(self, length: int) -> None:
        """Cut off what is behind, or add zeros."""
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
        elif length > self.length and self.length % BLOCK_BYTES:
            self._take_over(self.length // BLOCK_BYTES)
        self._changed(min(length, self.length))
        self.length = length

    def allocate(self, offset: int, length: int) -> None:
        """See that there is room for these bytes on the local disk."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, offset, length)

    def feed(self, writer: Writer, start: int = 0) -> None:
        """Hand everything from ``start`` to a writer. Raises as `Writer.write` and `Reader.read_into` do."""
        with buffers().lend(COPY_BYTES) as buffer:
            for offset in range(start, self.length, COPY_BYTES):
                piece = buffer[: min(COPY_BYTES, self.length - offset)]
                self._read_into(offset, piece)
                writer.write(piece)

    def published(self, base: Reader) -> None:
        """Take what was just published for the version that is opened."""
        self._base, self._base_length, self.kept = base, base.length, base.length
        self.is_dirty = self.was_written = self._is_in_order = False

    def close(self) -> None:
        """Give the local file up."""
        self._end_writer()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _changed(self, offset: int) -> None:
        self.kept = min(self.kept, offset)
        self.is_dirty = True

    def _take_over(self, block: int) -> None:
        """Have a block in the local file."""
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
        """Fill from the local file and the version below, both of which may be shorter than the file: the rest is zeros."""
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
        """Cut a range where the place changes: whether the local file has it, from where, how much."""
        at, end = offset, offset + size
        while at < end:
            is_own = self._base is None or at // BLOCK_BYTES in self._own
            stop = min(end, (at // BLOCK_BYTES + 1) * BLOCK_BYTES)
            while stop < end and (self._base is None or stop // BLOCK_BYTES in self._own) == is_own:
                stop = min(end, stop + BLOCK_BYTES)
            yield is_own, at, stop - at
            at = stop


def replaces(writer: Writer, base: Manifest | None) -> bool:
    """Whether a writer found this version when it was made."""
    there = writer.replaces
    return (there.write_id if there is not None else None) == (base.write_id if base is not None else None)


def _nameless(directory: Path) -> int:
    """A file without a name in ``directory``.

    Raises:
        OSError: There can be none; ENOSPC where the disk is full.
    """
    with contextlib.suppress(OSError, AttributeError):
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fd, name = tempfile.mkstemp(dir=directory)
    except OSError as error:
        raise refusal(error.errno or errno.EIO, f"a file cannot be staged in {directory}: {error.strerror}") from error
    os.unlink(name)
    return fd
