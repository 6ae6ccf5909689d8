"""The pages that describe the arena, as values and as bytes: arena page, intent page, extent page, and draft record.

The format is private to a host and to one version. A page of another version is refused. Numbers are little-endian.
Each page ends with the XXH3-128 of the bytes before it.

::

    arena, page 0     magic "TFSARENA" | version u16 | 6 zeros | epoch 16 | zeros | checksum 16
    arena, page 1     magic "TFSINTNT" | version u16 | 2 zeros | count u32 | epoch 16 |
                      count times (offset u64, serial u64) | zeros | checksum 16
    extent, page 0    magic "TFSXTENT" | version u16 | kind u8 | name length u8 | meta length u32 | epoch 16 |
                      serial u64 | offset u64 | length u64 | digest 16 | name | meta | zeros | checksum 16
    draft's data      seq u64 | at_ns i64 | path length u32 | names u32 | write id length u8 |
                      write id | path | names, each with a length u8 before it | the draft, encoded
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tierfs.digest import checksum
from tierfs.errors import CorruptionError, FormatError, InvalidInputError
from tierfs.host.ground import PAGE_BYTES

GRANULE = 64 * 1024
"""Bytes of a granule. Extents begin at multiples of this, and take whole granules."""

SESSION_BITS = 32
"""The low bits of a serial count within one session. The bits above them are the number of the session."""

VERSION = 1
NAME_BYTES_MAX = 33
META_BYTES_MAX = 3500
INTENTS_MAX = 200
_CHECKSUM_BYTES = 16
_ARENA = struct.Struct("<8sH6x16s")
_INTENTS = struct.Struct("<8sHxxI16s")
_INTENT = struct.Struct("<QQ")
_EXTENT = struct.Struct("<8sHBBI16sQQQ16s")
_DRAFT = struct.Struct("<QqIIB")
_ARENA_MAGIC = b"TFSARENA"
_INTENTS_MAGIC = b"TFSINTNT"
EXTENT_MAGIC = b"TFSXTENT"


class ExtentKind(enum.IntEnum):
    """The kind of an extent's content."""

    RELEASED = 0
    CHUNK = 1
    DRAFT = 2


