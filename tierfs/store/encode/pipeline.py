"""Encode the blocks of a chunk for the object tier, as planned or as derived from other chunks of the same save.

Working copies in bfloat16 are derived from float32 tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from tierfs._fork import PerProcess
from tierfs.buffers import Buffers, block_buffers, fresh
from tierfs.codec import Codec, Coding, Reason, encode_block, encode_blocks
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, Buffer
from tierfs.errors import InvalidInputError
from tierfs.format.envelope import BASES_MAX, BaseRange
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row


class Bases(Protocol):
    """Reads the chunks that one chunk may be encoded against."""

    def read_source(self, row: Row, out: memoryview) -> bool:
        """Copy a whole chunk from this host, verified. Return whether it is here."""

    def read_base(self, row: Row, out: memoryview) -> bool:
        """Do the same as `read_source`, if the object is sound: the encoded chunk will need that object."""

    def fetch(self, row: Row, out: memoryview) -> None:
        """Copy a whole chunk from the object tier, verified. Raises a `TierfsError` if it cannot be read."""


@dataclass(frozen=True, slots=True)
class Codecs:
    """The codecs that the encoder may use.

    Attributes:
        allowed: The codecs. Always has STORE. Has CONST unless STORE is the only one: a block for which CONST is right
            is not tried with any other codec.
        always: Encode under any pressure.
    """

    allowed: frozenset[Codec] = frozenset(Codec)
    always: bool = False

    @classmethod
    def parse(cls, text: str) -> Codecs:
        """Parse the option: ``auto``, ``all``, ``off``, or names like ``"zstd,plane"``.

        ``all`` uses all codecs wherever they save bytes, and ``auto`` does so too except under pressure.

        Raises:
            InvalidInputError: ``text`` is none of these.
        """
        if text == "auto":
            return cls()
        if text == "all":
            return cls(always=True)
        if text == "off":
            return cls(frozenset({Codec.STORE}))
        names = [name.strip().upper() for name in text.split(",")]
        unknown = [name for name in names if name not in Codec.__members__]
        if unknown:
            known = ", ".join(codec.name.lower() for codec in Codec)
            raise InvalidInputError(f"codecs={text!r} is invalid: choose auto, all, off, or names among {known}")
        implied = {Codec.STORE} if names == ["STORE"] else {Codec.STORE, Codec.CONST}
        return cls(frozenset({*implied, *(Codec[name] for name in names)}), always=True)

    def __str__(self) -> str:
        if self.allowed == frozenset(Codec):
            return "all" if self.always else "auto"
        return ",".join(codec.name.lower() for codec in sorted(self.allowed))


AUTO = Codecs()
Pressure: TypeAlias = Literal["none", "caller", "backlog"]
"""Why a chunk has to be sent soon: not at all, for a caller that waits for it, or for room in the local tiers."""


_ALL = frozenset(Codec)
# Most blocks that are encoded together.
_TOGETHER_MAX = 4
_outs = PerProcess(lambda: Buffers(_TOGETHER_MAX * BLOCK_BYTES))


class EncodedBlock(NamedTuple):
    """One encoded block. Its bytes lie in the chunk's memory, or in the memory that it was encoded into."""

    codec: Codec
    reason: Reason
    data: Buffer


class Encoded(NamedTuple):
    """An encoded chunk.

    Attributes:
        blocks: The encoded blocks, in order.
        bases: The bytes that the blocks are encoded against.
        needs: All chunk objects that a reader of the bases needs, including the bases of the bases.
    """

    blocks: list[EncodedBlock]
    bases: tuple[BaseRange, ...] = ()
    needs: tuple[ChunkName, ...] = ()


class BlockPlan(NamedTuple):
    """How to encode a block.

    Attributes:
        coding: The coding to try.
        reason: Why this coding, for a person.
        base: The bytes to encode against, if any: as long as the block, or twice as long.
        part_of: The tensor that the block is part of. Only blocks of one tensor are encoded together, because others
            are not alike enough.
    """

    coding: Coding
    reason: Reason
    base: memoryview | None = None
    part_of: object = None


def encode_chunk(
    raw: memoryview, plans: Iterable[BlockPlan], into: memoryview, allowed: Container[Codec] = _ALL
) -> list[EncodedBlock]:
    """Encode a chunk's blocks. Each encoded block lies at the offset of its raw block.

    The target may be the chunk's own memory: a few blocks at a time are encoded into a buffer that stays in the CPU
    caches, and copied from there.

    Args:
        plans: How to encode each block. A plan is drawn when all blocks before it are encoded, except up to three that
            may be encoded together with it. So the bases of four blocks have to be valid at the same time.
        into: Memory for the encoded blocks, as long as the chunk; ``raw`` itself if the chunk may be overwritten.
        allowed: Codecs that a block may get. A block gets STORE if another codec turned out to be better, or if its
            planned codec does not work for it.
    """
    import numpy as np  # noqa: PLC0415 - importing the package must not load it

    blocks: list[EncodedBlock] = []
    with _outs().lend(_TOGETHER_MAX * BLOCK_BYTES) as memory:
        outs = list(blocks_of(memory))
        places = (slice(at, min(at + BLOCK_BYTES, len(raw))) for at in range(0, len(raw), BLOCK_BYTES))
        for group in _together(zip(plans, places, strict=True)):
            coding = group[0][0].coding
            if coding.codec is Codec.STORE:
                blocks += [EncodedBlock(Codec.STORE, plan.reason, raw[place]) for plan, place in group]
                continue
            bases = [plan.base for plan, _ in group] if coding.codec.base_factor else [None] * len(group)
            found = encode_blocks([raw[place] for _, place in group], coding, bases, outs[: len(group)])
            for (codec, length), out, (plan, place) in zip(found, outs, group, strict=False):
                if codec is Codec.STORE or codec not in allowed:
                    blocks.append(EncodedBlock(Codec.STORE, plan.reason, raw[place]))
                    continue
                data = into[place][:length]
                np.copyto(np.frombuffer(data, np.uint8), np.frombuffer(out[:length], np.uint8))
                blocks.append(EncodedBlock(codec, plan.reason, data))
    return blocks


_Group: TypeAlias = list[tuple[BlockPlan, slice]]
"""Blocks to encode in the same way, each with its place in the chunk."""


def _together(planned: Iterable[tuple[BlockPlan, slice]]) -> Iterator[_Group]:
    """Yield groups of consecutive blocks with the same plan, as large as are best encoded together."""
    group: _Group = []
    alike: tuple[Coding, object, int] | None = None
    for plan, place in planned:
        length = place.stop - place.start
        if group and (plan.coding, plan.part_of, length) != alike:
            yield group
            group = []
        alike = plan.coding, plan.part_of, length
        group.append((plan, place))
        if len(group) >= plan.coding.together:
            yield group
            group = []
    if group:
        yield group


def blocks_of(raw: memoryview, factor: int = 1) -> Iterator[memoryview]:
    """Yield the blocks of a chunk; of memory ``factor`` times as long, yield the part that goes with each block."""
    size = factor * BLOCK_BYTES
    return (raw[at : at + size] for at in range(0, len(raw), size))


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

    def encode(self, raw: memoryview, sources: Sequence[SourcePiece], bases: Bases, into: memoryview) -> Encoded | None:
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

    def _read_source(self, row: Row, bases: Bases) -> memoryview | None:
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
