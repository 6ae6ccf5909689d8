"""The common frame of binary objects: magic, version, kind, and a checksum at the end.

FORMAT.md, "Common header". Reading is bounded: a count or length found in an object is compared with the available
bytes before memory is allocated for it.
"""

from __future__ import annotations

import enum
import struct

from tierfs import digest
from tierfs.digest import Buffer, DigestKind
from tierfs.errors import CorruptionError, FormatError, InvalidInputError
from tierfs.format.keys import ChunkName, name_bytes

MAGIC = b"\x89TIERFS\n"
VERSION = 1
HEADER_BYTES = 16
CHECKSUM_BYTES = 16
_HEADER = struct.Struct("<8sHHI")


class Kind(enum.IntEnum):
    """The kinds of binary objects."""

    CHUNK = 1
    FILE = 2
    TOMBSTONE = 3
    DIRECTORY = 4
    CONDEMNED = 6
    LEASE = 7
    COLLECTOR = 8
    SCRUB = 9
    REFERENCES = 10
    PEER = 11


def header(kind: Kind, word: int) -> bytes:
    """Return the first 16 bytes of an object. ``word`` depends on the kind: flags, or the header's length."""
    return _HEADER.pack(MAGIC, VERSION, kind, word)


def peek_kind(data: Buffer, where: str) -> tuple[Kind, int]:
    """Decode the common header.

    Returns:
        The kind, and the kind's own word.

    Raises:
        CorruptionError: The data is too short, or does not begin with the magic.
        FormatError: The data is of another format version, or of an unknown kind.
    """
    if len(data) < HEADER_BYTES:
        raise CorruptionError(
            f"{where}: {len(data)} bytes are too few for a tierfs object: it was cut short", path=where
        )
    magic, version, kind, word = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptionError(
            f"{where}: does not start like a tierfs object: damaged, or not written by tierfs", path=where
        )
    if version != VERSION:
        raise FormatError(
            f"{where}: format version {version}, but this tierfs reads version {VERSION}: use a newer tierfs",
            path=where,
        )
    try:
        return Kind(kind), word
    except ValueError:
        raise FormatError(f"{where}: unknown kind of object {kind}: use a newer tierfs", path=where) from None


def seal(body: bytes) -> bytes:
    """Return ``body`` followed by its checksum."""
    return body + digest.checksum(body)


def open_sealed(data: Buffer, where: str) -> Cursor:
    """Verify the checksum at the end of ``data`` and return a cursor over the fields between header and checksum.

    Raises:
        CorruptionError: The checksum does not match: a bit flipped, or bytes are missing.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES + CHECKSUM_BYTES or digest.checksum(view[:-CHECKSUM_BYTES]) != view[-CHECKSUM_BYTES:]:
        raise CorruptionError(f"{where}: checksum mismatch: the object is damaged or cut short", path=where)
    return Cursor(view[HEADER_BYTES:-CHECKSUM_BYTES], where)


def open_plain(data: Buffer, expected: Kind, name: str, where: str) -> Cursor:
    """Check an object of a kind that has no flags, and return a cursor over its fields.

    Args:
        name: The name of that kind in errors, with its article.
        where: The name of this object in errors.

    Raises:
        CorruptionError: The object is damaged, cut short, or of another kind.
        FormatError: The object is of another format version, or has flags.
    """
    kind, flags = peek_kind(data, where)
    if kind is not expected:
        raise CorruptionError(f"{where}: expected {name}, found a {kind.name.lower()}", path=where)
    cursor = open_sealed(data, where)
    if flags:
        raise cursor.malformed(f"unknown flags {flags:#x}")
    return cursor


class Cursor:
    """Reads fields one after another from verified data. A field that exceeds the data raises `FormatError`."""

    def __init__(self, data: memoryview, where: str) -> None:
        self._data = data
        self._at = 0
        self.where = where

    @property
    def remaining(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> memoryview:
        """Return the next ``count`` bytes without copying."""
        end = self._at + count
        if end > len(self._data):
            raise self.malformed(f"a field of {count} bytes, but only {self.remaining} are left")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def bytes(self, count: int) -> bytes:
        """Return a copy of the next ``count`` bytes."""
        return bytes(self.take(count))

    def unsigned(self, size: int) -> int:
        """Return the next ``size`` bytes as a little-endian unsigned number."""
        return int.from_bytes(self.take(size), "little")

    def signed(self, size: int) -> int:
        """Return the next ``size`` bytes as a little-endian two's complement number."""
        return int.from_bytes(self.take(size), "little", signed=True)

    def text(self, count: int, field: str) -> str:
        """Return the next ``count`` bytes as UTF-8 text."""
        try:
            return str(self.take(count), "utf-8")
        except UnicodeDecodeError:
            raise self.malformed(f"{field} is not UTF-8") from None

    def digest_kind(self) -> DigestKind:
        """Return the next byte as a digest kind."""
        number = self.unsigned(1)
        try:
            return DigestKind(number)
        except ValueError:
            raise self.malformed(f"unknown digest kind {number}") from None

    def chunk_name(self, kind: DigestKind) -> ChunkName:
        """Return the next bytes as an encoded `ChunkName`."""
        return ChunkName.decode(self.bytes(name_bytes(kind)))

    def bounded(self, size: int, limit: int, field: str) -> int:
        """Return the next ``size`` bytes as a number of at most ``limit``."""
        value = self.unsigned(size)
        if value > limit:
            raise self.malformed(f"{field} is {value}, over the limit of {limit}")
        return value

    def zeros(self, count: int) -> None:
        """Skip reserved bytes, which must be zero."""
        if any(self.take(count)):
            raise self.malformed("reserved bytes are not zero: written by a newer tierfs?")

    def finish(self) -> None:
        if self.remaining:
            raise self.malformed(f"{self.remaining} bytes too many")

    def malformed(self, what: str) -> FormatError:
        """Return the error for a field that breaks FORMAT.md."""
        return FormatError(f"{self.where}: {what}", path=self.where)


def check_writable(value: int, limit: int, field: str) -> None:
    """Check a field before writing it, against the limit that readers enforce.

    Raises:
        InvalidInputError: The value is larger.
    """
    if value > limit:
        raise InvalidInputError(f"{field} is {value}, over the limit of {limit}")
