"""The bytes of the kernel's FUSE protocol: parse requests and build answers, which have the errno of an exception.

Structures and numbers are those of ``linux/fuse.h``, protocol 7.31. This module does no input or output.
"""

from __future__ import annotations

import enum
import errno
import logging
import stat
import struct
from collections.abc import Iterable
from typing import NamedTuple

from tierfs.errors import ConflictError, InvalidInputError, TierfsError
from tierfs.mount.attributes import Attributes

MAJOR, MINOR = 7, 31
MAX_WRITE = 1 << 20
MAX_PAGES = MAX_WRITE // 4096
BACKGROUND_MAX = 64
BLOCK_BYTES = 4096
"""The unit of the sizes in an answer to STATFS."""
_HEADER = struct.Struct("<IIQQIIII")
HEADER_BYTES = _HEADER.size
OUT_HEADER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
ENTRY_BYTES_MIN = _ENTRY.size + _ATTR.size + 32
"""The shortest entry in an answer to READDIRPLUS."""
ATTR_OUT = struct.Struct("<QII")
_INIT_IN = struct.Struct("<IIII")
_INIT_OUT = struct.Struct("<IIIIHHIIHH28x")
_SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
_STATFS = struct.Struct("<5Q4I24x")
_DIRENT = struct.Struct("<QQII")
OPEN_IN = struct.Struct("<II")
OPEN_OUT = struct.Struct("<QII")
CREATE_IN = struct.Struct("<IIII")
READ_IN = struct.Struct("<QQI")
"""The start of READ, WRITE and READDIR: handle, offset, size."""
WRITE_BYTES = 40
"""Offset of the data in a WRITE."""
FALLOCATE_IN = struct.Struct("<QQQI")
RENAME2_IN = struct.Struct("<QII")
FORGET_ONE = struct.Struct("<QQ")
U64 = struct.Struct("<Q")
U32X2 = struct.Struct("<II")
KEEP_CACHE, NO_FLUSH = 2, 32
"""Flags in an answer to OPEN: the kernel may keep cached pages of the file; it may close the file without FLUSH."""
# ASYNC_READ, ATOMIC_O_TRUNC, BIG_WRITES, DO_READDIRPLUS, READDIRPLUS_AUTO, ASYNC_DIO, PARALLEL_DIROPS, HANDLE_KILLPRIV,
# MAX_PAGES, HANDLE_KILLPRIV_V2. Without the last, the kernel requests a security attribute before each write.
INIT_FLAGS = sum(1 << bit for bit in (0, 3, 5, 13, 14, 15, 18, 19, 22, 28))


