"""Chunks on their way to the object tier, encoded: what the one who stores them and the one who encodes them agree on."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from tierfs.buffers import fresh
from tierfs.codec import Codec, Coding, Reason, encode_block
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, Buffer
from tierfs.format.envelope import Base
from tierfs.format.keys import ChunkName

__all__ = ["Encoded", "EncodedBlock", "Plan", "Sending", "blocks_of", "encode_blocks", "scratch"]

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

    def putting(self, count: int) -> AbstractContextManager[None]:
        """What sends so many bytes goes in here."""


class Plan(NamedTuple):
    """How a block is to be encoded, why, and against what, if that is known: as long as the block is, or twice."""

    coding: Coding
    reason: Reason
    base: memoryview | None = None


def encode_blocks(raw: memoryview, plans: Iterable[Plan], allowed: Container[Codec] = _ALL) -> list[EncodedBlock]:
    """Encode a chunk's blocks into scratch memory of this thread.

    Args:
        raw: The chunk.
        plans: What to try, for each block: each is asked for when the block before it is encoded.
        allowed: What may be made of a block; where another codec was found to be better than the one asked for, or that will
            not do, STORE.
    """
    out = scratch("out", CHUNK_BYTES)
    blocks: list[EncodedBlock] = []
    at = 0
    for (coding, reason, base), block in zip(plans, blocks_of(raw), strict=True):
        codec, length = encode_block(block, coding, base, out[at:])
        codec = codec if codec in allowed else Codec.STORE
        blocks.append(EncodedBlock(codec, reason, block if codec is Codec.STORE else out[at : at + length]))
        at += 0 if codec is Codec.STORE else length
    return blocks


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
