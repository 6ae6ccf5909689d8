"""How a state dict is staged: learned from one save, and compared in one pass by the saves that follow.

A training state has the same structure in each save, and tensors of the same names, dtypes, shapes and devices. So the
names, the layout of the shard file and the kernels' arguments are the same, too. Only the addresses of the tensors and
the values that are no tensors are read anew. `TierWriter` keeps the plan of its last save, if it is `is_lasting`. A
state that differs from it in anything gets a new plan.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from tierfs.dcp.save.copy import Addresses, address_of
from tierfs.dcp.save.plan import plan_of
from tierfs.dcp.save.replicas import RemoteReplica, placeholder
from tierfs.dcp.tensorbytes import PLAIN_TYPES, holds_shards, lies_nowhere, mark_shards, problem_of, shards_of
from tierfs.device.accelerator import accelerator_of, accelerators

_DICTS = (dict, OrderedDict)
_TENSORS = (torch.Tensor, ShardedTensor)
_TENSOR, _OTHER = object(), object()
_Value = TypeVar("_Value")
_ADDRESS_MIN = 1 << 40
"""At lower addresses, a tensor is looked at closely: that of one without memory is its offset in the storage."""


class _Nest:
    """A dict, OrderedDict or list of a state, which occurs once in it.

    Attributes:
        kind: Its class.
        keys: Of a dict, in order.
        attributes: Of an OrderedDict, such as the ``_metadata`` of a module's state.
        kinds: The class of each value.
        children: For each value a nest, or what it is.
        only: What all values are, if they are the same.
    """

    __slots__ = ("attributes", "children", "keys", "kind", "kinds", "only")

    def __init__(self, value: Any, path: str | None, found: StateValues) -> None:
        """Look into a container, and add the values in it, in order, with their names."""
        found.containers.append(id(value))
        self.kind = type(value)
        is_list = self.kind is list
        self.keys = None if is_list else list(value)
        self.attributes = copy.deepcopy(vars(value)) if self.kind is OrderedDict else {}
        values = value if is_list else list(value.values())
        self.kinds = list(map(type, values))
        before = "" if path is None else f"{path}."
        self.children = [
            self._child(inner, f"{before}{key!s}", found)
            for key, inner in zip(range(len(values)) if is_list else self.keys or (), values, strict=True)
        ]
        kinds = set(map(id, self.children))
        self.only = self.children[0] if len(kinds) == 1 else None

    @staticmethod
    def _child(value: Any, path: str, found: StateValues) -> Any:
        kind = type(value)
        if isinstance(value, _TENSORS) and not any(map(problem_of, local_parts(value))):
            found.tensors.append(value)
            found.names.append(path)
            return _TENSOR
        has_odd_attributes = kind is OrderedDict and not vars(value).keys() <= {"_metadata"}
        if (kind in _DICTS or kind is list) and id(value) not in found.whole and not has_odd_attributes:
            return _Nest(value, path, found)
        found.others.append(value)
        found.other_names.append(path)
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


class StateValues:
    """The values of a state, in order.

    Attributes:
        tensors: At first all; later each once.
        others: Values that are no tensors, and unusual tensors.
        names, other_names: Of these, if a plan is made.
        containers: The ids of all dicts and lists that are nests.
        whole: The ids of those that are values, because they occur more than once.
        parts: The tensors that are staged; of a DTensor its local part.
        addresses: Of the parts: see `tierfs.dcp.save.copy.address_of`.
    """

    def __init__(self, whole: Collection[int] = ()) -> None:
        self.tensors: list[Any] = []
        self.others: list[Any] = []
        self.names: list[str] = []
        self.other_names: list[str] = []
        self.containers: list[int] = []
        self.whole = whole
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
        others: The names of its other values.
        is_lasting: Whether it may serve later saves. Otherwise it serves the state that it was made for, once.
        is_plain: Whether the tensors of the state are the staged ones.
        has_inner: Whether a value that is copied as one, such as a tuple, has tensors. They are the last of the tensors.
        local: This rank's plan of the last save, as `TierSavePlanner` made it.
        planned: On the coordinator, the plans of all ranks, and what was made of them: global plan and metadata.
        layout: Of the tensors that are staged.
    """

    def __init__(self, root: _Nest, values: StateValues, taken: Mapping[str, Any], *, has_inner: bool) -> None:
        self._root = root
        self.keys: Sequence[str] = root.keys or ()
        self.names, self.others = values.names, values.other_names
        self.local: SavePlan | None = None
        self.planned: tuple[Any, tuple[list[SavePlan], Metadata]] | None = None
        self._taken = taken
        self._numbers = values.join()
        named: dict[int, list[str]] = {}
        for name, number in zip(self.names, self._numbers or range(len(self.names)), strict=True):
            named.setdefault(number, []).append(name)
        self.has_inner = has_inner
        self._specs = {at: one._spec for at, one in enumerate(values.tensors) if type(one) is DTensor}
        self.is_lasting = not has_inner and all(map(_is_simple, values.tensors))
        self._replicas: dict[int, RemoteReplica] = {
            at: replica
            for at, one in enumerate(values.tensors if taken and self.is_lasting else ())
            if (replica := placeholder(one, named[at], taken)) is not None
        }
        self.is_plain = self.is_lasting and not self._replicas and not self._specs
        self._staged = [at for at in range(len(named)) if at not in self._replicas]
        pairs = [(named[at][0], part) for at in self._staged for part in local_parts(values.tensors[at])]
        self.layout = plan_of(pairs)
        values.parts = parts = [part for _, part in pairs]
        values.addresses = np.fromiter(map(address_of, parts), np.uint64, len(parts))
        if self.is_lasting:
            self._traits = _looked_at(self._local(values.tensors))[1]
            traits = self._chosen(self._traits)
            self._is_full = np.array([part.numel() > 0 for part in parts], bool)
            self._is_complex = any(part.is_complex() for part in parts)
            self._is_whole = np.array([one[_CONTIGUOUS] and not one[_NEGATED] for one in traits], bool)
            self._owners = [accelerator_of(part) for part in parts] if accelerators else []

    @classmethod
    def of(cls, state: Mapping[str, Any], taken: Mapping[str, Any]) -> tuple[StatePlan, StateValues]:
        """Make a plan of a state, and return its values, too.

        Args:
            state: Its dicts, OrderedDicts and lists are looked into. Those that occur more than once, and values of any
                other class, are copied as one, with the tensors in them.
            taken: See `tierfs.dcp.save.replicas.Replicas.take`.
        """
        state = state if type(state) in _DICTS else dict(state)
        root = _Nest(state, None, values := StateValues())
        if whole := {each for each, count in Counter(values.containers).items() if count > 1}:
            root = _Nest(state, None, values := StateValues(whole))
        found: dict[int, tuple[str, Any]] = {}
        for name, value in zip(values.other_names, values.others, strict=True):
            collect_tensors(name, value, found, {})
        inner = [(name, one) for name, one in found.values() if not any(map(problem_of, local_parts(one)))]
        values.names += [name for name, _ in inner]
        values.tensors += [one for _, one in inner]
        return cls(root, values, taken, has_inner=bool(inner)), values

    def values_of(self, state: Mapping[str, Any], taken: Mapping[str, Any]) -> StateValues | None:
        """Return the values of a state; ``None`` if it needs another plan. The arguments are as for `of`.

        For a plan that is `is_lasting`.
        """
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

    def tensors(self, views: Iterable[torch.Tensor], originals: Sequence[Any]) -> Sequence[Any]:
        """Return the state's tensors, each once, as views of the file.

        ``originals`` are `StateValues.tensors`. With `is_plain`, they are not needed.
        """
        if self.is_plain:
            return list(views)
        left = iter(views)
        return [self._replicas[at] if at in self._replicas else _rebuilt(one, left) for at, one in enumerate(originals)]

    def build(self, tensors: Sequence[Any], others: Iterable[Any]) -> dict[str, Any]:
        """Return a state of this structure, with the result of `tensors` and copies of the other values."""
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


