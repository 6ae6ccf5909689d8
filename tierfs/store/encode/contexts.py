"""Facts about a chunk besides its bytes, for the encoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tierfs.format.manifest import Row


class ChunkPart(NamedTuple):
    """A part of a chunk of the same file.

    Attributes:
        chunk: The chunk's index in the file.
        offset: Where the part begins in the chunk's bytes.
        length: Bytes of the part.
    """

    chunk: int
    offset: int
    length: int


class Tensor(NamedTuple):
    """The elements that a block holds, or that most of it holds.

    Attributes:
        name: The key under which the encoder remembers its choice; empty to remember nothing.
        kind: ``"float"``, ``"integer"`` or ``"bytes"``.
        width: Bytes of an element.
    """

    name: str = ""
    kind: str = "bytes"
    width: int = 1


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """Facts about a chunk besides its bytes.

    Attributes:
        tensors: The tensor of each block; shorter or empty where that is not known.
        save: How many saves of the file came before this one. Tells how old a remembered choice is.
        base: The chunk at the same place in the keyframe, of the same length.
        sources: The parts that the chunk may be derived from; twice its length in all.
        unread: Digests of the replaced file's chunks that have to be read back: see `tierfs.store.chunks.store_chunk`.
            All chunks of a file share one set.
    """

    tensors: tuple[Tensor, ...] = ()
    save: int = 0
    base: Row | None = None
    sources: tuple[ChunkPart, ...] = ()
    unread: set[bytes] | None = field(default=None, compare=False)


NO_CONTEXT = ChunkContext()
"""The context of a chunk about which nothing is known."""
