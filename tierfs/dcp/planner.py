"""A load planner that runs no code from a checkpoint, and a save planner that plans an unchanged state once.

torch's own load planner unpickles objects (values that are not tensors) with ``weights_only=False``. So anyone who can write
a checkpoint can run code wherever it is loaded.
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from tierfs._fork import PerProcess
from tierfs.dcp import objects
from tierfs.dcp.objects import ALLOWED, aliases, globals_in, runs_code
from tierfs.dcp.save.saves import plan_read
from tierfs.dcp.save.state_plan import StatePlan
from tierfs.errors import InvalidInputError

_REFUSED = re.compile(r"GLOBAL ([\w.]+)|`add_safe_globals`,? but got <class '([\w.]+)'>")
_LACKING = re.compile(r"Can only (append|extend|SETITEM)|Unsupported operand 139\b")
"""Matches torch's refusals to fill a container or to read a long integer. `objects` can do both."""
_TORCHS_OWN = frozenset({DefaultLoadPlanner, _EmptyStateDictLoadPlanner})
_allowing = PerProcess(threading.RLock)
"""Held while torch's list of safe globals, one for the whole process, contains the globals allowed for one value."""


_KEPT_ITEMS_MAX = 1 << 16
"""Items of all ranks. The coordinator keeps about 2 KB for each."""


class TierSavePlanner(DefaultSavePlanner):  # type: ignore[misc]  # torch's classes are untyped here
    """torch's `DefaultSavePlanner`, except that it plans a state once that `TierWriter` stages again and again.

    The arguments are as for `DefaultSavePlanner`. While all ranks stage tensors of the same names, dtypes, shapes and
    placements, and objects of the same names, the plans and the metadata are those of the last save. If anything
    differs, and for any other state, each save is planned anew.
    """

    _kept: StatePlan | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        plan = plan_read(state_dict)
        is_usual = type(self) is TierSavePlanner and self.flatten_state_dict and not self._enable_plan_caching
        # A mapping that no plan describes may hold tensors by now.
        tensors = [
            name
            for name, value in self.state_dict.items()
            if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__")
        ]
        self._kept = plan if plan is not None and is_usual and plan.names == tensors else None

    def create_local_plan(self) -> SavePlan:
        kept = self._kept
        if kept is None:
            return super().create_local_plan()
        if kept.local is None or list(kept.local.planner_data.items()) != list(self.mappings.items()):
            kept.local = super().create_local_plan()
        self.plan = kept.local
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        kept, given = self._kept, [*all_plans, self.dedup_save_to_lowest_rank]
        if kept is not None and kept.planned is not None and kept.planned[0] == given:
            plans, metadata = kept.planned[1]
        else:
            plans, metadata = super().create_global_plan(all_plans)
            if kept is not None and sum(len(plan.items) for plan in all_plans) <= _KEPT_ITEMS_MAX:
                kept.planned = given, (plans, metadata)
        self.global_plan = plans
        # The writer completes the metadata, and a program may change it.
        self.metadata = replace(metadata, state_dict_metadata=dict(metadata.state_dict_metadata))
        return list(plans), self.metadata


class TierLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]  # torch's classes are untyped here
    """torch's `DefaultLoadPlanner`, except that it loads objects with ``weights_only=True``.

    An object is any value that is not a tensor. ``flatten_state_dict``, ``flatten_sharded_tensors`` and
    ``allow_partial_load`` are as for `DefaultLoadPlanner`.

    Args:
        allow: Classes and functions that may be used to build an object, besides those that torch allows.

    Raises:
        InvalidInputError: ``allow`` contains `getattr`, with which a checkpoint could run anything.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        allow: Sequence[type | Callable[..., object]] = (),
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        if any(value is getattr for value in allow):
            raise InvalidInputError(
                "allow=[getattr] would let a checkpoint run any code: allow only the classes, including nested ones"
            )
        self._allow = [*ALLOWED, *allow]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one object and put it into the state.

        Raises:
            InvalidInputError: The object is damaged, or needs a class or function that is not allowed. Such code is not
                run.
        """
        _load_object(self, read_item, value, self._allow)


def object_loader(planner: Any) -> Callable[[ReadItem, io.BytesIO], None]:
    """Return the function that loads one object into a planner's state: the planner's own ``load_bytes``.

    torch's own planners run code from a checkpoint, and torch uses them if the caller chose no planner. So for them the
    function loads as `TierLoadPlanner` does. A class derived from them is the caller's choice, and keeps its own.
    """
    if type(planner) in _TORCHS_OWN:
        return lambda read_item, value: _load_object(planner, read_item, value, ALLOWED)
    load: Callable[[ReadItem, io.BytesIO], None] = planner.load_bytes
    return load


