"""Encode chunks that follow from others: working copies in bfloat16 of float32 tensors in the same save."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierfs.buffers import block_buffers, fresh
from tierfs.codec import Codec, Coding, Reason, encode_block
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES
from tierfs.format.envelope import BASES_MAX, BaseRange
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.store.encode.codecs import Codecs
from tierfs.store.encode.pipeline import BlockPlan, Encoded, EncodedBlock, blocks_of, encode_chunk

if TYPE_CHECKING:
    from tierfs.store.chunks import BaseReader

_DERIVE = BlockPlan(Coding(Codec.DERIVE, 2), Reason.DERIVED)


class SourcePiece(NamedTuple):
    """A part of a stored chunk.

    Attributes:
        row: The chunk object.
        offset: Where the part begins in the chunk's raw bytes.
        length: Bytes of the part.
    """

    row: Row
    offset: int
    length: int


class Deriver:
    """Encodes chunks as derived, one at a time. For one thread at a time.

    Uses the memory of three chunks. Takes hardly longer than copying the sources if they are in memory.
    """

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs
        self._reference: memoryview | None = None
        self._source: memoryview | None = None  # the chunk that was last read in parts
        self._source_name: ChunkName | None = None

    def __repr__(self) -> str:
        return f"Deriver({self._codecs})"

    def encode(
        self, raw: memoryview, sources: Sequence[SourcePiece], bases: BaseReader, into: memoryview
    ) -> Encoded | None:
        """Encode a chunk as derived from wider elements.

        Args:
            raw: The chunk. Borrowed, and unchanged if the result is ``None``.
            sources: The wider elements, in order.
            bases: Reads the sources.
            into: See `tierfs.store.encode.pipeline.encode_chunk`.

        Returns:
            ``None`` if no block follows from the sources, if a source is not on this host, or if the chunk
            would need more chunks than a row may name.
        """
        if len(_needs(sources)) > BASES_MAX:
            return None
        if self._reference is None:
            self._reference = fresh(2 * CHUNK_BYTES)
        reference = self._reference[: 2 * len(raw)]
        begins = itertools.accumulate((length for _, _, length in sources), initial=0)
        # Sorted by name, so that each source is read once: only the last source that is read in parts is kept.
        for at, (row, offset, length) in sorted(zip(begins, sources, strict=False), key=lambda part: part[1].row.name):
            out = reference[at : at + length]
            if length == row.raw_length:
                if not bases.read_source(row, out):
                    return None
            else:
                whole = self._read_source(row, bases)
                if whole is None:
                    return None
                out[:] = whole[offset : offset + length]
        plans = [_DERIVE._replace(base=base) for base in blocks_of(reference, 2)]
        with block_buffers().lend(BLOCK_BYTES) as out:
            # Check that some block is derived before encoding: `encode_chunk` may overwrite the chunk.
            pairs = zip(blocks_of(raw), plans, strict=True)
            if all(encode_block(block, plan.coding, plan.base, out)[0] is not Codec.DERIVE for block, plan in pairs):
                return None
        return with_bases(encode_chunk(raw, plans, into, self._codecs.allowed), sources)

    def _read_source(self, row: Row, bases: BaseReader) -> memoryview | None:
        """Read a whole chunk from this host and verify it; ``None`` if this host does not have it.

        The last chunk is kept, because small tensors that follow each other often derive from parts of one chunk.
        """
        if self._source is None:
            self._source = fresh(CHUNK_BYTES)
        whole = self._source[: row.raw_length]
        if self._source_name != row.name:
            self._source_name = None
            if not bases.read_source(row, whole):
                return None
            self._source_name = row.name
        return whole


def with_bases(blocks: list[EncodedBlock], pieces: Sequence[SourcePiece]) -> Encoded:
    """Return the encoded chunk of blocks that are encoded against these pieces, laid end to end."""
    bases = tuple(
        BaseRange(row.name, row.raw_length, row.stored_length, offset, length) for row, offset, length in pieces
    )
    return Encoded(blocks, bases, _needs(pieces))


def _needs(pieces: Iterable[SourcePiece]) -> tuple[ChunkName, ...]:
    """Return the names of all chunk objects that are needed to read the pieces."""
    return tuple(dict.fromkeys(name for row, _, _ in pieces for name in (row.name, *row.bases)))
