"""Chunks on their way to the object tier, encoded."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from tierfs._fork import PerProcess
from tierfs.buffers import Buffers
from tierfs.codec import Codec, Coding, Reason, encode_blocks
from tierfs.digest import BLOCK_BYTES, Buffer
from tierfs.format.envelope import BaseRange
from tierfs.format.keys import ChunkName

__all__ = ["BlockPlan", "Encoded", "EncodedBlock", "blocks_of", "encode_chunk"]

_ALL = frozenset(Codec)
# At most as many blocks are encoded together.
_TOGETHER_MAX = 4
_outs = PerProcess(lambda: Buffers(_TOGETHER_MAX * BLOCK_BYTES))


class EncodedBlock(NamedTuple):
    """One block as it is to be stored. Its bytes lie in the chunk's memory, or in the memory that it was encoded into."""

    codec: Codec
    reason: Reason
    data: Buffer


class Encoded(NamedTuple):
    """A chunk as it is to be stored.

    Attributes:
        blocks: In order.
        bases: What they are encoded against.
        needs: All chunk objects that are needed for that, those that the bases are encoded against included.
    """

    blocks: list[EncodedBlock]
    bases: tuple[BaseRange, ...] = ()
    needs: tuple[ChunkName, ...] = ()


class BlockPlan(NamedTuple):
    """How a block is to be encoded.

    Attributes:
        coding: What to try.
        reason: Why.
        base: Against what, if that is known: as long as the block is, or twice.
        part_of: Of what it is a part; only blocks of the same are alike enough to be encoded together.
    """

    coding: Coding
    reason: Reason
    base: memoryview | None = None
    part_of: object = None


def encode_chunk(
    raw: memoryview, plans: Iterable[BlockPlan], into: memoryview, allowed: Container[Codec] = _ALL
) -> list[EncodedBlock]:
    """Encode a chunk's blocks, each to where it begins in the chunk.

    That may be the chunk's own memory: a few blocks at a time are encoded elsewhere, which stays in the caches, and copied.

    Args:
        raw: The chunk.
        plans: What to try, for each block. Each is asked for when the blocks before it are encoded, but for up to three that
            might be encoded together with it: the bases of four count at the same time.
        into: Memory for the encoded blocks, as long as the chunk; ``raw`` itself where the chunk may be overwritten.
        allowed: What may be made of a block; where another codec was found to be better than the one asked for, or that will
            not do, STORE.
    """
    import numpy as np  # noqa: PLC0415 - importing the package must not bring it

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
"""Blocks that are to be encoded in the same way, each with its place in the chunk."""


def _together(planned: Iterable[tuple[BlockPlan, slice]]) -> Iterator[_Group]:
    """Blocks that are to be encoded in the same way, as many as are best encoded together."""
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
    """The places of a chunk's blocks in it."""
    return (slice(at, min(at + BLOCK_BYTES, len(raw))) for at in range(0, len(raw), BLOCK_BYTES))


def blocks_of(raw: memoryview, factor: int = 1) -> Iterator[memoryview]:
    """The blocks of a chunk; or, of what is longer than a chunk by a factor, what belongs to each of its blocks."""
    size = factor * BLOCK_BYTES
    return (raw[at : at + size] for at in range(0, len(raw), size))
