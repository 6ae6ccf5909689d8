"""The envelope of a chunk object, to fetch, decode and verify one block alone; and the blocks that wanted parts need.

FORMAT.md, "Chunk envelope".
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
# The share of a chunk that a read has to want for the whole chunk to be fetched. EXACT_SHARE is for callers that know
# they want nothing else of the chunk: they get at most 10 % more bytes than wanted, besides the rest of partly wanted
# blocks. ANY_SHARE is for callers that will soon want the rest: the whole chunk is fetched at once.
WHOLE_SHARE = 0.25
EXACT_SHARE = 1 / 1.1
ANY_SHARE = 0.0
Part: TypeAlias = tuple[int, memoryview]
"""The offset of wanted bytes in a chunk or a file, and the writable memory that they fill."""


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


def by_chunk(parts: Iterable[tuple[int, Any]], starts: Sequence[int]) -> dict[int, list[tuple[int, Any]]]:
    """Cut parts of a file where its chunks end.

    Args:
        parts: Offsets in the file, each with its memory: a memoryview of bytes, or a tensor of them. In any order; all
            within the file. Empty parts are left out.
        starts: The offset of each chunk, and the file's length.

    Returns:
        The wanted parts of each chunk by its index, with offsets in the chunk.
    """
    found: dict[int, list[tuple[int, Any]]] = {}
    for offset, out in parts:
        at, end = offset, offset + len(out)
        index = bisect.bisect_right(starts, at) - 1
        if at < end <= starts[index + 1]:  # nearly all parts, if there are many small ones
            found.setdefault(index, []).append((at - starts[index], out))
            continue
        while at < end:
            stop = min(end, starts[index + 1])
            found.setdefault(index, []).append((at - starts[index], out[at - offset : stop - offset]))
            at = stop
            index += 1
    return found


def count_blocks(parts: Iterable[Part]) -> int:
    """Return the number of blocks that parts of a chunk lie in."""
    return len({index for part in parts for index in _blocks(part)})


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Group ascending numbers into ranges."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def _blocks(part: Part) -> range:
    start, out = part
    return range(start // BLOCK_BYTES, (start + len(out) - 1) // BLOCK_BYTES + 1) if len(out) else range(0)


class BlockTargets:
    """Chooses the memory for each needed block: a caller's buffer if a part wants the whole block, else lent memory.

    Args:
        raw_length: Bytes of the chunk.
        parts: The wanted parts of it, in any order; may overlap. Borrowed until `finish`.
        lend: Returns memory of a length in bytes, which stays valid until `finish`.

    Attributes:
        blocks: Indexes of the needed blocks, in order.
    """

    def __init__(self, raw_length: int, parts: Iterable[Part], lend: Callable[[int], memoryview]) -> None:
        self._takers: dict[int, list[Part]] = {}
        for part in parts:
            for index in _blocks(part):
                self._takers.setdefault(index, []).append(part)
        self.blocks = sorted(self._takers)
        self._places: dict[int, tuple[memoryview, int, int]] = {}  # memory, and where in it the block begins and ends
        beside: dict[int, int] = {}
        for index in self.blocks:
            begin, end = index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, raw_length)
            takers = self._takers[index]
            for number, (start, out) in enumerate(takers):
                if start <= begin and end <= start + len(out):
                    self._places[index] = out, begin - start, end - start
                    del takers[number]
                    break
            else:
                beside[index] = end - begin
        if beside:
            memory, at = lend(sum(beside.values())), 0
            for index, length in beside.items():
                self._places[index] = memory, at, at + length
                at += length

    def __contains__(self, index: object) -> bool:
        return index in self._places

    def view(self, index: int) -> memoryview:
        """Return the memory for block ``index``, exactly its length."""
        memory, begin, end = self._places[index]
        return memory[begin:end]

    def pieces(self, blocks_max: int) -> Iterator[tuple[int, memoryview]]:
        """Yield memory of adjacent blocks, at most so many, with the index of the first one: all that are needed."""
        number = 0
        while number < len(self.blocks):
            first, count = self.blocks[number], 1
            memory, begin, end = self._places[first]
            while count < blocks_max:
                following = self._places.get(first + count)
                if following is None or following[0] is not memory or following[1] != end:
                    break
                end, count = following[2], count + 1
            yield first, memory[begin:end]
            number += count

    def finish(self) -> None:
        """Copy each block to the other parts that want some or all of it."""
        for index, takers in self._takers.items():
            begin, block = index * BLOCK_BYTES, self.view(index)
            end = begin + len(block)
            for start, out in takers:
                low, high = max(begin, start), min(end, start + len(out))
                out[low - start : high - start] = block[low - begin : high - begin]
