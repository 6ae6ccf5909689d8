"""Chunks on their way to the object tier, encoded: what the one who stores them and the one who encodes them agree on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from tierfs.buffers import fresh
from tierfs.codec import Codec, Coding, Reason, encode_blocks
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, Buffer
from tierfs.format.envelope import Base
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row

__all__ = ["Encoded", "EncodedBlock", "Plan", "Sending", "Watch", "blocks_of", "encode_chunk", "scratch"]

_ALL = frozenset(Codec)


class EncodedBlock(NamedTuple):
    """One block as it is to be stored; its bytes may lie in scratch memory of this thread."""

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

    def encode(self, raw: memoryview, digest: bytes) -> Encoded:
        """Encode it; ``digest`` is its own. The result counts until this thread encodes the next one."""

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


Watch = Callable[[Codec, int], AbstractContextManager[object]]
"""Gives what encoding goes on in, by the codec that is asked for and the number of raw bytes."""


def _unwatched(codec: Codec, count: int) -> AbstractContextManager[object]:  # noqa: ARG001 - a `Watch`
    return contextlib.nullcontext()


def encode_chunk(
    raw: memoryview, plans: Iterable[Plan], allowed: Container[Codec] = _ALL, watch: Watch = _unwatched
) -> list[EncodedBlock]:
    """Encode a chunk's blocks into scratch memory of this thread.

    Args:
        raw: The chunk.
        plans: What to try, for each block. Each is asked for when the blocks before it are encoded, but for those that might
            be encoded together with it, which need no base.
        allowed: What may be made of a block; where another codec was found to be better than the one asked for, or that will
            not do, STORE.
        watch: Learns what is encoded, and how long that takes.
    """
    out = scratch("out", CHUNK_BYTES)
    blocks: list[EncodedBlock] = []
    at = 0
    for group in _together(zip(plans, blocks_of(raw), strict=True)):
        (coding, _, base, _), first = group[0]
        raws = [block for _, block in group]
        starts = [at + index * len(first) for index in range(len(group))]
        with watch(coding.codec, len(group) * len(first)):
            found = encode_blocks(
                raws, coding, base if coding.codec.base_factor else None, [out[start:] for start in starts]
            )
        for (codec, length), start, (plan, block) in zip(found, starts, group, strict=True):
            if codec is Codec.STORE or codec not in allowed:
                blocks.append(EncodedBlock(Codec.STORE, plan.reason, block))
            else:
                at = start + length
                blocks.append(EncodedBlock(codec, plan.reason, out[start:at]))
    return blocks


def _together(planned: Iterable[tuple[Plan, memoryview]]) -> Iterator[list[tuple[Plan, memoryview]]]:
    """Blocks that are to be encoded in the same way, as many as are best encoded together."""
    group: list[tuple[Plan, memoryview]] = []
    alike: tuple[Coding, object, int] | None = None
    for plan, block in planned:
        if group and (plan.coding, plan.part_of, len(block)) != alike:
            yield group
            group = []
        alike = plan.coding, plan.part_of, len(block)
        group.append((plan, block))
        if len(group) >= plan.coding.together:
            yield group
            group = []
    if group:
        yield group


def blocks_of(raw: memoryview, factor: int = 1) -> Iterator[memoryview]:
    """The blocks of a chunk; or, of what is longer than a chunk by a factor, what belongs to each of its blocks."""
    size = factor * BLOCK_BYTES
    return (raw[at : at + size] for at in range(0, len(raw), size))


def scratch(name: str, count: int) -> memoryview:
    """Memory of this thread, for one use at a time under each name."""
    found: memoryview | None = getattr(_local, name, None)
    if found is None:
        found = fresh(count)
        setattr(_local, name, found)
    return found


_local = threading.local()
