"""Where the chunks of a file lie in its tensors."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tierfs.codec import Span, spans
from tierfs.digest import BLOCK_BYTES
from tierfs.store.encode.contexts import Tensor
from tierfs.store.read.reader import Reader

__all__ = ["LOOK_BLOCKS_MAX", "TensorPlace", "layout_of", "places", "stored_layout", "unknown_layout"]

LOOK_BLOCKS_MAX = 1024
"""How many blocks are fetched to see how a file is laid out: as many as a large model has tensors, in one to four requests each."""
HELD_BLOCKS = 3  # a table is looked ahead into by 64 KiB, across the small chunk that a file begins with


class TensorPlace(NamedTuple):
    """Where a chunk lies in its file, however the file is laid out."""

    name: str
    offset: int
    length: int


def layout_of(read: Callable[[int, memoryview], None], length: int) -> list[Span]:
    """How a file is laid out, if it can be read."""
    return spans(read, length) or unknown_layout(0, length)


def stored_layout(file: Reader) -> list[Span] | None:
    """The same of a file in the object tier: ``None`` if more than `LOOK_BLOCKS_MAX` of its blocks are in the way.

    Raises:
        CorruptionError, StoreError, ReadOnlyError, FormatError: It cannot be read.
    """
    try:
        return layout_of(_Blocks(file).read_into, file.length)
    except _TooManyBlocksError:
        return None


def unknown_layout(start: int, stop: int) -> list[Span]:
    """Of bytes of which nothing is known."""
    return [Span(start, stop, 1, "", "bytes")] if start < stop else []


def places(
    layout: Sequence[Span], lengths: Iterable[int], group: str, *, start: int = 0
) -> Iterator[tuple[TensorPlace, tuple[Tensor, ...]]]:
    """Of each chunk its place, and of each of its blocks what most of it is. Only of tensors something is kept, by their names.

    Args:
        layout: Of the file, without gaps from where the first chunk begins to where the last one ends.
        lengths: Of the chunks.
        group: What the saves of the file have in common: see `tierfs.store.encode.series.group_of`.
        start: Where the first one begins.
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
    """Reads a file in small pieces, front to back with a short look ahead, and fetches each block once for all of those in it."""

    def __init__(self, file: Reader) -> None:
        self._file = file
        self._held: list[tuple[int, memoryview]] = []  # blocks, and where in the file they begin
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
