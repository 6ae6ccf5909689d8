"""Chunks on their way to the object tier, encoded: what the one who stores them and the one who encodes them agree on."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from tierfs.codec import Codec, Coding, Reason, encode_blocks
from tierfs.codec.workers import Job, Worker, encode_workers
from tierfs.digest import BLOCK_BYTES, Buffer
from tierfs.format.envelope import Base
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row

if TYPE_CHECKING:
    from tierfs.store.encode.desks import Desk
    from tierfs.store.encode.room import Room

__all__ = ["Encoded", "EncodedBlock", "Plan", "Sending", "blocks_of", "encode_chunk", "keep"]

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
    bases: tuple[Base, ...] = ()
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


class Plan(NamedTuple):
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
    raw: memoryview, plans: Iterable[Plan], desk: Desk, allowed: Container[Codec] = _ALL
) -> list[EncodedBlock]:
    """Encode a chunk's blocks.

    Args:
        raw: The chunk.
        plans: What to try, for each block. Each is asked for when the blocks before it are encoded, but for up to three that
            might be encoded together with it, and what is encoded meanwhile: the bases of eight count at the same time.
        desk: Where what is encoded lies then.
        allowed: What may be made of a block; where another codec was found to be better than the one asked for, or that will
            not do, STORE.
    """
    blocks: list[EncodedBlock] = []
    with contextlib.ExitStack() as lent:
        for group, found in _encoded(_together(zip(plans, _places(raw), strict=True)), raw, desk, lent):
            for (codec, length), (plan, place) in zip(found, group, strict=True):
                if codec is Codec.STORE or codec not in allowed:
                    blocks.append(EncodedBlock(Codec.STORE, plan.reason, raw[place]))
                else:
                    blocks.append(EncodedBlock(codec, plan.reason, desk.take().out[place][:length]))
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


def _worker(size: int, lent: contextlib.ExitStack) -> Worker | None:
    """A process that encodes a chunk; of a small one it would take as long to tell it."""
    return lent.enter_context(encode_workers().lend(size)) if size >= BLOCK_BYTES else None


_Group: TypeAlias = list[tuple[Plan, slice]]
"""Blocks that are to be encoded in the same way, each with its place in the chunk."""


def _encoded(
    groups: Iterable[_Group], raw: memoryview, desk: Desk, lent: contextlib.ExitStack
) -> Iterator[tuple[_Group, list[tuple[Codec, int]]]]:
    """Groups with what came of them: by a process that encodes, where there is one, which has its next job when it is done with the last."""
    worker: Worker | None = None
    is_asked = False
    begun: deque[tuple[_Group, Job | None, bool]] = deque()

    def finish() -> tuple[_Group, list[tuple[Codec, int]]]:
        group, job, is_begun = begun.popleft()
        if job is None:
            return group, [(Codec.STORE, 0)] * len(group)
        found = worker.finish() if worker is not None and is_begun else None
        return group, encode_blocks(job.raws, job.coding, job.bases, job.outs) if found is None else found

    for group in groups:
        coding = group[0][0].coding
        job = None
        if coding.codec is not Codec.STORE:
            out = desk.take().out
            if not is_asked:
                worker, is_asked = _worker(len(raw), lent), True
            bases = [plan.base for plan, _ in group] if coding.codec.base_factor else [None] * len(group)
            job = Job([raw[place] for _, place in group], coding, bases, [out[place] for _, place in group])
        begun.append((group, job, job is not None and worker is not None and worker.begin(job)))
        if len(begun) > (worker is not None):
            yield finish()
    while begun:
        yield finish()


def _together(planned: Iterable[tuple[Plan, slice]]) -> Iterator[_Group]:
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
