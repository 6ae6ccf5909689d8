"""A segment as a file: its name, its header, and how it comes to be.

In the host's folder of segments, the name says whose a file is and what for::

    <8 hex digits of the store's uuid>-<id of the process that made it>-<number>.slab       a segment
                                                                        .slab.new   one whose memory is being reserved

The size of each counts against the budget from the moment it is there; of a ``.slab``, what it has memory for. It gets that name
when that is reserved and its header written.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tierfs.clock import boot_id
from tierfs.digest import checksum
from tierfs.errors import CorruptionError, FormatError, NotFoundError, StoreError
from tierfs.host.ground import PAGE_BYTES
from tierfs.host.private import refused
from tierfs.host.slab.table.table import CHANGES_AT, SLOTS_MAX, Layout

__all__ = [
    "SECTOR_BYTES",
    "FileName",
    "OldSegmentError",
    "OwnedFd",
    "Reservation",
    "SegmentHeader",
    "make_file",
    "open_segment",
    "reopened",
]

MAGIC = b"TFSSLAB1"
SECTOR_BYTES = 512  # what stat(2) counts memory in
VERSION = 1
_FIXED = struct.Struct("<8sIIQQQQ16s16s16sQ")
_CHECKSUM_BYTES = 16
_NAME = re.compile(r"([0-9a-f]{8})-([0-9a-f]{16})-([0-9]+)\.(slab|slab\.new)")

assert _FIXED.size + _CHECKSUM_BYTES <= CHANGES_AT


class OldSegmentError(FormatError):
    """The segment was left by a run of the kernel before this one."""


class FileName(NamedTuple):
    """What the name of a file in the folder of segments says."""

    store: str
    owner: str
    number: int
    suffix: str

    def __str__(self) -> str:
        return f"{self.store}-{self.owner}-{self.number}.{self.suffix}"

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """Take a name apart; None if it is not one of ours."""
        match = _NAME.fullmatch(name)
        return cls(match[1], match[2], int(match[3]), match[4]) if match else None


class OwnedFd:
    """A descriptor that is closed when nobody refers to it any more, so that no thread can use it after that."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)

    def write(self, data: bytes) -> None:
        """Write at the beginning."""
        written = os.pwrite(self.number, data, 0)
        assert written == len(data)

    def leave_to_parent(self) -> None:
        """After a fork, in the child: have another file by this number, since a lock on the parent's outlives it here."""
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.dup2(fd, self.number, inheritable=False)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself and never changes.

    Attributes:
        layout: Where its parts lie.
        id: Random; hex.
        store: The uuid of its store, 32 hex digits.
        boot: Of which run of the kernel it is: memory does not outlive that, whatever a file does. Hex.
        creator: The process that made it.
        number: Which of the segments that this process made.
    """

    layout: Layout
    id: str
    store: str
    boot: str
    creator: str
    number: int

    @property
    def name(self) -> FileName:
        """The name of its file."""
        return FileName(self.store[:8], self.creator, self.number, "slab")

    def encode(self) -> bytes:
        """The fixed part of the header page, with its checksum."""
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
        """Read and check the header page.

        Raises:
            FormatError: Not a segment, or of another version.
            CorruptionError: It is damaged.
        """
        if not data.startswith(MAGIC):
            raise FormatError(f"{path} is no segment of tierfs", path=path, tier="ram")
        fixed, found = data[: _FIXED.size], data[_FIXED.size : _FIXED.size + _CHECKSUM_BYTES]
        if len(found) < _CHECKSUM_BYTES or checksum(fixed) != found:
            raise CorruptionError(f"the header of {path} is damaged", path=path, tier="ram")
        _, version, slots, size, heads_at, data_at, number, ident, store, boot, creator = _FIXED.unpack(fixed)
        if version != VERSION:
            raise FormatError(
                f"{path} has version {version}; this tierfs reads version {VERSION}: end the processes of the other",
                path=path,
                tier="ram",
            )
        layout = Layout(size, slots)
        if not 0 < slots <= SLOTS_MAX or (heads_at, data_at) != (layout.heads_at, layout.data_at) or data_at > size:
            raise CorruptionError(f"the header of {path} contradicts itself", path=path, tier="ram")
        return cls(layout, ident.hex(), store.hex(), boot.hex(), f"{creator:016x}", number)


def read_header(fd: int, path: str) -> SegmentHeader:
    """Read and check the header of an open segment.

    Raises:
        FormatError: Not a segment, or of another version.
        CorruptionError: It is damaged, or the file is cut short.
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
        NotFoundError: It is gone.
        CorruptionError: Its header is damaged.
        FormatError: It is of another version, or was left by a run of the kernel before this one.
        StoreError: It cannot be opened.
    """
    name = str(path)
    try:
        fd = OwnedFd(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        header = read_header(fd.number, name)
    except FileNotFoundError:
        raise NotFoundError(f"{name} is gone", path=name, tier="ram") from None
    except OSError as error:
        raise StoreError(f"{name} cannot be read: {error.strerror}", path=name, tier="ram") from error
    if header.boot != boot_id():
        raise OldSegmentError(f"{name} was left by the host before it was started anew", path=name, tier="ram")
    return fd, header


class Reservation:
    """A file of the size of a segment to be: it counts against the budget, and has no memory yet.

    Args:
        directory: The host's folder of segments.
        header: What the segment will say of itself.

    Raises:
        CapacityError, ReadOnlyError, StoreError: The file cannot be made.
    """

    def __init__(self, directory: Path, header: SegmentHeader) -> None:
        self.header = header
        self.path = directory / str(header.name._replace(suffix="slab.new"))
        self.fd = OwnedFd(make_file(self.path, header.layout.size))

    def finish(self) -> Path:
        """Give the file the name of a segment; returns its path.

        Under the host's lock, where others count: who lists a folder while a file in it is renamed may not see it at all.
        """
        path = self.path.with_name(str(self.header.name))
        os.rename(self.path, path)
        return path

    def cancel(self) -> None:
        """Give it up."""
        self.path.unlink(missing_ok=True)


def make_file(path: Path, size: int) -> int:
    """Make an empty file of this size, as yet without memory, and open it.

    Raises:
        CapacityError, ReadOnlyError, StoreError: It cannot be made.
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
    """Another open file of the same inode: locks on it are its own."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
