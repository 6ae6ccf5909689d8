"""How a state dict is staged: learned from one save, and compared in one pass by the saves that follow.

A training state has the same structure in each save, and tensors of the same names, dtypes, shapes and devices. So the
names, the layout of the shard file and the kernels' arguments are the same, too. Only the addresses of the tensors and
the values that are no tensors are read anew. `TierWriter` keeps the plan of its last save. A state that differs from it
in anything gets a new plan. A state that no plan can describe (see `StatePlan.of`) is staged value by value.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from tierfs.dcp.save.copy import Addresses
from tierfs.dcp.save.plan import plan_of
from tierfs.dcp.save.replicas import RemoteReplica, placeholder
from tierfs.dcp.tensorbytes import PLAIN_TYPES, holds_shards, lies_nowhere, problem_of
from tierfs.device.accelerator import accelerator_of, accelerators

_DICTS = (dict, OrderedDict)
_TENSOR, _OTHER = object(), object()
_Value = TypeVar("_Value")
_ADDRESS_MIN = 1 << 40
"""At lower addresses, a tensor is looked at closely: that of one without memory is its offset in the storage."""


class _Unplanned(Exception):  # noqa: N818 - not an error: the caller goes another way
    """No plan can describe a state."""


class _Nest:
    """A dict, OrderedDict or list of a state.

    Attributes:
        kind: Its class.
        keys: Of a dict, in order.
        attributes: Of an OrderedDict, such as the ``_metadata`` of a module's state.
        kinds: The class of each value.
        children: For each value a nest, or what it is.
        only: What all values are, if they are the same.
    """

    __slots__ = ("attributes", "children", "keys", "kind", "kinds", "only")

    def __init__(self, value: Any, path: str | None, names: list[str]) -> None:
        self.kind = type(value)
        is_list = self.kind is list
        self.keys = None if is_list else list(value)
        self.attributes = copy.deepcopy(vars(value)) if self.kind is OrderedDict else {}
        if not self.attributes.keys() <= {"_metadata"}:
            raise _Unplanned
        values = value if is_list else list(value.values())
        self.kinds = list(map(type, values))
        before = "" if path is None else f"{path}."
        self.children = [
            self._child(inner, f"{before}{key!s}", names)
            for key, inner in zip(range(len(values)) if is_list else self.keys or (), values, strict=True)
        ]
        kinds = set(map(id, self.children))
        self.only = self.children[0] if len(kinds) == 1 else None

    def _child(self, value: Any, path: str, names: list[str]) -> Any:
        kind = type(value)
        if kind in PLAIN_TYPES or kind is DTensor:
            names.append(path)
            return _TENSOR
        if kind in _DICTS or kind is list:
            return _Nest(value, path, names)
        if _holds_tensors(value):
            raise _Unplanned
        return _OTHER

    def collect(self, value: Any, found: StateValues) -> bool:
        """Add the values in it, in order, and return whether it has the structure of this one."""
        if type(value) is not self.kind:
            return False
        if self.keys is None:
            values = value
        else:
            if list(value) != self.keys or (self.kind is OrderedDict and vars(value) != self.attributes):
                return False
            values = list(value.values())
        if list(map(type, values)) != self.kinds:
            return False
        found.containers.append(id(value))
        if self.only is _TENSOR:
            found.tensors += values
        elif self.only is _OTHER:
            found.others += values
        else:
            for child, inner in zip(self.children, values, strict=True):
                if child is _TENSOR:
                    found.tensors.append(inner)
                elif child is _OTHER:
                    found.others.append(inner)
                elif not child.collect(inner, found):
                    return False
        return True

    def build(self, tensors: Iterator[Any], others: Iterator[Any]) -> Any:
        """Return a copy with other values."""
        if self.only is _TENSOR or self.only is _OTHER:
            values = list(itertools.islice(tensors if self.only is _TENSOR else others, len(self.kinds)))
        else:
            values = [
                next(tensors) if child is _TENSOR else next(others) if child is _OTHER else child.build(tensors, others)
                for child in self.children
            ]
        if self.keys is None:
            return values
        made = self.kind(zip(self.keys, values, strict=True))
        if self.attributes:
            vars(made).update(self.attributes)
        return made


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a container that a planner looks into, or a tuple, and has tensors, or is a rare tensor."""
    if isinstance(value, (torch.Tensor, ShardedTensor)):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_tensors, value))