class Opcode(enum.IntEnum):
    """The requests that tierfs serves. The kernel stops sending any other request after its first ENOSYS."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45


class Valid(enum.IntFlag):
    """Flags for the valid fields of a SETATTR."""

    MODE = 1
    UID = 2
    GID = 4
    SIZE = 8
    ATIME = 16
    MTIME = 32
    FH = 64
    ATIME_NOW = 128
    MTIME_NOW = 256


class RequestHeader(NamedTuple):
    """The header at the start of every request."""

    length: int
    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    pid: int
    padding: int

    @classmethod
    def parse(cls, data: memoryview) -> RequestHeader:
        return cls(*_HEADER.unpack_from(data))


class SetAttr(NamedTuple):
    """A SETATTR request. On the wire, a time is unsigned seconds since the epoch and separate nanoseconds."""

    valid: Valid
    handle: int
    size: int
    mtime_ns: int
    mode: int
    uid: int
    gid: int

    def changes_owner(self, attributes: Attributes) -> bool:
        """Return whether another owner or group is requested."""
        is_other_user = self.valid & Valid.UID and self.uid != attributes.uid
        return bool(is_other_user or (self.valid & Valid.GID and self.gid != attributes.gid))

    def applied_to(self, attributes: Attributes, now_ns: int) -> Attributes:
        """Return the attributes with the requested mode and time."""
        mtime_ns = now_ns if self.valid & Valid.MTIME_NOW else self.mtime_ns
        return attributes.at(
            mode=self.mode if self.valid & Valid.MODE else None,
            mtime_ns=mtime_ns if self.valid & Valid.MTIME else None,
            now_ns=now_ns,
        )

    @classmethod
    def parse(cls, body: memoryview) -> SetAttr:
        fields = _SETATTR.unpack_from(body)
        seconds = fields[6] - (1 << 64) if fields[6] >> 63 else fields[6]
        mtime_ns = seconds * 1_000_000_000 + fields[9]
        return cls(Valid(fields[0] & 0x1FF), fields[2], fields[3], mtime_ns, fields[11], fields[13], fields[14])


class DirectoryEntry(NamedTuple):
    """One name in a directory. ``node`` is 0 if the kernel is to learn only the name and the kind."""

    name: bytes
    attributes: Attributes
    node: int
    valid_s: float


def name_and_rest(body: memoryview, at: int = 0) -> tuple[bytes, int]:
    """Return the name at ``at``, which a NUL ends, and the offset behind the NUL."""
    data = bytes(body[at:])
    end = data.index(0)
    return data[:end], at + end + 1


def _times(ns: int) -> tuple[int, int]:
    seconds, rest = divmod(ns, 1_000_000_000)
    return seconds & ((1 << 64) - 1), rest


def _attr(attributes: Attributes) -> bytes:
    mtime, mtime_rest = _times(attributes.mtime_ns)
    ctime, ctime_rest = _times(attributes.ctime_ns)
    return _ATTR.pack(
        attributes.ino,
        attributes.size,
        -(-attributes.size // 512),
        mtime,
        mtime,
        ctime,
        mtime_rest,
        mtime_rest,
        ctime_rest,
        attributes.mode,
        0 if attributes.is_gone else 2 if stat.S_ISDIR(attributes.mode) else 1,
        attributes.uid,
        attributes.gid,
        0,
        MAX_WRITE if stat.S_ISREG(attributes.mode) else 4096,
        0,
    )


def _valid(seconds: float) -> tuple[int, int]:
    whole = int(seconds)
    return whole, int((seconds - whole) * 1e9)


def entry_out(node: int, attributes: Attributes, valid_s: float) -> bytes:
    """Return the answer to a request for a name, such as LOOKUP."""
    whole, rest = _valid(valid_s)
    return _ENTRY.pack(node, 0, whole, whole, rest, rest) + _attr(attributes)


def attr_out(attributes: Attributes, valid_s: float) -> bytes:
    """Return the answer to GETATTR and SETATTR."""
    whole, rest = _valid(valid_s)
    return ATTR_OUT.pack(whole, rest, 0) + _attr(attributes)


def init_out(body: memoryview) -> bytes:
    """Return the answer to INIT: the protocol version and the features that both sides support.

    Raises:
        ValueError: The kernel's protocol version is unsupported.
    """
    major, minor, readahead, flags = _INIT_IN.unpack_from(body)
    if major != MAJOR or minor < MINOR:
        raise ValueError(
            f"the kernel speaks FUSE {major}.{minor}, but tierfs needs at least {MAJOR}.{MINOR} (Linux 5.4)"
        )
    wanted = flags & INIT_FLAGS
    background = (BACKGROUND_MAX, BACKGROUND_MAX * 3 // 4)
    return _INIT_OUT.pack(MAJOR, MINOR, max(readahead, MAX_WRITE), wanted, *background, MAX_WRITE, 1, MAX_PAGES, 0)


def statfs_out(total: int, free: int, name_max: int) -> bytes:
    """Return the answer to STATFS. ``total`` and ``free`` are bytes. The number of files is not limited."""
    files, left = 1 << 32, free // BLOCK_BYTES
    return _STATFS.pack(total // BLOCK_BYTES, left, left, files, files, BLOCK_BYTES, name_max, BLOCK_BYTES, 0)


def directory_page(entries: Iterable[DirectoryEntry], start: int, size: int, *, plus: bool) -> tuple[bytes, int]:
    """Encode as many entries as fit into ``size`` bytes, each with the offset of the next.

    Returns:
        The answer, and the number of entries in it.
    """
    out, count = bytearray(), 0
    for entry in entries:
        kind = entry.attributes.mode >> 12
        record = _DIRENT.pack(entry.attributes.ino, start + count + 1, len(entry.name), kind) + entry.name
        record += bytes(-len(record) % 8)
        if plus:
            record = entry_out(entry.node, entry.attributes, entry.valid_s) + record
        if len(out) + len(record) > size:
            break
        out += record
        count += 1
    return bytes(out), count


# Errors that programs cause and handle in normal use. They are not logged, except conflicts.
_ORDINARY = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENODATA, errno.EOPNOTSUPP, errno.ESTALE, errno.EPERM}
_ORDINARY |= {errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EACCES, errno.ENAMETOOLONG, errno.ENOSYS}
_ORDINARY |= {errno.EILSEQ, errno.ERANGE, errno.EBADF, errno.EBUSY}
_logger = logging.getLogger("tierfs.mount")


def refusal(number: int, words: str = "") -> OSError:
    """Return an `OSError` with this errno."""
    return OSError(number, words)


def errno_of(error: BaseException, what: str) -> int:
    """Return the errno of an error. Log conflicts, and errors that programs do not cause in normal use, of ``what``."""
    number = _number(error)
    if number not in _ORDINARY or isinstance(error, ConflictError):
        if isinstance(error, (TierfsError, OSError)):
            _logger.error("%s: %s (%s)", what, errno.errorcode.get(number, str(number)), error)
        else:
            _logger.error("%s: unexpected error: %r", what, error, exc_info=error)
    return number


def _number(error: BaseException) -> int:
    if isinstance(error, ConflictError):
        return errno.ESTALE
    if isinstance(error, InvalidInputError):
        return errno.EINVAL
    if isinstance(error, UnicodeError):
        return errno.EILSEQ
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return error.errno or errno.EIO
    return errno.ENOMEM if isinstance(error, MemoryError) else errno.EIO