def extent_bytes(length: int) -> int:
    """Return the bytes of the arena that ``length`` bytes of data take: a page and the data, in whole granules."""
    return -(-(PAGE_BYTES + length) // GRANULE) * GRANULE


def _seal(*pieces: bytes) -> bytes:
    body = b"".join(pieces).ljust(PAGE_BYTES - _CHECKSUM_BYTES, b"\0")
    return body + checksum(body)


def _is_sealed(page: bytes, magic: bytes) -> bool:
    return page.startswith(magic) and checksum(page[:-_CHECKSUM_BYTES]) == page[-_CHECKSUM_BYTES:]


@dataclass(frozen=True, slots=True)
class ArenaPage:
    """The arena's first page. The epoch is random for each arena. The index of the arena must have the same epoch."""

    epoch: bytes

    def encode(self) -> bytes:
        return _seal(_ARENA.pack(_ARENA_MAGIC, VERSION, self.epoch))

    @classmethod
    def decode(cls, page: bytes) -> ArenaPage | None:
        """Decode the page. Return None if it is damaged or another kind of page.

        Raises:
            FormatError: Another version of tierfs made it.
        """
        if not _is_sealed(page, _ARENA_MAGIC):
            return None
        _, version, epoch = _ARENA.unpack_from(page)
        if version != VERSION:
            raise FormatError(
                f"the arena has version {version}; this tierfs reads version {VERSION}: use the tierfs that made it, "
                "or wait until nothing is pending and remove the nvme tier's files",
                tier="nvme",
            )
        return cls(epoch)


@dataclass(frozen=True, slots=True)
class IntentPage:
    """Extents of drafts that are being written.

    After a crash, a draft among them that is not in the index was never acknowledged.
    """

    epoch: bytes
    extents: tuple[tuple[int, int], ...]  # offset and serial

    def encode(self) -> bytes:
        head = _INTENTS.pack(_INTENTS_MAGIC, VERSION, len(self.extents), self.epoch)
        return _seal(head, *(_INTENT.pack(*extent) for extent in self.extents))

    @classmethod
    def decode(cls, page: bytes) -> IntentPage | None:
        """Decode the page. Return None if it is damaged, of another version, or was never written."""
        if not _is_sealed(page, _INTENTS_MAGIC):
            return None
        _, version, count, epoch = _INTENTS.unpack_from(page)
        if version != VERSION or count > INTENTS_MAX:
            return None
        at = range(_INTENTS.size, _INTENTS.size + count * _INTENT.size, _INTENT.size)
        return cls(epoch, tuple((offset, serial) for offset, serial in (_INTENT.unpack_from(page, i) for i in at)))


@dataclass(frozen=True, slots=True)
class ExtentPage:
    """The first page of an extent.

    Attributes:
        kind: The kind of content.
        epoch: The arena's epoch.
        serial: Grows with every extent written. It tells which of two overlapping extents is the later one.
        offset: Offset of the extent in the arena. A copy of the page at another offset is not valid.
        length: Bytes of data.
        name: A chunk's local name, or a draft's write id.
        meta: A chunk's metadata, or a draft's path.
        digest: XXH3-128 of a draft's data. Zeros for a chunk: its metadata has the digests.
    """

    kind: ExtentKind
    epoch: bytes
    serial: int
    offset: int
    length: int
    name: bytes
    meta: bytes = b""
    digest: bytes = bytes(16)

    def encode(self) -> bytes:
        """Encode the page.

        Raises:
            InvalidInputError: The name is empty or too long, or the metadata is too long.
        """
        if not 0 < len(self.name) <= NAME_BYTES_MAX or len(self.meta) > META_BYTES_MAX:
            raise InvalidInputError(
                f"a name of {len(self.name)} bytes or metadata of {len(self.meta)} bytes is invalid"
            )
        lengths = (len(self.name), len(self.meta))
        return _seal(
            _EXTENT.pack(
                EXTENT_MAGIC,
                VERSION,
                self.kind,
                *lengths,
                self.epoch,
                self.serial,
                self.offset,
                self.length,
                self.digest,
            ),
            self.name,
            self.meta,
        )

    @classmethod
    def decode(cls, page: bytes) -> ExtentPage | None:
        """Decode the page. Return None if it is damaged, of another version, or another kind of page."""
        if not _is_sealed(page, EXTENT_MAGIC):
            return None
        _, version, kind, name_length, meta_length, epoch, serial, offset, length, digest = _EXTENT.unpack_from(page)
        if (
            version != VERSION
            or kind not in set(ExtentKind)
            or name_length > NAME_BYTES_MAX
            or meta_length > META_BYTES_MAX
        ):
            return None
        at = _EXTENT.size + name_length
        name = page[_EXTENT.size : at]
        return cls(ExtentKind(kind), epoch, serial, offset, length, name, page[at : at + meta_length], digest)


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """The data of a draft's extent: everything that a rebuild of the index needs.

    Attributes:
        seq: The position in closing order.
        at_ns: When the draft was stored, wall clock.
        write_id: Identifies the change.
        path: Relative to the store.
        names: Names of the chunks that the draft needs from this tier.
        data: The encoded draft.
    """

    seq: int
    at_ns: int
    write_id: bytes
    path: str
    names: Sequence[bytes]
    data: bytes

    def encode(self) -> bytes:
        path = self.path.encode("utf-8", "surrogateescape")
        head = _DRAFT.pack(self.seq, self.at_ns, len(path), len(self.names), len(self.write_id))
        names = b"".join(bytes([len(name)]) + name for name in self.names)
        return b"".join((head, self.write_id, path, names, self.data))

    @classmethod
    def decode(cls, data: bytes) -> DraftRecord:
        """Decode the record.

        Raises:
            CorruptionError: The record is damaged or cut short.
        """
        try:
            seq, at_ns, path_length, count, id_length = _DRAFT.unpack_from(data)
            at = _DRAFT.size + id_length
            write_id = data[_DRAFT.size : at]
            path = data[at : at + path_length].decode("utf-8", "surrogateescape")
            at += path_length
            names = []
            for _ in range(count):
                names.append(data[at + 1 : at + 1 + data[at]])
                at += 1 + data[at]
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise CorruptionError(f"a draft's record is damaged: {error}", tier="nvme") from error
        if at > len(data):
            raise CorruptionError("a draft's record is cut short", tier="nvme")
        return cls(seq, at_ns, write_id, path, tuple(names), data[at:])