def _load_object(planner: Any, read_item: ReadItem, value: io.BytesIO, allow: Sequence[Any]) -> None:
    fqn = read_item.dest_index.fqn
    hint = (
        "if you trust its source, import {modules}, and load with planner=TierLoadPlanner(allow=[{name}]), or call "
        "torch.serialization.add_safe_globals([{name}]) first"
    )
    loaded = unpickle_safely(repr(fqn), value, allow=allow, hint=hint)
    if planner.flatten_state_dict:
        path = _keys_of(planner.original_state_dict, planner.mappings[fqn])
        if path is None:
            set_element(planner.original_state_dict, planner.mappings[fqn], loaded)
        else:
            functools.reduce(operator.getitem, path[:-1], planner.original_state_dict)[path[-1]] = loaded
    else:
        planner.state_dict[fqn] = loaded


def _keys_of(state: Any, path: Sequence[Any]) -> list[Any] | None:
    """Return the keys and indexes that lead to a value in a state; ``None`` if there is no value.

    A path of torch has the text of each key. `set_element` would add an object under the text ``"0"`` beside the key
    ``0``, and leave the value of that key unchanged.
    """
    keys = []
    for part in path:
        key = part
        if isinstance(state, Mapping) and part not in state:
            is_number = isinstance(part, str) and part.isdecimal() and int(part) in state
            key = int(part) if is_number else next((each for each in state if str(each) == part), part)
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
        keys.append(key)
    return keys


def unpickle_safely(
    where: str,
    source: io.BytesIO | str,
    *,
    allow: Sequence[Any] = ALLOWED,
    hint: str = "if you trust its source, load it with torch and save its parts as plain values",
    map_location: str | None = None,
    mmap: bool = False,
) -> Any:
    """Load the output of ``torch.save``, and run nothing that is not allowed.

    Args:
        where: Its name in errors.
        source: Its content, or the path of a local file.
        allow: Classes and functions that may be used to build it, besides those that torch allows.
        hint: Advice for the error if something is not allowed. ``{name}`` and ``{modules}`` stand for that.
        map_location: The device for tensors; by default the one that they were saved from.
        mmap: Whether tensors lie in a mapping of the file.

    Raises:
        InvalidInputError: The value is damaged, or needs a class or function that is not allowed. Such code is not run.
    """
    try:
        with _allowing():
            # The program added the entries that are already listed, and needs them afterwards.
            added = set(allow).difference(torch.serialization.get_safe_globals())
            with torch.serialization.safe_globals(list(added)):
                return _load_allowed(source, map_location, allow, mmap=mmap)
    except Exception as error:  # a pickle that another program made may raise anything
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise InvalidInputError(f"{where} cannot be loaded with weights_only=True: {error}") from error
        first = refused[1] or refused[2]
        names = _names_in(source, allow) or {first: first.rpartition(".")[0]}
        listed, modules = ", ".join(names), ", ".join(dict.fromkeys(names.values()))
        if any(map(runs_code, names)):
            instead = "load the other values without it" if "if you trust" in hint else hint
            raise InvalidInputError(
                f"{where} is built with {listed}, which can run any program, so it was not run: never allow that; {instead}"
            ) from error
        raise InvalidInputError(
            f"{where} is built with {listed}, which loading does not allow by default, so it was not run: "
            f"{hint.format(name=listed, modules=modules)}"
        ) from error


def _load_allowed(source: io.BytesIO | str, map_location: str | None, allow: Sequence[Any], *, mmap: bool) -> Any:
    try:
        return torch.load(source, map_location=map_location, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if _LACKING.search(str(error)) is None and _REFUSED.search(str(error)) is None:
            raise
        if isinstance(source, str):
            raise
        source.seek(0)
        try:
            other_names = aliases(source.getvalue(), allow)
        except ValueError:  # not an archive of torch.save: torch handles its old format
            raise error from None
    with torch.serialization.safe_globals(other_names):
        return torch.load(source, map_location=map_location, weights_only=False, mmap=mmap, pickle_module=objects)


def _names_in(source: io.BytesIO | str, allow: Sequence[Any]) -> dict[str, str]:
    """Return all globals that would have to be allowed, each with its module; none if the source cannot tell."""
    if isinstance(source, str):
        return {}
    given = {f"{value.__module__}.{value.__qualname__}" for value in allow if not isinstance(value, tuple)}
    try:
        return {name: module for name, module in globals_in(source.getvalue()).items() if name not in given}
    except ValueError:
        return {}