def collect_tensors(path: str | None, value: Any, found: dict[int, tuple[str, Any]], objects: dict[int, Any]) -> None:
    """Find the tensors in a value, each once with a name as DCP's planners build it, and the objects to be pickled."""
    if isinstance(value, _TENSORS):
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
        collect_tensors(f"{before}{key!s}", inner, found, objects)


def local_parts(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that hold this rank's elements of a tensor, DTensor or ShardedTensor."""
    if type(tensor) in PLAIN_TYPES:
        return [tensor]
    if isinstance(tensor, DTensor):
        return [tensor.detach().to_local()]
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.detach().as_subclass(torch.Tensor) if not problem_of(tensor) else tensor]


def _rebuilt(tensor: Any, views: Iterator[torch.Tensor]) -> Any:
    """Return a tensor like another one, with views of its local parts."""
    if isinstance(tensor, DTensor):
        return DTensor(next(views), tensor._spec, requires_grad=False)
    if isinstance(tensor, ShardedTensor):
        shards = [Shard(next(views), shard.metadata) for shard in tensor.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, tensor.metadata(), process_group=tensor._process_group
        )
    return mark_shards(next(views), shards_of(tensor))


def _is_simple(tensor: Any) -> bool:
    """Whether this rank's part of a tensor consists of its bytes alone, in memory of its own."""
    if type(tensor) is DTensor:
        with torch.no_grad():
            tensor = tensor.to_local()
    is_plain = type(tensor) in PLAIN_TYPES and (tensor.is_cpu or tensor.is_cuda)
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
