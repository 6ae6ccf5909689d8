"""Chunks on their way to the object tier, encoded: what the one who stores them and the one who encodes them agree on."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from tierfs.codec import Codec, Coding, Reason, encode_blocks
from tierfs.digest import BLOCK_BYTES, Buffer
from tierfs.format.envelope import BaseRange
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row

if TYPE_CHECKING:
    from tierfs.store.encode.desks import Desk
    from tierfs.store.encode.room import Room

__all__ = ["BlockPlan", "Encoded", "EncodedBlock", "Sending", "blocks_of", "encode_chunk", "keep"]

_ALL = frozenset(Codec)


class EncodedBlock(NamedTuple):
    """One block as it is to be stored: in the chunk, or in its room."""

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


class Sending(Protocol):
    """One chunk on its way, with all that is known of it."""

    def encode(self, raw: memoryview, digest: bytes, room: Room) -> Encoded:
        """Encode it.

        Args:
            raw: The chunk. Borrowed; the result may lie in it. If it lies in the room, it is overwritten.
            digest: Its own.
            room: Where what was encoded is to lie.
        """

    def putting(self, row: Row) -> AbstractContextManager[None]:
        """What sends a chunk goes in here."""


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
    raw: memoryview, plans: Iterable[BlockPlan], desk: Desk, allowed: Container[Codec] = _ALL
) -> list[EncodedBlock]:
    """Encode a chunk's blocks.

    Args:
        raw: The chunk.
        plans: What to try, for each block. Each is asked for when the blocks before it are encoded, but for up to three that
            might be encoded together with it: the bases of four count at the same time.
        desk: Where what is encoded lies then.
        allowed: What may be made of a block; where another codec was found to be better than the one asked for, or that will
            not do, STORE.
    """
    blocks: list[EncodedBlock] = []
    for group in _together(zip(plans, _places(raw), strict=True)):
        coding = group[0][0].coding
        if coding.codec is Codec.STORE:
            blocks += [EncodedBlock(Codec.STORE, plan.reason, raw[place]) for plan, place in group]
            continue
        out = desk.take().out
        bases = [plan.base for plan, _ in group] if coding.codec.base_factor else [None] * len(group)
        found = encode_blocks([raw[place] for _, place in group], coding, bases, [out[place] for _, place in group])
        for (codec, length), (plan, place) in zip(found, group, strict=True):
            is_stored = codec is Codec.STORE or codec not in allowed
            data = raw[place] if is_stored else out[place][:length]
            blocks.append(EncodedBlock(Codec.STORE if is_stored else codec, plan.reason, data))
    return blocks


def keep(blocks: Iterable[EncodedBlock], raw: memoryview, desk: Desk, room: Room) -> list[EncodedBlock]:
    """The blocks of a chunk where they stay when the desk is left: those that were encoded lie in the room then.

    Args:
        blocks: As they were encoded.
        raw: The chunk. If it lies in that room, so do all its blocks, and it is overwritten.
        desk: Where what was encoded lies.
        room: Where it is to lie.
    """
    import numpy as np  # noqa: PLC0415 - importing the package must not bring it

    found = list(blocks)
    stored = sum(len(block.data) for block in found if block.codec is Codec.STORE)
    encoded = sum(len(block.data) for block in found) - stored
    if not encoded:
        return found
    is_there = room.holds(raw)
    exchanges = not is_there or stored <= encoded
    if is_there:
        # What is less moves to where the rest is: where that is encoded, into memory that becomes the room's, else into the chunk.
        target = desk.take().out if exchanges else room.memory
        for number, (block, place) in enumerate(zip(found, blocks_of(target[: len(raw)]), strict=True)):
            if (block.codec is Codec.STORE) is exchanges:
                moved = place[: len(block.data)]
                np.copyto(np.frombuffer(moved, np.uint8), np.frombuffer(block.data, np.uint8))
                found[number] = block._replace(data=moved)
    if exchanges:
        desk.exchange(room)
    return found


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
