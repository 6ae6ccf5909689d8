"""Copy a state dict so that training cannot change the copy: tensors into an unnamed shard file, the rest deeply."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.tensor import DTensor

from tierfs.dcp.save.gpu_tensors import Awaited, Later, LaterState, begin_tensors
from tierfs.dcp.save.replicas import placeholder
from tierfs.dcp.save.saves import Save, StagedState
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.tensorbytes import (
    PLAIN_TYPES,
    has_no_copy,
    holds_shards,
    is_quantized,
    lies_nowhere,
    mark_shards,
    may_be_on_gpu,
    problem_of,
    refuse_unusual,
    refused,
    shards_of,
)
from tierfs.errors import InvalidInputError

_logger = logging.getLogger("tierfs.dcp")


def stage(state_dict: Mapping[str, Any], file: ShardFile, save: Save | None = None) -> StagedState:
    """Copy a state dict into a shard file.

    Every strided tensor in its dicts, lists and tuples becomes a view of the file; so does the local part of a DTensor
    or ShardedTensor. A tensor that occurs twice is copied once. All other values are copied deeply before this returns.
    Objects with their own ``__deepcopy__`` are copied by pickling: the deep copy of a data frame, for example, shares
    its elements with the original.

    Args:
        state_dict: Borrowed for the call. Its tensors may lie on any device.
        file: Receives the bytes.
        save: The save that the state is staged for. A tensor that still matches an item in its ``taken`` is not copied.

    Returns:
        The same structure. It keeps the file's memory until that is saved, which is possible once.

    Raises:
        CapacityError: The tensors do not fit.
        InvalidInputError: An object cannot be copied. The message says where it is.
    """
    named: dict[int, tuple[list[str], torch.Tensor]] = {}
    objects: dict[int, Any] = {}
    _collect(None, state_dict, named, objects)
    memo = _copied_by_pickle(objects)
    delegated = save.taken if save is not None else {}
    replicas: dict[int, Any] = {}
    parts: list[tuple[str, torch.Tensor]] = []
    staged: list[tuple[int, torch.Tensor]] = []
    for number, (names, tensor) in named.items():
        if delegated and (replica := placeholder(tensor, names, delegated)) is not None:
            replicas[number] = replica
        elif _is_simple(tensor):
            parts.append((names[0], tensor))
            staged.append((number, tensor))
        else:
            locals_ = _local_parts(tensor)
            if not any(map(problem_of, locals_)):
                parts += [(names[0], part.detach().as_subclass(torch.Tensor)) for part in locals_]
                staged.append((number, tensor))
            else:
                memo[number] = _unusual(names[0], tensor, locals_, memo)
    if not (file.gpu.is_asked or file.store.device_bytes or may_be_on_gpu(tensor for _, tensor in parts)):
        views = file.add_from_host(parts)
        _put_views(memo, staged, views)
        return StagedState(_copy_all(state_dict, replicas, memo), save, file, views)
    later = begin_tensors(file, parts, at_once=False)
    try:
        if not later.ready.is_set() and not _is_plain_nest(state_dict):
            later.begin()
            later.result()
        if later.ready.is_set():
            _put_views(memo, staged, later.result())
        else:
            memo.update(_awaited(staged, later))
        copied = LaterState(_copy_all(state_dict, replicas, memo), save, file, later)
    except BaseException:
        later.discard()
        raise
    later.begin()
    return copied


def _copied_by_pickle(objects: Mapping[int, Any]) -> dict[int, Any]:
    """Return copies by number, from one pickle, so that they share what the originals share; none if that fails.

    A value that cannot be pickled cannot be saved, unless a planner replaces it.
    """
    try:
        copies = pickle.loads(pickle.dumps(list(objects.values()))) if objects else []  # noqa: S301 - pickled by this process
    except Exception as error:  # noqa: BLE001 - pickling may raise anything
        kinds = ", ".join(sorted({type(value).__name__ for value in objects.values()}))
        _logger.warning(
            "objects (%s) are copied with copy.deepcopy, because one of them cannot be pickled: %s", kinds, str(error)
        )
        return {}
    return dict(zip(objects, copies, strict=True))


def _put_views(memo: dict[int, Any], staged: Iterable[tuple[int, torch.Tensor]], views: Iterable[torch.Tensor]) -> None:
    """Note the copy of each staged tensor, made of its views, by the tensor's number."""
    remaining = iter(views)
    for number, tensor in staged:
        memo[number] = _rebuilt(tensor, remaining)


