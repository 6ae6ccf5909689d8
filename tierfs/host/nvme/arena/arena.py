"""The arena: one preallocated file of extents. Each extent begins with a page that describes it.

This module owns the file, its growth, direct I/O with its fallback, and the scan for all pages. The index and
`tierfs.host.nvme.tier` know which parts are free, needed and committed.

Page-aligned data is written from the caller's memory without a copy. Nothing is durable before `sync`. Readers take no
lock, and verify the bytes that they read.
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
    """An open arena. Thread-safe, as long as no two threads write the same extent.

    Use `create`, `open` or `open_to_read` to make one.

    Attributes:
        epoch: 16 random bytes that identify this arena. Empty if its first page is damaged, until `stamp`.
        size: Bytes, a multiple of `GRANULE`. No extent lies in the first granule.
        direct: Whether reads and writes bypass the page cache.
        fallbacks: Counts of fallbacks, by kind.
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
        """Create an arena, preallocate and flush it, and atomically replace any existing one.

        Raises:
            CapacityError: The disk has no room for the arena. No new file is left.
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
        """Open an existing arena for reading and writing.

        Raises:
            FormatError: Another version of tierfs made it.
        """
        return cls(path, writable=True, faults=faults)

    @classmethod
    def open_to_read(cls, path: Path) -> Arena:
        """Open an existing arena for reading. Raises as `open` does."""
        return cls(path, writable=False)

    def close(self) -> None:
        """Close the file. No other thread may be using it."""
        self._file.close()

    def stamp(self, epoch: bytes) -> None:
        """Rewrite and flush the first page, which was damaged."""
        self._write_page(0, ArenaPage(epoch).encode())
        self.sync()
        self.epoch = epoch

    def write(self, page: ExtentPage, data: memoryview) -> None:
        """Write an extent: its page, and its data padded to whole pages.

        Args:
            page: Gives the extent's offset and the length of the data.
            data: Borrowed for the call only. Page-aligned data is not copied.

        Raises:
            StoreError, CapacityError: The write failed. The content of the extent is undefined.
        """
        with self._step("arena.write"), _pages.lend() as head:
            head[:] = page.encode()
            if is_aligned(data):
                self._write_aligned(page.offset, head, data)
            else:
                self._write_copied(page.offset, head, data)

    def read_into(self, offset: int, start: int, out: memoryview) -> ExtentPage | None:
        """Read a part of an extent's data, and its page. The data is not verified.

        Args:
            offset: Offset of the extent in the arena.
            start: Offset of the part in the extent's data.
            out: Filled completely. If both ``out`` and ``start`` are page-aligned, no copy is made.

        Returns:
            The extent's page, or None if there is no extent or its data ends before the part does.
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
        """Return the page of the extent that begins at ``offset``, or None if no extent does."""
        data = self._read_page(offset)
        page = ExtentPage.decode(data) if data is not None else None
        return page if page is not None and page.offset == offset else None

    def release(self, page: ExtentPage) -> None:
        """Mark an extent as released, so that a rebuild does not find it. This does not flush the mark."""
        gone = ExtentPage(ExtentKind.RELEASED, page.epoch, page.serial, page.offset, page.length, page.name)
        with self._step("arena.release"):
            self._write_page(page.offset, gone.encode())

    def write_intents(self, intents: IntentPage) -> None:
        """Record which drafts are about to be written."""
        with self._step("arena.intents"):
            self._write_page(PAGE_BYTES, intents.encode())

    def read_intents(self) -> IntentPage | None:
        """Return the page that `write_intents` wrote last, or None if it is damaged or was never written."""
        page = self._read_page(PAGE_BYTES)
        return IntentPage.decode(page) if page is not None else None

    def sync(self) -> None:
        """Make all earlier writes durable."""
        with self._step("arena.sync"):
            os.fdatasync(self._file.fd)

    def grow(self, size: int) -> None:
        """Preallocate disk space up to ``size``.

        Raises:
            CapacityError: The disk has no room. The size stays the same.
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
        """Truncate the file to ``size``. No extent in use may lie beyond."""
        size = size // GRANULE * GRANULE
        with self._step("arena.shrink"):
            os.ftruncate(self._file.fd, size)
            os.fsync(self._file.fd)
        self.size = size

    def scan(self) -> Iterator[ExtentPage]:
        """Yield every sound extent page of any epoch, by offset. Read all parts of the file that were ever written."""
        at = GRANULE
        with AlignedBuffers(SCAN_BYTES, keep_max=1).lend() as buffer:
            while (at := self._next_data(at)) < self.size:
                part = buffer[: min(SCAN_BYTES, self.size - at)]
                try:
                    self._file.read([part], at)
                except StoreError:
                    # One unreadable page must not hide the pages around it.
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
            _logger.error("%s: cannot be read at offset %d: %s", self.path, offset, error)  # noqa: TRY400 - one line
            return None

    def _next_data(self, at: int) -> int:
        """Return the next granule that may hold data. Preallocated space that was never written is skipped."""
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
        """Return whether the file has ``end`` bytes. The writer may have grown it since this process opened it."""
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
