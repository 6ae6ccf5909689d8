"""The envelope of a chunk object: the data to fetch, decode and verify one block alone.

FORMAT.md, "Chunk envelope".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierfs import digest
from tierfs.digest import BLOCK_BYTES, CHUNK_BLOCKS, CHUNK_BYTES, Buffer, DigestKind
from tierfs.errors import CorruptionError
from tierfs.format.header import CHECKSUM_BYTES, HEADER_BYTES, Cursor, Kind, header, open_sealed, peek_kind, seal
from tierfs.format.keys import NO_RECIPE, ChunkName

BASES_MAX = 64
STORED_BYTES_MAX = CHUNK_BYTES + (1 << 16)
"""Largest size of a chunk object."""
# The codec that stores raw bytes. With any other codec, the encoded block is shorter than the raw one.
STORE = 0
_FIXED_BYTES = 40
_BLOCK_EXTRA_BYTES = 8
_BASE_EXTRA_BYTES = 28
ENVELOPE_BYTES_MAX = _FIXED_BYTES + 32 + CHUNK_BLOCKS * (32 + 8) + BASES_MAX * (32 + 28) + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class Block:
    """One row of the block table."""

    digest: bytes
    codec: int
    encoded_length: int
    reason: int = 0
    """Why this codec, for a person; see `tierfs.codec.blocks.Reason`."""


@dataclass(frozen=True, slots=True)
class BaseRange:
    """A range of another chunk that this one is encoded against.

    Attributes:
        name: The other chunk object.
        raw_length: Bytes of that chunk when decoded.
        stored_length: Bytes of that object.
        offset: Where the range begins in the decoded bytes.
        length: Bytes of the range.
    """

    name: ChunkName
    raw_length: int
    stored_length: int
    offset: int
    length: int

    def encode(self) -> bytes:
        """Return its row of the base table."""
        numbers = (self.raw_length, self.stored_length, self.offset, self.length)
        return self.name.encode() + b"".join(number.to_bytes(4, "little") for number in numbers)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The head of a chunk object.

    Attributes:
        digest_kind: Kind of every digest in it.
        digest: The chunk's digest, over its length and its blocks' digests.
        raw_length: Decoded bytes, 1 to 16 MiB.
        blocks: One row per started MiB.
        bases: The ranges that the blocks are encoded against, in order. Their total length is the chunk's raw length.
            For a chunk that is derived from elements of twice the width, it is twice that.
    """

    digest_kind: DigestKind
    digest: bytes
    raw_length: int
    blocks: tuple[Block, ...]
    bases: tuple[BaseRange, ...] = ()

    @property
    def recipe(self) -> bytes:
        """The part of the key that distinguishes chunk objects with the same content: see `recipe_of`."""
        return recipe_of(self.bases)

    @property
    def header_length(self) -> int:
        """Bytes before the first encoded block."""
        return envelope_bytes(self.digest_kind, len(self.blocks), len(self.bases))

    @property
    def stored_length(self) -> int:
        """Bytes of the whole object."""
        return self.header_length + sum(block.encoded_length for block in self.blocks)

    def encode(self) -> bytes:
        """Return the bytes that precede the encoded blocks."""
        out = bytearray(header(Kind.CHUNK, self.header_length))
        out += bytes((self.digest_kind, 0))
        out += len(self.blocks).to_bytes(2, "little")
        out += len(self.bases).to_bytes(2, "little")
        out += bytes(2)
        out += self.raw_length.to_bytes(4, "little")
        out += BLOCK_BYTES.to_bytes(4, "little")
        out += self.recipe
        out += self.digest
        for block in self.blocks:
            out += block.digest + bytes((block.codec, block.reason, 0, 0)) + block.encoded_length.to_bytes(4, "little")
        for base in self.bases:
            out += base.encode()
        return seal(bytes(out))

    @classmethod
    def decode(cls, data: Buffer, where: str, *, stored_length: int) -> Envelope:
        """Decode an envelope from the first bytes of a chunk object.

        Args:
            data: The object's first bytes; bytes after the envelope are ignored.
            where: The name of the object in errors.
            stored_length: Bytes of the whole object, as the object tier reports them.

        Raises:
            CorruptionError: The envelope is damaged or cut short, its digest does not follow from its blocks' digests,
                or the object has another length than the envelope says.
            FormatError: The envelope is of another version, or a field is over its limit.
        """
        kind, header_length = peek_kind(data, where)
        if kind is not Kind.CHUNK:
            raise CorruptionError(f"{where}: expected a chunk, found a {kind.name.lower()} record", path=where)
        if not _FIXED_BYTES < header_length <= min(len(data), ENVELOPE_BYTES_MAX):
            raise CorruptionError(f"{where}: its envelope is cut short or damaged", path=where)
        cursor = open_sealed(memoryview(data)[:header_length], where)
        digest_kind = cursor.digest_kind()
        cursor.zeros(1)
        blocks = cursor.bounded(2, CHUNK_BLOCKS, "block count")
        bases = cursor.bounded(2, BASES_MAX, "base count")
        cursor.zeros(2)
        raw_length = cursor.bounded(4, CHUNK_BYTES, "raw length")
        if cursor.unsigned(4) != BLOCK_BYTES or blocks != block_count(raw_length) or not blocks:
            raise cursor.malformed(f"{blocks} blocks do not make {raw_length} bytes")
        recipe = cursor.bytes(8)
        name = cursor.bytes(digest_kind.size)
        table = []
        for index in range(blocks):
            block_digest = cursor.bytes(digest_kind.size)
            codec, reason = cursor.unsigned(1), cursor.unsigned(1)
            cursor.zeros(2)
            limit = min(BLOCK_BYTES, raw_length - index * BLOCK_BYTES)
            encoded_length = cursor.bounded(4, limit, "encoded length")
            if not encoded_length or (encoded_length == limit) != (codec == STORE):
                raise cursor.malformed(f"codec {codec} with {encoded_length} encoded bytes for a block of {limit}")
            table.append(Block(block_digest, codec, encoded_length, reason))
        needs = tuple(_decode_base(cursor, digest_kind) for _ in range(bases))
        cursor.finish()
        if recipe != recipe_of(needs):
            raise cursor.malformed(f"recipe {recipe.hex()} does not match the {bases} bases")
        if needs and sum(base.length for base in needs) not in (raw_length, 2 * raw_length):
            raise cursor.malformed(f"bases of {[base.length for base in needs]} bytes for a chunk of {raw_length}")
        envelope = cls(digest_kind, name, raw_length, tuple(table), needs)
        if digest.combine(digest_kind, raw_length, (block.digest for block in table)) != name:
            raise CorruptionError(f"{where}: its digest does not follow from its blocks' digests", path=where)
        if envelope.stored_length != stored_length:
            raise CorruptionError(
                f"{where}: the object has {stored_length} bytes instead of {envelope.stored_length}: "
                "it was cut short or extended",
                path=where,
            )
        return envelope


