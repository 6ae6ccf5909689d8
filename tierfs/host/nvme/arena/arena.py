"""The arena: one preallocated file of extents, each behind a page that describes it.

Owns the file, its growth, direct I/O and its fall-back, and the search for everything that the pages name. Which part is
free, what is needed and what has been committed is the business of the index and of `tierfs.host.nvme.tier`.

An extent's page and its data are written straight from the caller's pages where they are aligned. Nothing is
durable before `sync`. Reading takes no lock; whoever reads verifies what it got.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import StoreError
from tierfs.host.filesystems import flush_directory
from tierfs.host.ground import PAGE_BYTES, Faults, no_faults
from tierfs.host.nvme.arena.aligned import AlignedBuffers, copy_bytes, is_aligned
from tierfs.host.nvme.arena.direct_file import DirectFile
from tierfs.host.nvme.arena.extent_page import EXTENT_MAGIC, GRANULE, ArenaPage, ExtentKind, ExtentPage, IntentPage
from tierfs.host.nvme.disk_errors import disk_errors

__all__ = ["Arena"]

SCAN_BYTES = 4 << 20
BUFFERS_KEPT_MAX = 4
_logger = logging.getLogger("tierfs.local")
_pages = AlignedBuffers(PAGE_BYTES, keep_max=64)
_large = AlignedBuffers(CHUNK_BYTES + 2 * PAGE_BYTES, keep_max=BUFFERS_KEPT_MAX)


def _floor(number: int) -> int:
    return number - number % PAGE_BYTES


def _ceil(number: int) -> int:
    return number + -number % PAGE_BYTES


class Arena:
    """The open file. Safe for use by many threads, as long as no two write the same extent.

    Made with `create` or `open`.

    Attributes:
        epoch: 16 random bytes of this arena; empty where its first page is damaged, until `stamp`.
        size: Bytes, a multiple of `GRANULE`. The first granule is the arena's own.
        direct: Whether reads and writes pass by the page cache.
        fallbacks: How often what was not hoped for.
    """

    def __init__(self, path: Path, *, writable: bool, faults: Faults = no_faults) -> None:
        self.path = path
        self.fallbacks: Counter[str] = Counter()
        self._faults = faults
        self._writable = writable
        self._file = DirectFile(path, writable=writable)
        self.direct = self._file.direct
        if not self.direct:
            self.fallbacks["buffered"] += 1
        self.size = self._file.size() // GRANULE * GRANULE
        self.epoch = b""
        page = self._read_page(0)
        if page is not None:
            stamped = ArenaPage.decode(page)
            self.epoch = stamped.epoch if stamped is not None else b""

    def __repr__(self) -> str:
        return f"Arena({str(self.path)!r}, size={self.size}, direct={self.direct})"

    @classmethod
    def create(cls, path: Path, size: int, *, epoch: bytes, faults: Faults = no_faults) -> Arena:
        """Reserve a new arena, in place of any that is there, and flush it. It is there whole or not at all.

        Raises:
            CapacityError: The disk has no room for it; nothing is left of it.
        """
        temporary = path.with_name(f"{path.name}.new")
        with disk_errors(path):
            faults("before arena.create")
            temporary.unlink(missing_ok=True)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, max(size, GRANULE) // GRANULE * GRANULE)
                os.pwrite(fd, ArenaPage(epoch).encode(), 0)
                os.fsync(fd)
            except BaseException:
                temporary.unlink()
                raise
            finally:
                os.close(fd)
            os.replace(temporary, path)
            flush_directory(path.parent)
            faults("after arena.create")
        return cls(path, writable=True, faults=faults)

    @classmethod
    def open(cls, path: Path, *, faults: Faults = no_faults) -> Arena:
        """Open an arena that is there, for reading and writing.

        Raises:
            FormatError: Another version of tierfs made it.
        """
        return cls(path, writable=True, faults=faults)

    @classmethod
    def open_to_read(cls, path: Path) -> Arena:
        """Open an arena that is there, for reading."""
        return cls(path, writable=False)

    def close(self) -> None:
        """Close the file. Nobody may be using it."""
        self._file.close()

    def stamp(self, epoch: bytes) -> None:
        """Write the first page anew and flush it, where it was damaged."""
        self._write_page(0, ArenaPage(epoch).encode())
        self.sync()
        self.epoch = epoch

    def write(self, page: ExtentPage, data: memoryview) -> None:
        """Write an extent: its page, and its data up to the end of the last page.

        Args:
            page: Says where, and how long the data is.
            data: Borrowed for the call only. Where it begins at a page in memory it is not copied.

        Raises:
            StoreError, CapacityError: It could not be written; the extent holds nothing of use.
        """
        with self._step("arena.write"), _pages.lend() as head:
            head[:] = page.encode()
            if is_aligned(data):
                self._write_aligned(page.offset, head, data)
            else:
                self._write_copied(page.offset, head, data)

    def read_into(self, offset: int, start: int, out: memoryview) -> ExtentPage | None:
        """Read a part of an extent's data and its page. The data is not verified.

        Args:
            offset: Where the extent begins.
            start: The part's, counted in the data.
            out: Filled whole. Where it begins at a page in memory, and ``start`` at a page of the data, it is read into
                without a copy.

        Returns:
            The extent's page; None if there is none, or if the data ends before the part does.
        """
        with _pages.lend() as head:
            begin, end = _floor(start), start + len(out)
            if offset < GRANULE or not self._reaches(offset + PAGE_BYTES + _ceil(end)):
                return None
            data_at = offset + PAGE_BYTES
            if begin or not len(out):
                self._file.read([head], offset)
            if not len(out):
                pass
            elif start == begin and is_aligned(out):
                self._read_aligned(head if not begin else None, data_at + begin, out)
            else:
                self._read_copied(head if not begin else None, data_at, start, out)
            page = ExtentPage.decode(bytes(head))
        return page if page is not None and page.offset == offset and page.length >= end else None

    def page_at(self, offset: int) -> ExtentPage | None:
        """The page of the extent that begins there, if there is one."""
        data = self._read_page(offset)
        page = ExtentPage.decode(data) if data is not None else None
        return page if page is not None and page.offset == offset else None

    def release(self, page: ExtentPage) -> None:
        """Mark an extent as discarded, so that a rebuild does not find it. Not flushed: the index is what counts."""
        gone = ExtentPage(ExtentKind.RELEASED, page.epoch, page.serial, page.offset, page.length, page.name)
        with self._step("arena.release"):
            self._write_page(page.offset, gone.encode())

    def write_intents(self, intents: IntentPage) -> None:
        """Note which drafts are about to be written."""
        with self._step("arena.intents"):
            self._write_page(PAGE_BYTES, intents.encode())

    def read_intents(self) -> IntentPage | None:
        """The last notes of `write_intents`."""
        page = self._read_page(PAGE_BYTES)
        return IntentPage.decode(page) if page is not None else None

    def sync(self) -> None:
        """Make everything written so far durable."""
        with self._step("arena.sync"):
            os.fdatasync(self._file.fd)

    def grow(self, size: int) -> None:
        """Reserve more of the disk.

        Raises:
            CapacityError: There is no room; the arena stays as it is.
        """
        size = size // GRANULE * GRANULE
        with self._step("arena.grow"):
            try:
                os.posix_fallocate(self._file.fd, self.size, size - self.size)
            except OSError:
                os.ftruncate(self._file.fd, self.size)
                raise
            os.fsync(self._file.fd)
        self.size = size

    def shrink(self, size: int) -> None:
        """Give the disk back what lies behind ``size``. Nothing of use may lie there."""
        size = size // GRANULE * GRANULE
        with self._step("arena.shrink"):
            os.ftruncate(self._file.fd, size)
            os.fsync(self._file.fd)
        self.size = size

    def scan(self) -> Iterator[ExtentPage]:
        """Every sound page at a granule, whatever its epoch, in the order of the file. Reads all that was ever written."""
        at = GRANULE
        with AlignedBuffers(SCAN_BYTES, keep_max=1).lend() as buffer:
            while (at := self._next_data(at)) < self.size:
                part = buffer[: min(SCAN_BYTES, self.size - at)]
                try:
                    self._file.read([part], at)
                except StoreError:
                    # One bad spot must not hide what lies around it.
                    yield from (
                        page for page in map(self._page_if_readable, range(at, at + len(part), GRANULE)) if page
                    )
                else:
                    yield from self._pages_in(part, at)
                at += len(part)

    def _pages_in(self, part: memoryview, at: int) -> Iterator[ExtentPage]:
        granules = np.frombuffer(part, np.uint8).reshape(-1, GRANULE)
        magic = np.frombuffer(EXTENT_MAGIC, np.uint8)
        for index in np.flatnonzero((granules[:, : len(magic)] == magic).all(axis=1)).tolist():
            offset = at + index * GRANULE
            page = ExtentPage.decode(granules[index, :PAGE_BYTES].tobytes())
            if page is not None and page.offset == offset:
                yield page

    def _page_if_readable(self, offset: int) -> ExtentPage | None:
        try:
            return self.page_at(offset)
        except StoreError as error:
            self.fallbacks["unreadable"] += 1
            _logger.error("%s: nothing can be read at %d: %s", self.path, offset, error)  # noqa: TRY400 - one line
            return None

    def _next_data(self, at: int) -> int:
        """The next granule that may hold something: reserved space that was never written is skipped."""
        found = self._file.next_data(at)
        return self.size if found is None else max(at, found // GRANULE * GRANULE)

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._faults(f"before {name}")
        with disk_errors(self.path):
            yield
        self._faults(f"after {name}")

    def _write_aligned(self, offset: int, head: memoryview, data: memoryview) -> None:
        whole = _floor(len(data))
        with _pages.lend() as tail:
            pieces = [head, data[:whole]]
            if whole < len(data):
                tail[: len(data) - whole] = data[whole:]
                tail[len(data) - whole :] = bytes(PAGE_BYTES - (len(data) - whole))
                pieces.append(tail)
            self._file.write(pieces, offset)

    def _write_copied(self, offset: int, head: memoryview, data: memoryview) -> None:
        with _large.lend() as buffer:
            buffer[:PAGE_BYTES] = head
            filled, done = PAGE_BYTES, 0
            while done < len(data):
                part = data[done : done + len(buffer) - filled]
                copy_bytes(buffer[filled : filled + len(part)], part)
                filled, done = filled + len(part), done + len(part)
                buffer[filled : _ceil(filled)] = bytes(_ceil(filled) - filled)
                self._file.write([buffer[: _ceil(filled)]], offset)
                offset, filled = offset + _ceil(filled), 0

    def _read_aligned(self, head: memoryview | None, at: int, out: memoryview) -> None:
        whole = _floor(len(out))
        with _pages.lend() as tail:
            pieces = [out[:whole]] if whole else []
            if whole < len(out):
                pieces.append(tail)
            if head is not None:
                pieces.insert(0, head)
                at -= PAGE_BYTES
            self._file.read(pieces, at)
            copy_bytes(out[whole:], tail[: len(out) - whole])

    def _read_copied(self, head: memoryview | None, data_at: int, start: int, out: memoryview) -> None:
        with _large.lend() as buffer:
            done = 0
            while done < len(out):
                first = _floor(start + done)
                lead = PAGE_BYTES if head is not None and not done else 0
                last = min(_ceil(start + len(out)), first + len(buffer) - lead)
                self._file.read([buffer[: lead + last - first]], data_at + first - lead)
                if lead and head is not None:
                    head[:] = buffer[:PAGE_BYTES]
                skip = lead + start + done - first
                count = min(len(out) - done, lead + last - first - skip)
                copy_bytes(out[done : done + count], buffer[skip : skip + count])
                done += count

    def _reaches(self, end: int) -> bool:
        """Whether the file is so long; the writer may have made it longer since it was opened."""
        if end > self.size and not self._writable:
            self.size = self._file.size() // GRANULE * GRANULE
        return end <= self.size

    def _read_page(self, offset: int) -> bytes | None:
        if not self._reaches(offset + PAGE_BYTES):
            return None
        with _pages.lend() as page:
            self._file.read([page], offset)
            return bytes(page)

    def _write_page(self, offset: int, content: bytes) -> None:
        with _pages.lend() as page:
            page[:] = content
            self._file.write([page], offset)
