"""The file of a segment: its name, its header, and how it is created.

The name of a file in the host's folder of segments says which store and process it belongs to::

    <8 hex digits of the store's uuid>-<id of the process that made it>-<number>.slab       a segment
                                                                        .slab.new   one whose memory is being reserved

A ``.slab.new`` counts against the budget with its full size from its creation. A ``.slab`` counts with the memory that
it occupies. A file is renamed to ``.slab`` when its memory is reserved and its header is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tierfs.buffers import PAGE_BYTES
from tierfs.clock import boot_id
from tierfs.digest import checksum
from tierfs.errors import CorruptionError, FormatError, NotFoundError, StoreError
from tierfs.host.filesystems import refused
from tierfs.host.slab.table import CHANGES_AT, SLOTS_MAX, Layout

MAGIC = b"TFSSLAB1"
SECTOR_BYTES = 512  # the unit of st_blocks, stat(2)
VERSION = 2
_FIXED = struct.Struct("<8sIIQQQQ16s16s16sQ")
_CHECKSUM_BYTES = 16
_NAME = re.compile(r"([0-9a-f]{8})-([0-9a-f]{16})-([0-9]+)\.(slab|slab\.new)")

assert _FIXED.size + _CHECKSUM_BYTES <= CHANGES_AT


class OldSegmentError(FormatError):
    """The segment is left over from an earlier boot."""


class FileName(NamedTuple):
    """The parts of the name of a file in the folder of segments."""

    store: str
    owner: str
    number: int
    suffix: str

    def __str__(self) -> str:
        return f"{self.store}-{self.owner}-{self.number}.{self.suffix}"

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """Split a name into its parts; None if it is not the name of a segment."""
        match = _NAME.fullmatch(name)
        return cls(match[1], match[2], int(match[3]), match[4]) if match else None


class OwnedFd:
    """A descriptor that is closed when the last reference to it is gone, so that no thread uses it after that."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)

    def write(self, data: bytes) -> None:
        """Write at offset 0."""
        written = os.pwrite(self.number, data, 0)
        assert written == len(data)

    def leave_to_parent(self) -> None:
        """In a forked child: replace the open file, so that the child does not prolong the parent's lock on it."""
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.dup2(fd, self.number, inheritable=False)
        finally:
            os.close(fd)


class TableLock:
    """The lock of one segment in one process.

    Args:
        fd: An open file description that only this object locks; None if the segment is closed.
    """

    def __init__(self, fd: OwnedFd | None) -> None:
        self._fd = fd
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Exclude every other thread and process. After `close`, exclude threads only."""
        with self._threads:
            fd = self._fd
            if fd is None:
                yield
                return
            fcntl.flock(fd.number, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(fd.number, fcntl.LOCK_UN)

    def close(self) -> None:
        """Drop the reference to the open file."""
        self._fd = None


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The part of a segment's header that never changes.

    Attributes:
        layout: Layout of the segment.
        id: Random; hex.
        store: The uuid of its store, 32 hex digits.
        boot: Boot id of the kernel that the segment was made under, hex. The memory does not outlive that boot, even if
            a file does.
        creator: Id of the process that made it, 16 hex digits.
        number: Number of the segment among those that its creator made.
    """

    layout: Layout
    id: str
    store: str
    boot: str
    creator: str
    number: int

    @classmethod
    def new(cls, layout: Layout, *, store: str, owner: str, number: int) -> SegmentHeader:
        """Return the header of a new segment. No other segment of the process ``owner`` may have had this number."""
        assert layout.data_bytes > 0, layout
        return cls(layout, secrets.token_hex(16), store, boot_id(), owner, number)

    @property
    def name(self) -> FileName:
        """The name of its file."""
        return FileName(self.store[:8], self.creator, self.number, "slab")

    def encode(self) -> bytes:
        """Return the fixed part of the header page, with its checksum."""
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            self.layout.slots,
            self.layout.size,
            self.layout.heads_at,
            self.layout.data_at,
            self.number,
            bytes.fromhex(self.id),
            bytes.fromhex(self.store),
            bytes.fromhex(self.boot),
            int(self.creator, 16),
        )
        return fixed + checksum(fixed)

    @classmethod
    def decode(cls, data: bytes, path: str) -> SegmentHeader:
        """Decode and check the header page.

        Raises:
            FormatError: The file has another version.
            CorruptionError: The file is not a segment, or its header is damaged.
        """
        if not data.startswith(MAGIC):
            raise CorruptionError(f"{path} is not a tierfs segment", path=path, tier="ram")
        fixed, found = data[: _FIXED.size], data[_FIXED.size : _FIXED.size + _CHECKSUM_BYTES]
        if len(found) < _CHECKSUM_BYTES or checksum(fixed) != found:
            raise CorruptionError(f"the header of {path} is damaged", path=path, tier="ram")
        _, version, slots, size, heads_at, data_at, number, ident, store, boot, creator = _FIXED.unpack(fixed)
        if version != VERSION:
            raise FormatError(
                f"{path} has version {version}; this tierfs reads version {VERSION}: with the tierfs that wrote it, run "
                "`tierfs wait URL` and `tierfs forget URL --yes`",
                path=path,
                tier="ram",
            )
        layout = Layout(size, slots)
        if not 0 < slots <= SLOTS_MAX or (heads_at, data_at) != (layout.heads_at, layout.data_at) or data_at > size:
            raise CorruptionError(f"the header of {path} is inconsistent", path=path, tier="ram")
        return cls(layout, ident.hex(), store.hex(), boot.hex(), f"{creator:016x}", number)


