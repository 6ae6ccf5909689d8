"""Map the chunks of a file to the tensors that they hold."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tierfs.codec import Span, spans
from tierfs.digest import BLOCK_BYTES
from tierfs.format.manifest import Row
from tierfs.store.read.reader import Reader


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


LOOK_BLOCKS_MAX = 1024
"""Most blocks fetched to find a file's layout: as many as a large model has tensors, in one to four requests each."""
HELD_BLOCKS = 3  # a parser looks 64 KiB ahead, which may cross the small chunk that a file begins with


class TensorPlace(NamedTuple):
    """A chunk's position in its file, independent of the file's layout.

    Attributes:
        name: The tensor that the chunk begins in.
        offset: Where the chunk begins in that tensor, in bytes.
        length: Bytes of the chunk.
    """

    name: str
    offset: int
    length: int


def layout_of(read: Callable[[int, memoryview], None], length: int) -> list[Span]:
    """Return the tensors of a file in order; one span of unknown bytes if `tierfs.codec.spans` finds no table."""
    return spans(read, length) or unknown_layout(0, length)


def stored_layout(file: Reader) -> list[Span] | None:
    """Return the layout of a file in the object tier; ``None`` if finding it takes more than `LOOK_BLOCKS_MAX` blocks.

    Raises:
        CorruptionError, StoreError, ReadOnlyError, FormatError: The file cannot be read.
    """
    try:
        return layout_of(_Blocks(file).read_into, file.length)
    except _TooManyBlocksError:
        return None


def unknown_layout(start: int, stop: int) -> list[Span]:
    """Return the layout of bytes without a known structure."""
    return [Span(start, stop, 1, "", "bytes")] if start < stop else []


def places(
    layout: Sequence[Span], lengths: Iterable[int], group: str, *, start: int = 0
) -> Iterator[tuple[TensorPlace, tuple[Tensor, ...]]]:
    """Yield the place of each chunk, and for each of its blocks the tensor that fills most of it.

    Bytes outside any named tensor give an empty `Tensor`, for which no choice is remembered.

    Args:
        layout: The file's spans, without gaps from the beginning of the first chunk to the end of the last one.
        lengths: The chunks' lengths in bytes.
        group: The name that all saves of the file share: see `tierfs.store.encode.parents.group_of`.
        start: The offset of the first chunk in the file.
    """
    starts = [span.start for span in layout]
    for length in lengths:
        stop = start + length
        inside = layout[bisect.bisect_right(starts, start) - 1 : bisect.bisect_left(starts, stop)]
        most, at = [], 0
        for begin in range(start, stop, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, stop)
            while inside[at].stop <= begin:
                at += 1
            block = itertools.takewhile(lambda span, end=end: span.start < end, inside[at:])  # type: ignore[misc]
            most.append(max(block, key=lambda span: min(end, span.stop) - max(begin, span.start)))
        tensors = tuple(
            Tensor(f"{group}:{span.name}:{span.kind}{span.width}", span.kind, span.width) if span.name else Tensor()
            for span in most
        )
        yield TensorPlace(inside[0].name, start - inside[0].start, length), tensors
        start = stop


class _TooManyBlocksError(Exception):
    pass


class _Blocks:
    """Reads a file in small pieces, front to back with a short look ahead, and fetches each block once.

    Raises `_TooManyBlocksError` instead of fetching more than `LOOK_BLOCKS_MAX` blocks.
    """

    def __init__(self, file: Reader) -> None:
        self._file = file
        self._held: list[tuple[int, memoryview]] = []  # offset in the file, and block
        self._left = LOOK_BLOCKS_MAX

    def read_into(self, start: int, out: memoryview) -> None:
        at, end = start, start + len(out)
        while at < end:
            begin, block = self._block(at)
            stop = min(end, begin + len(block))
            out[at - start : stop - start] = block[at - begin : stop - begin]
            at = stop

    def _block(self, at: int) -> tuple[int, memoryview]:
        for begin, block in self._held:
            if begin <= at < begin + len(block):
                return begin, block
        if not self._left:
            raise _TooManyBlocksError
        self._left -= 1
        starts = self._file.starts
        number = bisect.bisect_right(starts, at) - 1
        begin = at - (at - starts[number]) % BLOCK_BYTES
        block = memoryview(bytearray(min(BLOCK_BYTES, starts[number + 1] - begin)))
        self._file.read_into(begin, block)
        self._held = [*self._held[1 - HELD_BLOCKS :], (begin, block)]
        return begin, block
