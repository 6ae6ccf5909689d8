"""Copy a state dict so that training cannot change the copy: tensors into an unnamed shard file, the rest deeply."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tierfs.dcp.save.fill import begin_tensors
from tierfs.dcp.save.saves import Save, StagedState
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.save.state_plan import StatePlan, collect_tensors, local_parts
from tierfs.dcp.tensorbytes import (
    has_no_copy,
    refuse_unusual,
    refused,
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
    if known is None or values is None:
        known, values = StatePlan.of(state_dict, delegated)
    others = None if known.has_inner else _copies_of(known.others, values.others, {})
    later = begin_tensors(file, known.layout, values.parts, values.addresses, at_once=False)
    if others is None:  # what has tensors in it needs them to be copied
        later.begin()
        tensors = known.tensors(later.result(), values.tensors)
        others = _copies_of(known.others, values.others, dict(zip(map(id, values.tensors), tensors, strict=True)))
    originals = () if known.is_plain else values.tensors  # otherwise they would be kept until the state is read
    lasting = known if known.is_lasting else None
    make = partial(_built, known, originals, others)
    state = StagedState(make, known.keys, save, later, lasting)
    later.begin()  # last: Python on two threads is slower than on one
    return state, lasting


def _built(
    plan: StatePlan, originals: Sequence[Any], others: Sequence[Any], views: Sequence[torch.Tensor]
) -> dict[str, Any]:
    return plan.build(plan.tensors(views, originals), others)


def _copies_of(names: Sequence[str], values: Sequence[Any], memo: dict[int, Any]) -> Sequence[Any]:
    """Return copies of values that are not staged. ``memo`` has the copies of tensors in them, by the original's id.

    Raises:
        InvalidInputError: A value cannot be copied.
    """
    odd = [at for at, value in enumerate(values) if type(value) not in _ATOMS]
    copies, named, objects = list(values), dict[int, tuple[str, Any]](), dict[int, Any]()
    for at in odd:
        collect_tensors(names[at], values[at], named, objects)
    memo |= _copied_by_pickle(objects)
    for number, (name, tensor) in named.items():
        if number not in memo:
            memo[number] = _unusual(name, tensor, memo)
    name = ""
    try:
        for at in odd:
            name = names[at]
            copies[at] = copy.deepcopy(values[at], memo)
    except Exception as error:
        raise InvalidInputError(f"{name!r} contains an object that cannot be copied: {error}") from error
    return copies


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


def _unusual(name: str, tensor: Any, memo: dict[int, Any]) -> Any:
    """Copy a tensor that cannot be stored as it is: a planner may replace it. If no copy exists, return a `Refused`.

    The save refuses both, rather than this function, so that every rank gets the error.
    """
    parts = local_parts(tensor)
    if not any(map(has_no_copy, parts)):
        with contextlib.suppress(Exception):  # a copy of such a tensor may raise anything
            return copy.deepcopy(tensor, memo)
    try:
        for part in parts:
            refuse_unusual(part, name)
    except InvalidInputError as error:
        return refused(str(error))
    raise AssertionError("one of its parts is unusual")
