"""A chunk of the nvme tier is a file: a page that describes the chunk, then its bytes, padded to whole pages.

The file's name is the chunk's name in hex. A file gets this name by rename, after its bytes are durable. A file that is
overwritten was renamed away before. So the bytes read from a file are the chunk's if the name still leads to that file
afterwards. The caller verifies them with the digests in the metadata all the same.

The page, with little-endian numbers; the checksum is the XXH3-128 of the bytes before it::

    magic "TFSCHUNK" | version u16 | name length u8 | 0 | meta length u32 | length u64 | name | meta | zeros | checksum 16
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tierfs.buffers import PAGE_BYTES, block_buffers, buffers
from tierfs.digest import BLOCK_BYTES, checksum
from tierfs.errors import CorruptionError, InvalidInputError
from tierfs.host.filesystems import disk_errors
from tierfs.host.nvme.head import VERSION

NAME_BYTES_MAX = 33
META_BYTES_MAX = 900
CALL_BYTES = 1 << 20
"""Bytes of one call. Longer calls make requests of several MiB, which the measured disk processes more slowly:
docs/decisions/0046."""
TOUCH_S = 60
"""A read renews the file's time, from which eviction knows the last use, if it is older than this."""
ATTEMPTS_MAX = 4
_MAGIC = b"TFSCHUNK"
_HEAD = struct.Struct("<8sHBxIQ")
_CHECKSUM_BYTES = 16
_NS = 1_000_000_000
_logger = logging.getLogger("tierfs.local")


class ChunkPage(NamedTuple):
    """The first page of a chunk file: the chunk's name, its metadata, and its length in bytes."""

    name: bytes
    meta: bytes
    length: int

    def encode(self) -> bytes:
        """Encode the page.

        Raises:
            InvalidInputError: The name is empty or too long, or the metadata is too long.
        """
        if not 0 < len(self.name) <= NAME_BYTES_MAX or len(self.meta) > META_BYTES_MAX:
            raise InvalidInputError(
                f"a chunk's name of {len(self.name)} bytes or metadata of {len(self.meta)} bytes is invalid"
            )
        head = _HEAD.pack(_MAGIC, VERSION, len(self.name), len(self.meta), self.length)
        body = (head + self.name + self.meta).ljust(PAGE_BYTES - _CHECKSUM_BYTES, b"\0")
        return body + checksum(body)

    @classmethod
    def decode(cls, page: bytes) -> ChunkPage | None:
        """Decode the page. Return None if it is damaged, or of another version, which the tier's head refuses first."""
        if not page.startswith(_MAGIC) or checksum(page[:-_CHECKSUM_BYTES]) != page[-_CHECKSUM_BYTES:]:
            return None
        _, version, name_length, meta_length, length = _HEAD.unpack_from(page)
        if version != VERSION or name_length > NAME_BYTES_MAX or meta_length > META_BYTES_MAX:
            return None
        at = _HEAD.size + name_length
        return cls(page[_HEAD.size : at], page[at : at + meta_length], length)


def file_bytes(length: int) -> int:
    """Return the size of the file of a chunk with ``length`` bytes."""
    return PAGE_BYTES + _ceil(length)


