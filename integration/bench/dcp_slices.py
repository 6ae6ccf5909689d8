"""Load an eighth of a checkpoint, as one of eight ranks does after a change of layout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

PARTS = 8


class SlicePlanner(DefaultLoadPlanner):
    """Request one of eight parts of the rows of every tensor, and no objects.

    Of a tensor with fewer than eight rows it requests one row.

    Attributes:
        needed_bytes: Bytes that it requests.
        ranges: Number of pieces that it requests.
        out: The loaded tensors by name.
    """

    def __init__(self, part: int) -> None:
        super().__init__()
        self._part = part
        self.needed_bytes = 0
        self.ranges = 0
        self.out: dict[str, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        items = []
        for fqn, described in self.metadata.state_dict_metadata.items():
            if not isinstance(described, TensorStorageMetadata):
                continue
            offsets, lengths = box(described.size, self._part)
            self.out[fqn] = torch.zeros(lengths, dtype=described.properties.dtype)
            wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
            items += create_read_items_for_chunk_list(fqn, described, [wanted])
            self.needed_bytes += math.prod(lengths) * described.properties.dtype.itemsize
        self.ranges = len(items)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        target = self.out[read_item.dest_index.fqn]
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, offset, length)
        return target

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        pass

    def check(self, tensors: dict[str, torch.Tensor]) -> None:
        for fqn, loaded in self.out.items():
            offsets, lengths = box(tensors[fqn].shape, self._part)
            expected = tensors[fqn]
            for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
                expected = expected.narrow(dimension, offset, length)
            assert torch.equal(loaded.view(torch.int32), expected.contiguous().view(torch.int32)), fqn


def box(shape: Any, part: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and the shape of a tensor's part."""
    if not shape:
        return (), ()
    rows = max(shape[0] // PARTS, 1)
    first = min(part * rows, shape[0] - rows)
    return (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
