"""A copy of a state dict that training cannot touch: its tensors lie in a shard file without a name, the rest is copied."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.tensor import DTensor

from tierfs.dcp.shardfile import ShardFile

__all__ = ["stage"]


def stage(state_dict: Mapping[str, Any], file: ShardFile) -> dict[str, Any]:
    """Copy a state dict into a shard file.

    Every strided tensor in its dicts, lists and tuples becomes a view of the file, DTensors and ShardedTensors with their
    local part; a tensor that is there twice is copied once. All else is copied deeply, there and then.

    Args:
        state_dict: Borrowed for the call; its tensors may lie on any device.
        file: Takes the bytes.

    Returns:
        The same structure. It keeps the file's memory.

    Raises:
        CapacityError: The tensors do not fit.
        TypeError: An object cannot be copied.
    """
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in _tensors("", state_dict):
        named.setdefault(id(tensor), (name, tensor))
    locals_ = [(name, local) for name, tensor in named.values() for local in _local_parts(tensor)]
    views = iter([view for _, view in file.add_tensors(locals_)])
    memo: dict[int, Any] = {}
    for number, (_, tensor) in named.items():
        memo[number] = _rebuilt(tensor, views)
    return {key: copy.deepcopy(value, memo) for key, value in state_dict.items()}


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that can be staged, with their names as DCP's planners build them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors(f"{path}.{number}" if path else str(number), inner)
    elif isinstance(value, (torch.Tensor, ShardedTensor)) and _can_stage(value):
        yield path, value


def _can_stage(tensor: torch.Tensor) -> bool:
    """Whether its bytes are all there is to it."""
    if isinstance(tensor, (DTensor, ShardedTensor)):
        return all(map(_can_stage, _local_parts(tensor)))
    plain = type(tensor) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
    return plain and tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(tensor, DTensor):
        return [tensor.detach().to_local()]
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


def _rebuilt(tensor: torch.Tensor, views: Iterator[torch.Tensor]) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return DTensor(next(views), tensor._spec, requires_grad=False)
    if isinstance(tensor, ShardedTensor):
        shards = [Shard(next(views), shard.metadata) for shard in tensor.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, tensor.metadata(), process_group=tensor._process_group
        )
    return next(views)
