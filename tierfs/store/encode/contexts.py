"""What is known of a chunk beside its bytes, for whoever encodes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tierfs.format.manifest import Row

__all__ = ["NO_CONTEXT", "ChunkContext", "ChunkPart", "Fill", "ReadRow", "Tensor"]

Fill = Callable[[memoryview], bool]
"""Fills memory with a chunk's bytes, unverified; false if they are not there any more. It may be called again."""
ReadRow = Callable[[Row, int, memoryview], bool]
"""Copies bytes of a chunk, from an offset on, out of a tier of this host, unverified; false if none has it."""


class ChunkPart(NamedTuple):
    """A part of a chunk of the same file.

    Attributes:
        chunk: Its number in the file.
        offset: Of the part, in the chunk's bytes.
        length: Of the part.
    """

    chunk: int
    offset: int
    length: int


class Tensor(NamedTuple):
    """What is known of the elements that a block holds, or most of it.

    Attributes:
        name: What a choice for them is remembered under; empty for nothing.
        kind: ``"float"``, ``"integer"`` or ``"bytes"``.
        width: Of an element, in bytes.
    """

    name: str = ""
    kind: str = "bytes"
    width: int = 1


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """What is known of a chunk beside its bytes.

    Attributes:
        tensors: Of each block; fewer, or none, where that is not known.
        save: How many saves of its file there were before: tells how old a choice is.
        base: The chunk at its place in the keyframe, of the same length.
        sources: What it may be derived from, of twice its length in all.
        unread: Digests of chunks of the file that is replaced, to be read back: see `tierfs.store.chunks.store_chunk`. All chunks
            of a file share one set.
    """

    tensors: tuple[Tensor, ...] = ()
    save: int = 0
    base: Row | None = None
    sources: tuple[ChunkPart, ...] = ()
    unread: set[bytes] | None = field(default=None, compare=False)


NO_CONTEXT = ChunkContext()
"""Of a chunk of which nothing is known."""
