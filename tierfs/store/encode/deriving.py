"""Chunks that follow from others: working copies in bfloat16 of what the same save holds in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tierfs.buffers import block_buffers, fresh
from tierfs.codec import Codec, Coding, Reason, encode_block
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, DigestKind
from tierfs.format.envelope import BASES_MAX, BaseRange
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.store.encode.bases import read_verified
from tierfs.store.encode.codecs import Codecs
from tierfs.store.encode.contexts import ReadRow
from tierfs.store.encode.pipeline import BlockPlan, Encoded, EncodedBlock, blocks_of, encode_chunk

__all__ = ["Deriver", "SourcePiece", "with_bases"]

_DERIVE = BlockPlan(Coding(Codec.DERIVE, 2), Reason.DERIVED)


class SourcePiece(NamedTuple):
    """A part of a chunk.

    Attributes:
        row: The chunk, as it is stored.
        offset: Of the part, in its raw bytes.
        length: Of the part.
    """

    row: Row
    offset: int
    length: int


class Deriver:
    """Encodes chunks as derived, one at a time: for one thread at a time.

    It takes the memory of three chunks, and hardly longer than copying them where they are in memory.

    Args:
        kind: The store's digests.
        codecs: Which ones may be used.
    """

    def __init__(self, kind: DigestKind, codecs: Codecs) -> None:
        self._kind = kind
        self._codecs = codecs
        self._reference: memoryview | None = None
        self._source: memoryview | None = None  # the last chunk that parts were read of
        self._source_name: ChunkName | None = None

    def __repr__(self) -> str:
        return f"Deriver({self._codecs})"

    def encode(
        self, raw: memoryview, sources: Sequence[SourcePiece], read: ReadRow, into: memoryview
    ) -> Encoded | None:
        """Encode a chunk as derived from wider elements; ``None`` if it is not, or needs more chunks than a row may name.

        Args:
            raw: The chunk. Borrowed; it stays as it is where there is no result.
            sources: Where those elements are, in order.
            read: Gets at chunks that lie on this host.
            into: See `tierfs.store.encode.pipeline.encode_chunk`.
        """
        if len(_needs(sources)) > BASES_MAX:
            return None
        if self._reference is None:
            self._reference = fresh(2 * CHUNK_BYTES)
        reference = self._reference[: 2 * len(raw)]
        begins = itertools.accumulate((length for _, _, length in sources), initial=0)
        # Each source once: of those that are read as a whole, only the last is kept.
        for at, (row, offset, length) in sorted(zip(begins, sources, strict=False), key=lambda part: part[1].row.name):
            out = reference[at : at + length]
            if length == row.raw_length:
                if not read_verified(self._kind, row, out, read):
                    return None
            else:
                whole = self._read_source(row, read)
                if whole is None:
                    return None
                out[:] = whole[offset : offset + length]
        plans = [_DERIVE._replace(base=base) for base in blocks_of(reference, 2)]
        with block_buffers().lend(BLOCK_BYTES) as out:
            # The chunk may be overwritten below, so that it is not a derived one has to be known before.
            pairs = zip(blocks_of(raw), plans, strict=True)
            if all(encode_block(block, plan.coding, plan.base, out)[0] is not Codec.DERIVE for block, plan in pairs):
                return None
        return with_bases(encode_chunk(raw, plans, into, self._codecs.allowed), sources)

    def _read_source(self, row: Row, read: ReadRow) -> memoryview | None:
        """All bytes of a chunk, verified, if it is on this host.

        Those of the last one are kept: small copies that follow each other are derived from parts of the same.
        """
        if self._source is None:
            self._source = fresh(CHUNK_BYTES)
        whole = self._source[: row.raw_length]
        if self._source_name != row.name:
            self._source_name = None
            if not read_verified(self._kind, row, whole, read):
                return None
            self._source_name = row.name
        return whole


def with_bases(blocks: list[EncodedBlock], pieces: Sequence[SourcePiece]) -> Encoded:
    """Blocks that are encoded against these pieces, one after the other."""
    bases = tuple(
        BaseRange(row.name, row.raw_length, row.stored_length, offset, length) for row, offset, length in pieces
    )
    return Encoded(blocks, bases, _needs(pieces))


def _needs(pieces: Iterable[SourcePiece]) -> tuple[ChunkName, ...]:
    """Every chunk object that it takes to read the pieces."""
    return tuple(dict.fromkeys(name for row, _, _ in pieces for name in (row.name, *row.bases)))