def recipe_of(bases: Sequence[BaseRange]) -> bytes:
    """Return the recipe of a chunk object with these bases; `NO_RECIPE` without bases.

    It distinguishes the object from others with the same content.
    """
    if not bases:
        return NO_RECIPE
    recipe = digest.checksum(*(base.encode() for base in bases))[: len(NO_RECIPE)]
    return recipe if recipe != NO_RECIPE else (1).to_bytes(len(NO_RECIPE), "big")


def _decode_base(cursor: Cursor, kind: DigestKind) -> BaseRange:
    name = cursor.chunk_name(kind)
    raw_length = cursor.bounded(4, CHUNK_BYTES, "raw length of a base")
    stored_length = cursor.bounded(4, STORED_BYTES_MAX, "stored length of a base")
    offset, length = cursor.unsigned(4), cursor.unsigned(4)
    if not length or offset + length > raw_length:
        raise cursor.malformed(f"invalid range of a base of {raw_length} bytes: {length} from {offset} on")
    return BaseRange(name, raw_length, stored_length, offset, length)


def block_count(raw_length: int) -> int:
    """Return the number of blocks of a chunk of ``raw_length`` bytes."""
    return -(-raw_length // BLOCK_BYTES)


def envelope_bytes(kind: DigestKind, blocks: int, bases: int = 0) -> int:
    """Return the bytes of an envelope with this many blocks and bases."""
    rows = blocks * (kind.size + _BLOCK_EXTRA_BYTES) + bases * (kind.size + _BASE_EXTRA_BYTES)
    return _FIXED_BYTES + kind.size + rows + CHECKSUM_BYTES


assert HEADER_BYTES < _FIXED_BYTES
