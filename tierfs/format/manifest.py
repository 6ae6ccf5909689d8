"""The records of the tree: a file's manifest, a directory's marker, and the tombstone of a deleted path.

FORMAT.md, "Manifest" and "Tombstone". A record holds a check of its own path, so two swapped records are both detected.
A tombstone differs from every other record by its size alone, so a listing finds tombstones without a GET.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import xxhash

from tierfs import digest
from tierfs.checked_json import parse_object
from tierfs.digest import CHUNK_BYTES, Buffer, DigestKind
from tierfs.errors import CorruptionError, FormatError, InvalidInputError
from tierfs.format.envelope import BASES_MAX, STORED_BYTES_MAX
from tierfs.format.header import Cursor, Kind, check_writable, header, open_sealed, peek_kind, seal
from tierfs.format.keys import NO_RECIPE, ChunkName

INLINE_BYTES_MAX = 64 * 1024
METADATA_BYTES_MAX = 64 * 1024
MANIFEST_BYTES_MAX = 16 << 20
VERSION_BYTES_MAX = 256
LENGTH_MAX = (1 << 63) - 1
INDIRECT_TABLE_BYTES_MAX = 1 << 30
TOMBSTONE_BYTES = 80
ROW_EXTRA_BYTES = 24
_INLINE = 1
_INDIRECT = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One chunk of a file.

    Attributes:
        name: The chunk object.
        raw_length: Decoded bytes.
        stored_length: Bytes of the object, so that it can be fetched whole and counted without a request.
        bases: Every other chunk object that is needed to decode it.
    """

    name: ChunkName
    raw_length: int
    stored_length: int
    bases: tuple[ChunkName, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A file and its chunks, or a directory's marker.

    Attributes:
        kind: `Kind.FILE` or `Kind.DIRECTORY`.
        write_id: 16 random bytes, new with every write. Shows whether a write took effect if its response was lost.
        length: Bytes of the file.
        created_ns: When the file was first written, nanoseconds since the epoch.
        modified_ns: When this content was written.
        digest_kind: Kind of every digest in it.
        digest: The content's digest, over the length and the chunks' digests in order.
        rows: The chunks in order. If ``indirect`` is set, the chunks of the row table instead.
        inline: The content itself if it is at most 64 KiB, else ``None``.
        indirect: Whether the row table itself is stored in chunks.
        element: Element type of the content if known, else 0.
        previous: The version that this write replaced, as the object tier names it; empty for a first write.
        metadata: The user's metadata for the file; JSON values.
    """

    kind: Kind
    write_id: bytes
    length: int
    created_ns: int
    modified_ns: int
    digest_kind: DigestKind
    digest: bytes
    rows: tuple[Row, ...] = ()
    inline: bytes | None = None
    indirect: bool = False
    element: int = 0
    previous: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)

    def replacing(self, version: str) -> Manifest:
        """Return the record that replaces this version."""
        return replace(self, previous=version)

    def encode(self, path: str) -> bytes:
        """Return the bytes of the record of ``path``.

        Raises:
            InvalidInputError: A field is over its limit, or the metadata is no JSON.
        """
        previous = self.previous.encode()
        try:
            metadata = (
                json.dumps(dict(self.metadata), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
                if self.metadata
                else b""
            )
            if metadata:
                parse_object(metadata, "metadata")  # what no reader would take
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"metadata of {path!r} is not JSON: {error}", path=path) from None
        check_writable(len(previous), VERSION_BYTES_MAX, "length of a version")
        check_writable(len(metadata), METADATA_BYTES_MAX, f"length of the metadata of {path!r}")
        check_writable(self.length, LENGTH_MAX, f"length of {path!r}")
        inline = self.inline if self.inline is not None else b""
        check_writable(len(inline), INLINE_BYTES_MAX, f"inline length of {path!r}")
        flags = (_INLINE if self.inline is not None else 0) | (_INDIRECT if self.indirect else 0)
        out = bytearray(header(self.kind, flags))
        out += self.write_id
        out += path_check(path)
        out += self.length.to_bytes(8, "little")
        out += self.created_ns.to_bytes(8, "little", signed=True)
        out += self.modified_ns.to_bytes(8, "little", signed=True)
        out += bytes((self.digest_kind, self.element))
        out += len(previous).to_bytes(2, "little")
        out += len(metadata).to_bytes(4, "little")
        out += len(inline).to_bytes(4, "little")
        out += len(self.rows).to_bytes(4, "little")
        out += self.digest + previous + metadata + inline + encode_rows(self.rows)
        check_writable(len(out), MANIFEST_BYTES_MAX, f"manifest of {path!r}")
        return seal(bytes(out))


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Marks a path as deleted, so that a late write that saw the file cannot bring it back.

    Attributes:
        write_id: 16 random bytes, as in `Manifest`.
        deleted_ns: When the path was deleted, nanoseconds since the epoch.
        previous_check: XXH3-64 of the deleted version.
    """

    write_id: bytes
    deleted_ns: int
    previous_check: int = 0

    def encode(self, path: str) -> bytes:
        """Return the bytes of the record of ``path``: always 80."""
        out = header(Kind.TOMBSTONE, 0) + self.write_id + path_check(path)
        out += self.deleted_ns.to_bytes(8, "little", signed=True) + self.previous_check.to_bytes(8, "little")
        return seal(out)

    def replacing(self, version: str) -> Tombstone:
        """Return the record that replaces this version."""
        return replace(self, previous_check=xxhash.xxh3_64_intdigest(version.encode()))


Record: TypeAlias = Manifest | Tombstone


def path_check(path: str) -> bytes:
    """Return the hash that binds a record to its path."""
    return xxhash.xxh3_128_digest(path.encode())


def content_digest(kind: DigestKind, length: int, chunk_digests: list[bytes]) -> bytes:
    """Return the digest of a file's content: the same for the same bytes cut in the same places."""
    return digest.combine(kind, length, chunk_digests)


def decode_record(data: Buffer, path: str | None, where: str) -> Record:
    """Decode the record of ``path``.

    Args:
        path: The path that the record was looked up under. None accepts a record of any path.
        where: The name of the object in errors.

    Raises:
        CorruptionError: The record is damaged, cut short, or that of another path.
        FormatError: The record is of another version, or a field breaks FORMAT.md.
    """
    kind, flags = peek_kind(data, where)
    if kind not in (Kind.FILE, Kind.DIRECTORY, Kind.TOMBSTONE):
        raise CorruptionError(f"{where}: expected a record of the tree, found a {kind.name.lower()}", path=where)
    cursor = open_sealed(data, where)
    write_id = cursor.bytes(16)
    check = cursor.bytes(16)
    if path is not None and check != path_check(path):
        raise CorruptionError(f"{where}: this record was written for another path: it was moved or swapped", path=where)
    if path is not None and kind is not Kind.TOMBSTONE and (kind is Kind.DIRECTORY) != path.endswith("/"):
        raise cursor.malformed(f"a {kind.name.lower()} at the key of the other kind of record")
    if kind is Kind.TOMBSTONE:
        if flags:
            raise cursor.malformed(f"a tombstone with flags {flags:#x}")
        tombstone = Tombstone(write_id, cursor.signed(8), cursor.unsigned(8))
        cursor.finish()
        return tombstone
    return _decode_manifest(cursor, kind, flags, write_id)


def _decode_manifest(cursor: Cursor, kind: Kind, flags: int, write_id: bytes) -> Manifest:
    if flags & ~(_INLINE | _INDIRECT):
        raise cursor.malformed(f"unknown flags {flags:#x}: use a newer tierfs")
    length = cursor.bounded(8, LENGTH_MAX, "length")
    created_ns, modified_ns = cursor.signed(8), cursor.signed(8)
    digest_kind = cursor.digest_kind()
    element = cursor.unsigned(1)
    previous_length = cursor.bounded(2, VERSION_BYTES_MAX, "length of the previous version")
    metadata_length = cursor.bounded(4, METADATA_BYTES_MAX, "length of the metadata")
    inline_length = cursor.bounded(4, INLINE_BYTES_MAX, "inline length")
    row_count = cursor.unsigned(4)
    content = cursor.bytes(digest_kind.size)
    previous = cursor.text(previous_length, "previous version")
    metadata = _decode_metadata(cursor, metadata_length)
    inline = cursor.bytes(inline_length)
    rows = decode_rows(cursor, row_count, digest_kind)
    cursor.finish()
    indirect = bool(flags & _INDIRECT)
    manifest = Manifest(
        kind=kind,
        write_id=write_id,
        length=length,
        created_ns=created_ns,
        modified_ns=modified_ns,
        digest_kind=digest_kind,
        digest=content,
        rows=rows,
        inline=inline if flags & _INLINE else None,
        indirect=indirect,
        element=element,
        previous=previous,
        metadata=metadata,
    )
    if indirect and sum(row.raw_length for row in rows) > INDIRECT_TABLE_BYTES_MAX:
        raise cursor.malformed(f"its table of chunks is over the limit of {INDIRECT_TABLE_BYTES_MAX} bytes")
    if (flags & _INLINE and indirect) or (indirect and not rows):
        raise cursor.malformed("its indirect table is missing")
    if kind is Kind.DIRECTORY and (not flags & _INLINE or rows or length):
        raise cursor.malformed("the marker of a directory has content")
    if flags & _INLINE:
        if rows or len(inline) != length or inline_digest(digest_kind, inline) != content:
            raise cursor.malformed("its inline content does not match its length or digest")
    elif inline or (not indirect and sum(row.raw_length for row in rows) != length):
        raise cursor.malformed("its chunks do not add up to the file's length")
    elif not indirect and content_digest(digest_kind, length, [row.name.digest for row in rows]) != content:
        raise cursor.malformed("its chunks do not match the file's digest")
    return manifest


def inline_digest(kind: DigestKind, inline: bytes) -> bytes:
    """Return the content digest of a file that is held in its manifest: as if it were one chunk of one block."""
    if not inline:
        return content_digest(kind, 0, [])
    return content_digest(kind, len(inline), [digest.digests_of(kind, inline)[1]])


def _decode_metadata(cursor: Cursor, length: int) -> dict[str, object]:
    if not length:
        return {}
    try:
        return parse_object(cursor.bytes(length), "its metadata")
    except FormatError as error:
        raise cursor.malformed(str(error)) from error


def encode_rows(rows: tuple[Row, ...]) -> bytes:
    """Return the row table of a manifest, or the content of an indirect table's chunks.

    Raises:
        InvalidInputError: A chunk has more bases than a reader accepts.
    """
    out = bytearray()
    for row in rows:
        check_writable(len(row.bases), BASES_MAX, "number of bases of a chunk")
        out += row.name.digest
        out += row.raw_length.to_bytes(4, "little") + row.stored_length.to_bytes(4, "little")
        out += row.name.generation.to_bytes(4, "little") + row.name.recipe
        out += len(row.bases).to_bytes(2, "little") + bytes(2)
        for base in row.bases:
            out += base.encode()
    return bytes(out)


def decode_rows(cursor: Cursor, count: int | None, kind: DigestKind) -> tuple[Row, ...]:
    """Decode ``count`` rows, or all rows if ``count`` is ``None``. Check each against its limits.

    Raises:
        FormatError: There are fewer rows, or a field is over its limit.
    """
    if count is not None and count * (kind.size + ROW_EXTRA_BYTES) > cursor.remaining:
        raise cursor.malformed(f"{count} rows do not fit into {cursor.remaining} bytes")
    rows: list[Row] = []
    while len(rows) < count if count is not None else cursor.remaining:
        name_digest = cursor.bytes(kind.size)
        raw_length = cursor.bounded(4, CHUNK_BYTES, "raw length of a chunk")
        stored_length = cursor.bounded(4, STORED_BYTES_MAX, "stored length of a chunk")
        if not raw_length:
            raise cursor.malformed("an empty chunk")
        generation, recipe = cursor.unsigned(4), cursor.bytes(8)
        bases = cursor.bounded(2, BASES_MAX, "base count")
        cursor.zeros(2)
        needs = tuple(cursor.chunk_name(kind) for _ in range(bases))
        rows.append(Row(ChunkName(name_digest, generation, recipe), raw_length, stored_length, needs))
    return tuple(rows)


assert bytes(8) == NO_RECIPE
