"""Encode the blocks of a chunk for the object tier."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from tierfs._fork import PerProcess
from tierfs.buffers import Buffers
from tierfs.codec import Codec, Coding, Reason, encode_blocks
from tierfs.digest import BLOCK_BYTES, Buffer
from tierfs.format.envelope import BaseRange
from tierfs.format.keys import ChunkName

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
        raw: The chunk.
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
        for group in _together(zip(plans, _places(raw), strict=True)):
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


def _places(raw: memoryview) -> Iterator[slice]:
    return (slice(at, min(at + BLOCK_BYTES, len(raw))) for at in range(0, len(raw), BLOCK_BYTES))


def blocks_of(raw: memoryview, factor: int = 1) -> Iterator[memoryview]:
    """Yield the blocks of a chunk; of memory ``factor`` times as long, yield the part that goes with each block."""
    size = factor * BLOCK_BYTES
    return (raw[at : at + size] for at in range(0, len(raw), size))
