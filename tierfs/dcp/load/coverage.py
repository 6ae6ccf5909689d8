"""Check that the chunks of a tensor make up the whole tensor, each element once; find the boxes that no chunk covers.

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

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in elements."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands in ``storage_data`` for a chunk that was not saved, or whose content is ambiguous.

    Attributes:
        why: The problem of the tensor, in words.
    """

    why: str


WORK_MIN = 4096
WORK_PER_BOX = 64
"""The number of boxes that `gaps_of` examines for each box of a tensor before it stops.

The chunks of any real mesh need fewer, and a hostile document could demand the square.
"""


def mark_absent(metadata: Any) -> Any:
    """Describe elements that no chunk of a tensor has as further chunks, with `Absent` as their place.

    Plans for other parts of the tensor do not change. If chunks overlap, or there are too many gaps, one such chunk
    stands for the whole tensor.

    Args:
        metadata: torch's `Metadata`.

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
            places[MetadataIndex(fqn, offsets)] = Absent(problem)
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

    Args:
        boxes: Inside the tensor, without overlaps.
        shape: Of the tensor.

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

    Args:
        count: The number of steps in total.
        problem: The message of the error.
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