def read_header(fd: int, path: str) -> SegmentHeader:
    """Read and check the header of an open segment.

    Raises:
        FormatError: The file has another version.
        CorruptionError: The file is not a segment, its header is damaged, or it has another size than the header says.
    """
    header = SegmentHeader.decode(os.pread(fd, PAGE_BYTES, 0), path)
    if os.fstat(fd).st_size != header.layout.size:
        raise CorruptionError(
            f"{path} has {os.fstat(fd).st_size} bytes where its header says {header.layout.size}", path=path, tier="ram"
        )
    return header


def open_segment(path: Path) -> tuple[OwnedFd, SegmentHeader]:
    """Open a segment and check its header.

    Raises:
        NotFoundError: The file does not exist.
        CorruptionError: The file is not a segment, its header is damaged, or its size is wrong.
        FormatError: The file has another version, or is left over from an earlier boot.
        StoreError: It cannot be opened or read.
    """
    name = str(path)
    try:
        fd = OwnedFd(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        header = read_header(fd.number, name)
    except FileNotFoundError:
        raise NotFoundError(f"{name} no longer exists", path=name, tier="ram") from None
    except OSError as error:
        raise StoreError(f"{name} cannot be read: {error.strerror}", path=name, tier="ram") from error
    if header.boot != boot_id():
        raise OldSegmentError(f"{name} is left over from before this host rebooted", path=name, tier="ram")
    return fd, header


class Reservation:
    """A file of the size of a future segment. It counts against the budget, and has no memory yet.

    Raises:
        CapacityError, ReadOnlyError, StoreError: The file cannot be created.
    """

    def __init__(self, directory: Path, header: SegmentHeader) -> None:
        self.header = header
        self.path = directory / str(header.name._replace(suffix="slab.new"))
        self.fd = OwnedFd(make_file(self.path, header.layout.size))

    def finish(self) -> Path:
        """Rename the file to the name of a segment, and return its path.

        Call it under the host's lock, which processes that count segments hold: a process that lists a folder while a
        file in it is renamed may miss that file.
        """
        path = self.path.with_name(str(self.header.name))
        os.rename(self.path, path)
        return path

    def cancel(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def make_file(path: Path, size: int) -> int:
    """Create and open a file of this size, in bytes, without memory. Return its descriptor.

    Raises:
        CapacityError, ReadOnlyError, StoreError: It cannot be created.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
    except OSError as error:
        raise refused(error, path, "cannot be made", tier="ram") from error
    return fd


def reopened(fd: int) -> int:
    """Open the same inode again, as an open file description with locks of its own. Return the descriptor."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
