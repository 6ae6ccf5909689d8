"""The geometry of saved chunks. Nothing here loads torch, except `mark_absent`.

`problem_of` checks that the chunks of a tensor make up the whole tensor, each element once. `extents_of` finds the bytes
of a chunk that hold a box of it. A chunk is a row-major array. The store verifies blocks of 1 MiB. So a gap of at most
`GAP_BYTES_MAX` between two runs lies in blocks that one of the runs needs anyway, and reading across it reads no further
block.

torch's planners request from a reader the overlaps of saved chunks with the caller's tensors. They never notice an
element that no chunk has: it would keep the caller's value. `mark_absent` describes such elements as further chunks, so
a plan that needs one requests it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES

GAP_BYTES_MAX = BLOCK_BYTES - 1
READ_BYTES_MAX = CHUNK_BYTES
Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in elements."""


WORK_MIN = 4096
WORK_PER_BOX = 64
"""The number of boxes that `gaps_of` examines for each box of a tensor before it stops.

The chunks of any real mesh need fewer, and a hostile document could demand the square.
"""


def mark_absent(metadata: Any) -> Any:
    """Describe elements that no chunk of a tensor has as further chunks, with the reason as their place.

    Plans for other parts of the tensor do not change. If chunks overlap, or there are too many gaps, one such chunk
    stands for the whole tensor.

    Returns:
        The same object if every tensor is whole, else a copy.
    """
    import torch  # noqa: PLC0415 - lists of checkpoints need `problem_of` without torch
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
        ChunkStorageMetadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

    items: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    problems: dict[tuple[Any, ...], str] = {}  # by shape and chunks, which tensors that are cut alike share
    for fqn, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            continue
        shape = tuple(item.size)
        alike = (shape, *map(id, item.chunks))
        problem = problems.get(alike)
        if problem is None:
            problem = problems[alike] = problem_of(boxes_in(item), shape)
        if not problem:
            continue
        boxes = boxes_in(item)
        chunks = [chunk for chunk, (_, sizes) in zip(item.chunks, boxes, strict=True) if 0 not in sizes]
        whole = sum(math.prod(chunk.sizes) for chunk in chunks)
        gaps = gaps_of(boxes, shape) if whole <= math.prod(shape) else None
        if gaps is None or whole + sum(math.prod(sizes) for _, sizes in gaps) != math.prod(shape):
            chunks, gaps = [], [((0,) * len(shape), shape)]
        for offsets, sizes in gaps:
            places[MetadataIndex(fqn, offsets)] = problem
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        items[fqn] = replace(item, chunks=chunks)
    if not items:
        return metadata
    marked = replace(
        metadata,
        state_dict_metadata={**metadata.state_dict_metadata, **items},
        storage_data={**metadata.storage_data, **places},
    )
    marked.version = getattr(metadata, "version", None)
    return marked


def boxes_in(item: Any) -> list[Region]:
    """Return the chunks of torch's `TensorStorageMetadata`."""
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]


def problem_of(boxes: Sequence[Region], shape: tuple[int, ...]) -> str:
    """Return why boxes do not make up a tensor, in words; empty if they do."""
    if len(boxes) == 1 and boxes[0][1] == shape and not any(boxes[0][0]):  # nearly all tensors
        return ""
    full = [box for box in boxes if 0 not in box[1]]
    if any(
        offset + size > whole
        for offsets, sizes in full
        for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    ):
        return f"a shard lies outside of the shape {list(shape)}"
    # Sweep along the dimension with the most distinct offsets, so that few boxes are compared with each other.
    along = max(range(len(shape)), key=lambda axis: len({offsets[axis] for offsets, _ in full}), default=None)
    open_: list[Region] = []
    for box in sorted(full, key=lambda box: 0 if along is None else box[0][along]):
        if along is not None:
            open_ = [other for other in open_ if other[0][along] + other[1][along] > box[0][along]]
        for other in open_:
            if _meet(box, other):
                return f"its shards at {list(other[0])} and {list(box[0])} overlap"
        open_.append(box)
    missing = math.prod(shape) - sum(math.prod(sizes) for _, sizes in full)
    return f"{missing} of its elements are in no shard" if missing else ""


def gaps_of(boxes: Sequence[Region], shape: tuple[int, ...]) -> list[Region] | None:
    """Return the parts of a tensor that no box covers, as boxes that do not overlap.

    The boxes lie inside the tensor and do not overlap.

    Returns:
        The gaps; ``None`` if finding them takes too much work.
    """
    full = [box for box in boxes if 0 not in box[1]]
    try:
        return list(_gaps(full, shape, 0, Bound(WORK_MIN + WORK_PER_BOX * len(full), "there are too many gaps")))
    except ValueError:
        return None


class Bound:
    """Limits how often an untrusted document makes a routine repeat itself.

    `take` counts the steps, and raises `ValueError` with the given text after so many.
    """

    def __init__(self, count: int, problem: str) -> None:
        self._left = count
        self._problem = problem

    def take(self, count: int) -> None:
        """Note steps. Raises `ValueError` if there are too many."""
        self._left -= count
        if self._left < 0:
            raise ValueError(self._problem)


def _gaps(boxes: Iterable[Region], shape: tuple[int, ...], axis: int, work: Bound) -> Iterator[Region]:
    """Yield the gaps in the dimensions from ``axis`` on."""
    waiting = sorted(boxes, key=lambda box: box[0][axis] if axis < len(shape) else 0, reverse=True)
    if not waiting:
        yield (0,) * (len(shape) - axis), shape[axis:]
        return
    if axis == len(shape):
        return
    cuts = {0, shape[axis], *(box[0][axis] for box in waiting), *(box[0][axis] + box[1][axis] for box in waiting)}
    there: list[Region] = []
    for start, stop in pairwise(sorted(cuts)):
        there = [box for box in there if box[0][axis] + box[1][axis] > start]
        while waiting and waiting[-1][0][axis] <= start:
            there.append(waiting.pop())
        work.take(1 + len(there))
        for offsets, sizes in _gaps(there, shape, axis + 1, work):
            yield (start, *offsets), (stop - start, *sizes)


def _meet(one: Region, other: Region) -> bool:
    return all(
        first < second + second_size and second < first + first_size
        for first, first_size, second, second_size in zip(*one, *other, strict=True)
    )


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
    length = math.prod(shape) * itemsize
    if tuple(lengths) == tuple(shape) and length <= dense_bytes_max:
        yield BoxExtent(0, length, (0,) * len(shape), tuple(lengths), tuple(strides), is_dense=True)
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
