"""Compute the bytes of a saved chunk that hold a box of it. Pure: no torch, no I/O.

A chunk is a row-major array. The store verifies blocks of 1 MiB. So a gap of at most `GAP_BYTES_MAX` between two runs
lies in blocks that one of the runs needs anyway, and reading across it reads no further block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES

GAP_BYTES_MAX = BLOCK_BYTES - 1
READ_BYTES_MAX = CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class BoxExtent:
    """A part of a box, and the bytes of the chunk from the part's first element to its last.

    Attributes:
        at: Bytes from the chunk's start to the part's first element.
        length: Bytes from there to the end of its last element.
        offsets: Where the part begins in the box, in elements.
        lengths: The number of elements of each dimension.
        strides: Bytes from an element to the next one in each dimension.
        is_dense: Whether the bytes hold the part's elements and nothing else.
    """

    at: int
    length: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    is_dense: bool


def extents_of(
    shape: Sequence[int],
    itemsize: int,
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    dense_bytes_max: int = READ_BYTES_MAX,
) -> Iterator[BoxExtent]:
    """Cut a box of a chunk into parts, in the order of their bytes. Each part is read in one piece.

    Gaps between the elements of a part are at most `GAP_BYTES_MAX`, and a part with gaps is at most `READ_BYTES_MAX`
    long.

    Args:
        shape: Of the chunk, in elements.
        itemsize: Bytes of an element.
        offsets: Where the box begins in the chunk.
        lengths: Of the box, which lies in the chunk.
        dense_bytes_max: The maximum length of a part without gaps.
    """
    strides = [itemsize] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    if 0 in lengths:
        return
    at = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    box = BoxExtent(at, 0, (0,) * len(shape), tuple(lengths), tuple(strides), is_dense=False)
    yield from _cut(box, itemsize, dense_bytes_max, first=0)


def _cut(box: BoxExtent, itemsize: int, dense_bytes_max: int, first: int) -> Iterator[BoxExtent]:
    """Cut a box whose dimensions before ``first`` have one element. The box's ``length`` is ignored."""
    while first < len(box.lengths) and box.lengths[first] == 1:
        first += 1
    # Bytes from the first to the last element of the dimensions below each dimension, innermost last.
    inner, gap = itemsize, 0
    below = inner
    for dimension in range(len(box.lengths) - 1, first - 1, -1):
        if box.lengths[dimension] > 1:
            gap = max(gap, box.strides[dimension] - inner)
            below = inner
            inner += (box.lengths[dimension] - 1) * box.strides[dimension]
    is_dense = inner == math.prod(box.lengths) * itemsize
    limit = dense_bytes_max if is_dense else READ_BYTES_MAX
    if first == len(box.lengths) or (inner <= limit and gap <= GAP_BYTES_MAX):
        yield BoxExtent(box.at, inner, box.offsets, box.lengths, box.strides, is_dense)
        return
    stride = box.strides[first]
    count = 1 if gap > GAP_BYTES_MAX else max(1, (limit - below) // stride + 1)
    for start in range(0, box.lengths[first], count):
        part = BoxExtent(
            box.at + start * stride,
            0,
            (*box.offsets[:first], box.offsets[first] + start, *box.offsets[first + 1 :]),
            (*box.lengths[:first], min(count, box.lengths[first] - start), *box.lengths[first + 1 :]),
            box.strides,
            is_dense=False,
        )
        # A part of several rows is within the limits, but the last one is shorter, so each part is measured again.
        yield from _cut(part, itemsize, dense_bytes_max, first)
