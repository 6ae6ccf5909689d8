"""Copy a state dict so that training cannot change the copy: tensors into an unnamed shard file, the rest deeply."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.tensor import DTensor

from tierfs.dcp.save.fill import begin_tensors, copy_in
from tierfs.dcp.save.saves import Save, StagedState
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.save.state_plan import StatePlan
from tierfs.dcp.tensorbytes import (
    PLAIN_TYPES,
    has_no_copy,
    holds_shards,
    mark_shards,
    problem_of,
    refuse_unusual,
    refused,
    shards_of,
)
from tierfs.errors import InvalidInputError

_ATOMS = frozenset({int, float, str, bool, complex, bytes, type(None), torch.dtype, torch.device, torch.Size})
"""Classes of values that never change."""
_logger = logging.getLogger("tierfs.dcp")


def stage(
    state_dict: Mapping[str, Any], file: ShardFile, save: Save | None = None, known: StatePlan | None = None
) -> tuple[StagedState, StatePlan | None]:
    """Copy a state dict into a shard file.

    Every strided tensor in its dicts, lists and tuples becomes a view of the file; so does the local part of a DTensor
    or ShardedTensor. A tensor that occurs twice is copied once. All other values are copied deeply before this returns.
    Objects with their own ``__deepcopy__`` are copied by pickling: the deep copy of a data frame, for example, shares
    its elements with the original.

    Args:
        state_dict: Borrowed for the call. Its tensors may lie on any device.
        file: Receives the bytes.
        save: The save that the state is staged for. A tensor that still matches an item in its ``taken`` is not copied.
        known: The plan of an earlier save.

    Returns:
        The same structure, and its plan. The structure keeps the file's memory until that is saved, which is possible
        once.

    Raises:
        CapacityError: The tensors do not fit.
        InvalidInputError: An object cannot be copied. The message says where it is.
    """
    delegated = save.taken if save is not None else {}
    values = known.values_of(state_dict, delegated) if known is not None else None
    if values is None:
        known = StatePlan.of(state_dict, delegated)
        values = known.values_of(state_dict, delegated) if known is not None else None
    if known is not None and values is not None and (others := _copies_of(values.others)) is not None:
        later = begin_tensors(file, known.layout, values.parts, values.addresses, at_once=False)
        state = StagedState(partial(known.build, others=others), known.keys, save, later, known)
        later.begin()  # last: Python on two threads is slower than on one
        return state, known
    return _staged_by_value(state_dict, file, save), None


def _copies_of(values: Sequence[Any]) -> Sequence[Any] | None:
    """Return copies of values that are no tensors; ``None`` if one of them cannot be copied."""
    odd = [value for value in values if type(value) not in _ATOMS]
    if not odd:
        return values
    try:
        objects: dict[int, Any] = {}
        _collect(None, odd, {}, objects)
        memo = _copied_by_pickle(objects)
        copies = iter(copy.deepcopy(odd, memo))
    except Exception:  # noqa: BLE001 - copying may raise anything; staging by value tells which one it is
        return None
    return [value if type(value) in _ATOMS else next(copies) for value in values]


def _staged_by_value(state_dict: Mapping[str, Any], file: ShardFile, save: Save | None) -> StagedState:
    """Stage a state that no plan describes: see `stage`. It copies the tensors that other ranks save, too."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    objects: dict[int, Any] = {}
    _collect(None, state_dict, named, objects)
    memo = _copied_by_pickle(objects)
    parts: list[tuple[str, torch.Tensor]] = []
    staged: list[tuple[int, torch.Tensor]] = []
    for number, (name, tensor) in named.items():
        locals_ = _local_parts(tensor)
        if not any(map(problem_of, locals_)):
            parts += [(name, part.detach().as_subclass(torch.Tensor)) for part in locals_]
            staged.append((number, tensor))
        else:
            memo[number] = _unusual(name, tensor, locals_, memo)
    later = copy_in(file, parts, at_once=False)
    later.begin()
    views = iter(later.result())
    memo.update((number, _rebuilt(tensor, views)) for number, tensor in staged)
    content = {key: _copied(key, value, memo) for key, value in state_dict.items()}
    return StagedState(lambda _: content, content, save, later)


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
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise InvalidInputError(f"{key!r} contains an object that cannot be copied: {error}") from error


def _collect(path: str | None, value: Any, found: dict[int, tuple[str, torch.Tensor]], objects: dict[int, Any]) -> None:
    """Find the tensors, each once with a name as DCP's planners build it, and the objects to be pickled."""
    if isinstance(value, (torch.Tensor, ShardedTensor)):
        found.setdefault(id(value), (path or "", value))
        return
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        is_array_of_numbers = isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject
        if hasattr(type(value), "__deepcopy__") and not is_array_of_numbers:
            objects[id(value)] = value
        return
    before = "" if path is None else f"{path}."
    for key, inner in pairs:
        _collect(f"{before}{key!s}", inner, found, objects)


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