class StateValues:
    """The values of a state, in order.

    Attributes:
        tensors: At first all; later each once.
        others: Values that are no tensors.
        containers: The ids of all dicts and lists.
        parts: The tensors that are staged; of a DTensor its local part.
        addresses: Of the parts: see `tierfs.dcp.save.copy.address_of`.
    """

    __slots__ = ("addresses", "containers", "others", "parts", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.others: list[Any] = []
        self.containers: list[int] = []
        self.parts: Sequence[torch.Tensor] = ()
        self.addresses: Addresses = np.empty(0, np.uint64)

    def join(self) -> list[int] | None:
        """Keep each tensor once. Return the number of each tensor of before; ``None`` if no tensor occurred twice."""
        ids = list(map(id, self.tensors))
        numbers = {each: number for number, each in enumerate(dict.fromkeys(ids))}
        if len(numbers) == len(ids):
            return None
        self.tensors = list({id(one): one for one in self.tensors}.values())
        return [numbers[each] for each in ids]


class StatePlan:
    """The structure of a state, and how its tensors are staged.

    Attributes:
        keys: The state's keys.
        names: Of its tensors, in order.
        local: This rank's plan of the last save, as `TierSavePlanner` made it.
        planned: On the coordinator, the plans of all ranks, and what was made of them: global plan and metadata.
        layout: Of the tensors that are staged.
    """

    def __init__(self, root: _Nest, names: Sequence[str], values: StateValues, taken: Mapping[str, Any]) -> None:
        self._root = root
        self.keys: Sequence[str] = root.keys or ()
        self.names = names
        self.local: SavePlan | None = None
        self.planned: tuple[Any, tuple[list[SavePlan], Metadata]] | None = None
        self._taken = taken
        self._numbers = values.join()
        named: dict[int, list[str]] = {}
        for name, number in zip(names, self._numbers or range(len(names)), strict=True):
            named.setdefault(number, []).append(name)
        self._specs = {at: one._spec for at, one in enumerate(values.tensors) if type(one) is DTensor}
        self._replicas: dict[int, RemoteReplica] = {
            at: replica
            for at, one in enumerate(values.tensors if taken else ())
            if (replica := placeholder(one, named[at], taken)) is not None
        }
        self._staged = [at for at in range(len(named)) if at not in self._replicas]
        local = self._local(values.tensors)
        if not all(map(_is_simple, local)):
            raise _Unplanned
        self._traits = _looked_at(local)[1]
        parts, traits = self._chosen(local), self._chosen(self._traits)
        self._is_full = np.array([part.numel() > 0 for part in parts], bool)
        self._is_complex = any(part.is_complex() for part in parts)
        self._is_whole = np.array([one[_CONTIGUOUS] and not one[_NEGATED] for one in traits], bool)
        self._owners = [accelerator_of(part) for part in parts] if accelerators else []
        self.layout = plan_of([(named[at][0], part) for at, part in zip(self._staged, parts, strict=True)])

    @classmethod
    def of(cls, state: Mapping[str, Any], taken: Mapping[str, Any]) -> StatePlan | None:
        """Make a plan.

        Args:
            state: Of dicts, OrderedDicts and lists, each of them once, whose tensors are plain or DTensors. Tuples and
                other mappings in it hold no tensors.
            taken: See `tierfs.dcp.save.replicas.Replicas.take`.

        Returns:
            ``None`` for any other state.
        """
        if type(state) not in _DICTS:
            return None
        names: list[str] = []
        values = StateValues()
        try:
            root = _Nest(state, None, names)
            return cls(root, names, values, taken) if root.collect(state, values) else None
        except _Unplanned:
            return None

    def values_of(self, state: Mapping[str, Any], taken: Mapping[str, Any]) -> StateValues | None:
        """Return the values of a state; ``None`` if it needs another plan. The arguments are as for `of`."""
        values = StateValues()
        if (taken is not self._taken and (taken or self._taken)) or not self._root.collect(state, values):
            return None
        if values.join() != self._numbers or len(set(values.containers)) != len(values.containers):
            return None
        tensors = values.tensors
        if any(tensors[at]._spec != spec for at, spec in self._specs.items()):
            return None
        local = self._local(tensors)
        if self._specs and not PLAIN_TYPES.issuperset(map(type, local)):
            return None
        values.parts = parts = self._chosen(local)
        try:
            pointers, traits = _looked_at(local)  # of replicas, too: another rank may have to save a changed one anew
        except (RuntimeError, NotImplementedError):  # a tensor without memory or strides
            return None
        if traits != self._traits or (accelerators and list(map(accelerator_of, parts)) != self._owners):
            return None
        addresses = np.array(self._chosen(pointers), np.uint64)
        for at in np.flatnonzero(self._is_full & (addresses < _ADDRESS_MIN)).tolist():
            if lies_nowhere(parts[at]):
                return None
        if not self._is_whole.all():
            addresses[~self._is_whole] = 0
        if self._is_complex:
            addresses[[part.is_conj() for part in parts]] = 0
        values.addresses = addresses
        return values

    def build(self, views: Iterable[torch.Tensor], others: Iterable[Any]) -> dict[str, Any]:
        """Return a state of this structure, with views of the staged tensors and copies of the other values."""
        tensors: list[Any] = list(views)
        if self._replicas:
            remaining = iter(tensors)
            count = len(self._staged) + len(self._replicas)
            tensors = [self._replicas.get(at) if at in self._replicas else next(remaining) for at in range(count)]
        for at, spec in self._specs.items():
            if at not in self._replicas:
                tensors[at] = DTensor(tensors[at], spec, requires_grad=False)
        if self._numbers is not None:
            tensors = [tensors[number] for number in self._numbers]
        return dict(self._root.build(iter(tensors), iter(others)))

    def _local(self, tensors: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Return the tensors, with its local part for each DTensor."""
        parts = list(tensors)
        with torch.no_grad():  # otherwise `to_local` records a function for autograd
            for at in self._specs:
                parts[at] = parts[at].to_local()
        return parts

    def _chosen(self, values: Sequence[_Value]) -> Sequence[_Value]:
        """Return those of the tensors that are staged."""
        return [values[at] for at in self._staged] if self._replicas else values


def _is_simple(tensor: Any) -> bool:
    """Whether a tensor consists of its bytes alone, in memory of its own."""
    is_plain = type(tensor) in PLAIN_TYPES and not problem_of(tensor) and (tensor.is_cpu or tensor.is_cuda)
    return is_plain and not holds_shards(tensor) and not (tensor.numel() and lies_nowhere(tensor))


def _looked_at(tensors: Iterable[Any]) -> tuple[Sequence[int], Sequence[tuple[Any, ...]]]:
    """Return each tensor's address, which may change from save to save, and what may not."""
    seen = [
        (
            one.data_ptr(),
            (
                one.dtype,
                one.shape,
                one.is_contiguous(),
                one.is_neg(),
                one.get_device(),
                hasattr(one, "global_shape"),  # see `holds_shards`
            ),
        )
        for one in tensors
    ]
    pointers, traits = zip(*seen, strict=True) if seen else ((), ())
    return pointers, traits


_CONTIGUOUS, _NEGATED = 2, 3  # of what may not change
