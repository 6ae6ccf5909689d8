"""The content of a file that is being written: a private local file over the version that was opened.

The local file has no name, so nothing of it outlives the mount's process. Blocks that were not written come from the version
opened; one that is written in part is taken over first. `publish` makes all of it the file's next version at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES
from tierfs.mount.errnos import refusal
from tierfs.mount.feeding import FEED_FROM_BYTES, Feeding
from tierfs.store import Reader, Writer

__all__ = ["StagedInode"]

COPY_BYTES = 8 << 20


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
        gapless: The first so many bytes were written one after the other.
        feeding: Stores them meanwhile, if anything does.
    """

    def __init__(self, directory: Path, base: Reader | None) -> None:
        self._fd = _nameless(directory)
        self._base = base
        self.length = base.length if base is not None else 0
        self._base_length = self.length  # what is behind was cut off once, and must not come back
        self._own: set[int] = set()  # blocks that lie in the local file
        self.kept = self.length
        self.is_dirty = self.was_written = self.is_refused = False
        self.gapless = 0
        self.feeding: Feeding | None = None
        self._was_fed = False

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from ``offset``, fewer at the end of the file. Raises as `Reader.read_into` does."""
        end = min(offset + size, self.length)
        if offset >= end:
            return b""
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
        if offset > self.length:
            self.resize(offset)
        first, last = offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        for block in {first, last}:
            is_whole = offset <= block * BLOCK_BYTES and end >= min((block + 1) * BLOCK_BYTES, self._base_length)
            if not is_whole:
                self._take_over(block)
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)
        self._own.update(range(first, last + 1))
        self.length = max(self.length, end)
        self._changed(offset)
        self.was_written = True
        if offset <= self.gapless:
            self.gapless = max(self.gapless, end)
        return len(data)

    def feed_ahead(self, make: Callable[[], Writer]) -> None:
        """Have a new file stored while it is being written, by a writer that ``make`` makes."""
        if self.feeding is None and self._base is None and self.gapless >= FEED_FROM_BYTES and not self._was_fed:
            self.feeding = Feeding.start(self._fd, make)
            self._was_fed = self.feeding is not None
        if self.feeding is not None:
            self.feeding.grown(self.gapless)

    def fed(self) -> tuple[Writer, int] | None:
        """The writer that has the start of the file, and how much of it; it is the caller's."""
        feeding, self.feeding = self.feeding, None
        return feeding.finish() if feeding is not None else None

    def resize(self, length: int) -> None:
        """Cut off what is behind, or add zeros."""
        if length < self.length:
            if length % BLOCK_BYTES:
                self._take_over(length // BLOCK_BYTES)
            self._base_length = min(self._base_length, length)
            os.ftruncate(self._fd, length)
        elif length > self.length and self.length % BLOCK_BYTES:
            self._take_over(self.length // BLOCK_BYTES)
        if length != self.length:
            self._changed(min(length, self.length))
            self.length = length
            self.gapless = min(self.gapless, length)

    def allocate(self, offset: int, length: int) -> None:
        """See that there is room for these bytes on the local disk."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, offset, length)

    def feed(self, writer: Writer, start: int) -> None:
        """Hand everything from ``start`` to a writer. Raises as `Writer.write` and `Reader.read_into` do."""
        with buffers().lend(COPY_BYTES) as buffer:
            for offset in range(start, self.length, COPY_BYTES):
                piece = buffer[: min(COPY_BYTES, self.length - offset)]
                self._read_into(offset, piece)
                writer.write(piece)

    def published(self, base: Reader) -> None:
        """Take what was just published for the version that is opened."""
        self._base, self._base_length, self.kept = base, base.length, base.length
        self.is_dirty = self.was_written = False

    def close(self) -> None:
        """Give the local file up."""
        feeding, self.feeding = self.feeding, None
        if feeding is not None:
            feeding.abandon()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _changed(self, offset: int) -> None:
        self.kept = min(self.kept, offset)
        self.is_dirty = True
        if self.feeding is not None:
            self.feeding.changed(offset)

    def _take_over(self, block: int) -> None:
        """Have a block in the local file."""
        start = block * BLOCK_BYTES
        count = min(BLOCK_BYTES, self._base_length - start)
        if block in self._own or self._base is None or count <= 0:
            self._own.add(block)
            return
        piece = memoryview(bytearray(count))
        self._base.read_into(start, piece)
        done = 0
        while done < count:
            done += os.pwrite(self._fd, piece[done:], start + done)
        self._own.add(block)

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