class ChunkFiles:
    """Reads and writes the chunk files of one directory. Thread-safe.

    Args:
        directory: The directory. It need not exist.

    Attributes:
        fallbacks: Counts of fallbacks and unexpected conditions, by kind.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fallbacks: Counter[str] = Counter()
        self._direct = True

    def path(self, name: bytes) -> Path:
        return self.directory / name.hex()

    def holds(self, name: bytes) -> bool:
        """Return whether there is a file of this name."""
        return os.path.exists(self.path(name))

    def write(self, path: Path, page: ChunkPage, data: memoryview, *, now_ns: int) -> int:
        """Write a chunk to a file, which is created if missing. Return its descriptor, for the flush.

        Args:
            path: A temporary name. If the file exists, it has the size of the new one.
            data: The chunk's bytes. Borrowed for the call only. Page-aligned memory saves a copy.
            now_ns: The time of use to record.

        Raises:
            StoreError, CapacityError: The write failed. The content of the file is undefined.
        """
        with disk_errors(path), _lend(PAGE_BYTES) as head, padded_pages(data) as body:
            head[:] = page.encode()
            while True:
                fd, is_direct = self._open(path, os.O_RDWR | os.O_CREAT)
                try:
                    transfer(os.pwritev, fd, [head, *body], 0)
                    os.utime(fd, ns=(now_ns, now_ns))
                    return fd
                except BaseException as error:
                    os.close(fd)
                    if not isinstance(error, OSError) or not self._refuses_direct(error, is_direct=is_direct):
                        raise

    def page(self, name: bytes) -> ChunkPage | None:
        """Return the page of a chunk, or None if there is no such file. Raises as `read` does."""
        return self.read(name, 0, memoryview(b""))

    def read(self, name: bytes, start: int, out: memoryview, *, now_ns: int = 0) -> ChunkPage | None:
        """Copy a part of a chunk.

        Args:
            start: Offset of the part in the chunk.
            out: Filled completely; undefined if None is returned. Page-aligned memory saves a copy.
            now_ns: The time of use to record; 0 to record none.

        Returns:
            The chunk's page, or None if there is no such file, or it was removed or replaced during the read.

        Raises:
            CorruptionError: The file or the chunk is shorter than the part, or the page is damaged or another chunk's.
            StoreError: The file cannot be read.
        """
        path = self.path(name)
        with disk_errors(path):
            for _ in range(ATTEMPTS_MAX):
                try:
                    fd, is_direct = self._open(path, os.O_RDONLY)
                except FileNotFoundError:
                    return None
                try:
                    status = os.fstat(fd)
                    page, is_whole = self._read(fd, start, out, status.st_size)
                    if not _is_at(path, status):
                        self.fallbacks["moved"] += 1
                        continue
                    if page is not None and page.name == name and now_ns - status.st_mtime_ns - TOUCH_S * _NS >= 0:
                        with contextlib.suppress(OSError):  # only eviction uses the time
                            os.utime(fd, ns=(now_ns, now_ns))
                except OSError as error:
                    if not self._refuses_direct(error, is_direct=is_direct):
                        raise
                    continue
                finally:
                    os.close(fd)
                return self._checked(path, page, name, start + len(out), is_whole=is_whole)
        return None

    def _read(self, fd: int, start: int, out: memoryview, size: int) -> tuple[ChunkPage | None, bool]:
        """Read a file's page and a part of its data. Return the page, and whether the file has the part."""
        begin, end = _floor(start), start + len(out)
        if size < PAGE_BYTES:
            return None, False
        is_whole = file_bytes(end) <= size
        wanted = out if is_whole else out[:0]
        # Whole pages go straight to aligned memory, the rest through a buffer, a block at a time.
        straight = _floor(len(wanted)) if start == begin and _is_aligned(wanted) else 0
        through = _ceil(end) - begin - straight if len(wanted) > straight else 0
        with _lend(PAGE_BYTES) as head, _lend(min(through, BLOCK_BYTES)) as block:
            if begin:
                transfer(os.preadv, fd, [head], 0)
            lead, at = ([], PAGE_BYTES + begin) if begin else ([head], 0)
            if straight or not through:
                transfer(os.preadv, fd, [*lead, wanted[:straight]], at)
                lead, at = [], PAGE_BYTES + begin + straight
            done = straight
            while done < len(wanted):
                skip = start - begin if not done else 0
                piece = block[: _ceil(skip + len(wanted) - done)]
                transfer(os.preadv, fd, [*lead, piece], at)
                at += sum(map(len, (*lead, piece)))
                lead, count = [], min(len(piece) - skip, len(wanted) - done)
                _copy(wanted[done : done + count], piece[skip : skip + count])
                done += count
            return ChunkPage.decode(bytes(head)), is_whole

    def _checked(self, path: Path, page: ChunkPage | None, name: bytes, end: int, *, is_whole: bool) -> ChunkPage:
        if page is None or page.name != name:
            self.fallbacks["page_damaged"] += 1
            raise CorruptionError(f"{path}: its first page is damaged, or another chunk's", path=str(path), tier="nvme")
        if not is_whole or end > page.length:
            self.fallbacks["chunk_cut"] += 1
            raise CorruptionError(f"{path}: has less than {end} bytes of the chunk", path=str(path), tier="nvme")
        return page

    def _open(self, path: Path, flags: int) -> tuple[int, bool]:
        """Open a file. Return its descriptor, and whether it bypasses the page cache."""
        flags |= os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600), True
            except OSError as error:
                if not self._refuses_direct(error, is_direct=True):
                    raise
        return os.open(path, flags, 0o600), False

    def _refuses_direct(self, error: OSError, *, is_direct: bool) -> bool:
        """Return whether the filesystem has refused O_DIRECT, at open or at the first transfer. If so, go on without."""
        is_refused = is_direct and error.errno == errno.EINVAL
        if is_refused and self._direct:
            self._direct = False
            self.fallbacks["buffered"] += 1
            _logger.warning(
                "%s: the filesystem refuses O_DIRECT; reading and writing through the page cache", self.directory
            )
        return is_refused


@contextlib.contextmanager
def _lend(length: int) -> Iterator[memoryview]:
    """Lend page-aligned memory of undefined content until the block ends, at most a chunk's size."""
    if not length:
        yield memoryview(bytearray())
        return
    pool = block_buffers() if length <= BLOCK_BYTES else buffers()
    buffer = pool.take()
    try:
        yield buffer[:length]
    finally:
        pool.give(buffer)


@contextlib.contextmanager
def padded_pages(data: memoryview) -> Iterator[list[memoryview]]:
    """Yield page-aligned pieces that have the bytes of ``data`` and zeros up to a whole page."""
    straight = _floor(len(data)) if _is_aligned(data) else 0
    left = len(data) - straight
    with _lend(_ceil(left)) as rest:
        _copy(rest[:left], data[straight:])
        rest[left:] = bytes(len(rest) - left)
        yield [data[:straight], rest]


def transfer(call: Callable[[int, list[memoryview], int], int], fd: int, pieces: list[memoryview], at: int) -> None:
    """Read or write all pieces, which follow one another in the file, in calls of `CALL_BYTES`.

    Raises `OSError` if a call fails, or the file ends early.
    """
    pieces = [piece for piece in pieces if len(piece)]
    while pieces:
        count = call(fd, _first(pieces), at)
        if not count:
            raise OSError(errno.EIO, "the file ends early")
        pieces, at = _rest(pieces, count), at + count


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


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except FileNotFoundError:
        return False


def _is_aligned(data: memoryview) -> bool:
    if not len(data):
        return True
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal length. Releases the GIL, unlike assigning a slice of a memoryview."""
    if len(target):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _floor(number: int) -> int:
    return number - number % PAGE_BYTES


def _ceil(number: int) -> int:
    return number + -number % PAGE_BYTES
