"""Where the chunks of a file lie in its tensors."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tierfs.codec import Span, spans
from tierfs.digest import BLOCK_BYTES
from tierfs.flush.publisher import Tensor

__all__ = ["Place", "layout_of", "places", "unknown_layout"]


class Place(NamedTuple):
    """Where a chunk lies in its file, however the file is laid out."""

    name: str
    offset: int
    length: int


def layout_of(read: Callable[[int, memoryview], None], length: int) -> list[Span]:
    """How a file is laid out, if it can be read."""
    return spans(read, length) or unknown_layout(0, length)


def unknown_layout(start: int, stop: int) -> list[Span]:
    """Of bytes of which nothing is known."""
    return [Span(start, stop, 1, "", "bytes")] if start < stop else []


def places(
    layout: Sequence[Span], lengths: Iterable[int], group: str, *, start: int = 0
) -> Iterator[tuple[Place, tuple[Tensor, ...]]]:
    """Of each chunk its place, and of each of its blocks what most of it is. Only of tensors something is kept, by their names.

    Args:
        layout: Of the file, without gaps from where the first chunk begins to where the last one ends.
        lengths: Of the chunks.
        group: What the saves of the file have in common: see `tierfs.store.series.group_of`.
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
        yield Place(inside[0].name, start - inside[0].start, length), tensors
        start = stop