def _copy_all(state_dict: Mapping[str, Any], replicas: Mapping[int, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Copy a state dict whose tensors have copies already. ``replicas`` stand for those that another rank saves."""
    if replicas:
        # An object is saved with everything that it refers to. So its tensors are copied here, even if another rank
        # saves them by name.
        for key, value in state_dict.items():
            for inner in _objects(value):
                _copied(key, inner, memo)
        memo.update({number: replica for number, replica in replicas.items() if number not in memo})
    return {key: _copied(key, value, memo) for key, value in state_dict.items()}


def _awaited(staged: Sequence[tuple[int, torch.Tensor]], later: Later) -> dict[int, Awaited]:
    """Return stand-ins, by number, for tensors whose views follow."""
    found = {}
    at = 0
    for number, tensor in staged:
        if type(tensor) in PLAIN_TYPES and not holds_shards(tensor):
            found[number] = Awaited(lambda at=at: later.views[at])  # type: ignore[misc]
            at += 1
        else:
            count = len(_local_parts(tensor))
            begin, at = at, at + count
            found[number] = Awaited(
                lambda tensor=tensor, begin=begin, end=at: _rebuilt(tensor, iter(later.result()[begin:end]))  # type: ignore[misc]
            )
    return found


def _is_plain_nest(value: Any) -> bool:
    """Whether tensors can be put into a copy of it later: it consists of dicts, lists and tuples."""
    if isinstance(value, dict):
        return all(map(_is_plain_nest, value.values()))
    if isinstance(value, (list, tuple)):
        return (type(value) in {list, tuple}) and all(map(_is_plain_nest, value))
    return not isinstance(value, Mapping)


def _unusual(name: str, tensor: torch.Tensor, parts: Iterable[torch.Tensor], memo: dict[int, Any]) -> Any:
    """Copy a tensor that cannot be stored as it is: a planner may replace it. If no copy exists, return a `Refused`.

    The save refuses both, rather than this function, so that every rank gets the error.
    """
    if not any(map(has_no_copy, parts)):
        with contextlib.suppress(Exception):  # a copy of such a tensor may raise anything
            return copy.deepcopy(tensor, memo)
    try:
        for part in parts:
            refuse_unusual(part, name)
    except InvalidInputError as error:
        return refused(str(error))
    raise AssertionError("one of its parts is unusual")


def _copied(key: str, value: Any, memo: dict[int, Any]) -> Any:
    try:
        return _deep_copy(value, memo)
    except Exception as error:
        raise InvalidInputError(f"{key!r} contains an object that cannot be copied: {error}") from error


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return the result of `copy.deepcopy`; faster for a dict with string keys whose values were copied already."""
    if type(value) is not dict or id(value) in memo:
        return copy.deepcopy(value, memo)
    copied = memo[id(value)] = {}
    memo.setdefault(id(memo), []).append(value)  # as `copy.deepcopy` does: no other object reuses its id meanwhile
    for name, inner in value.items():
        own = name if type(name) is str else copy.deepcopy(name, memo)
        known = memo.get(id(inner))
        copied[own] = _deep_copy(inner, memo) if known is None else known
    return copied


def _copies_itself(value: Any) -> bool:
    """Whether its class defines the deep copy of a value. An array of numbers counts as plain."""
    is_array_of_numbers = isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject
    return hasattr(type(value), "__deepcopy__") and not is_array_of_numbers


def _collect(
    path: str | None, value: Any, found: dict[int, tuple[list[str], torch.Tensor]], objects: dict[int, Any]
) -> None:
    """Find the tensors, each once, and the objects to be pickled.

    A tensor's names are as DCP's planners build them; a name may be empty.
    """
    if isinstance(value, (torch.Tensor, ShardedTensor)):
        known = found.get(id(value))
        if known is None:
            found[id(value)] = [path or ""], value
        else:
            known[0].append(path or "")
        return
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        if _copies_itself(value):
            objects[id(value)] = value
        return
    before = "" if path is None else f"{path}."
    for key, inner in pairs:
        if type(inner) in PLAIN_TYPES and id(inner) not in found:  # nearly all values
            found[id(inner)] = [f"{before}{key!s}"], inner
        else:
            _collect(f"{before}{key!s}", inner, found, objects)


def _objects(value: Any) -> Iterator[Any]:
    """Yield the values that DCP's planners save as objects, tuples among them."""
    if isinstance(value, (Mapping, list)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _objects(inner)
    elif not isinstance(value, (torch.Tensor, ShardedTensor)):
        yield value


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether a quick check shows that a tensor consists of its bytes alone. It does so for nearly all tensors."""
    return (
        type(tensor) in PLAIN_TYPES
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not is_quantized(tensor)
        and not tensor.is_nested
        and bool(tensor.data_ptr() or not tensor.numel())
        and not (tensor.storage_offset() and lies_nowhere(tensor))
    )


def _local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(tensor, DTensor):
        return [tensor.detach().to_local()]
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


def _rebuilt(tensor: torch.Tensor, views: Iterator[torch.Tensor]) -> torch.Tensor:
    if type(tensor) in PLAIN_TYPES:  # nearly all tensors
        return next(views) if not holds_shards(tensor) else mark_shards(next(views), shards_of(tensor))
    if isinstance(tensor, DTensor):
        return DTensor(next(views), tensor._spec, requires_grad=False)
    if isinstance(tensor, ShardedTensor):
        shards = [Shard(next(views), shard.metadata) for shard in tensor.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, tensor.metadata(), process_group=tensor._process_group
        )
    return mark_shards(next(views), shards_of(tensor))
