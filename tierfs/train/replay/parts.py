"""`Parts`: the parts of a user's state as the log sees them: optimizers with named parameters, and everything else.

Gradients explain how parameters and the optimizers' state change. All else that a full save would store is logged as it
is after a step: small values always, buffers and other tensors when their bytes have changed.

`LoggedFile` is a file of the log: what one rank's optimizers got at a few steps, and the other values after them. It is a
safetensors file. Its tensors are the gradients, named as their parameters, and the tensors that changed. The entry
`FACTS` has the rest as JSON: see `StepFacts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tierfs.checkpoint.notes import LoggedStep
from tierfs.codec.layout.safetensors import read_table
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.save.shard_writer import commit_shard
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES, bytes_of, in_torch, tensor_in
from tierfs.digest import checksum
from tierfs.errors import FormatError, InvalidInputError
from tierfs.host.pending.levels import Level
from tierfs.store import Store, open_entry, stat_to_read
from tierfs.train.position import generators, positions, set_generators, set_positions
from tierfs.train.state import DictState, TrainState, items_of
from tierfs.train.values import digests_of, pack, unpack

REST = "rest:"
"""The beginning of the names of logged tensors that are no gradients."""
_TENSOR = "tierfs.tensor"
"""Stands for a tensor among packed values."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank has, without autograd."""
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the numbers and flags of each group of an optimizer, tensors among them copied."""
    return [
        {
            name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in {"params", "param_names"}
        }
        for group in optimizer.param_groups
    ]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


class Parts:
    """The parts of a state.

    Attributes:
        optimizers: The optimizers, in order.
        names: The name of each optimized parameter, by its ``id``.
    """

    def __init__(self, state: TrainState | DictState) -> None:
        if isinstance(state, TrainState):
            state.check()
        self._take(state)
        self._at: list[int] = []  # the addresses of the parameters
        self._turn: int | None = None
        self._bytes: list[tuple[torch.device, Any]] = []
        self._places: dict[torch.device, list[Any]] = {}
        places = {
            id(each): f"{number}.{at}.{index}"
            for number, optimizer in enumerate(self.optimizers)
            for at, group in enumerate(optimizer.param_groups)
            for index, each in enumerate(group["params"])
        }
        named = (pair for module in self._modules.values() for pair in module.named_parameters())
        self.names = places | {id(each): name for name, each in named if id(each) in places}
        if len(set(self.names.values())) < len(self.names):  # parameters of several modules share names
            self.names = places
        self._buffers = {
            f"{place}.{name}": (module, name)
            for place, module in self._modules.items()
            for name in module.state_dict().keys() & {name for name, _ in module.named_buffers()}
        }

    def _take(self, state: TrainState | DictState) -> None:
        self.state = state
        if isinstance(state, DictState):
            values = dict(state.entries)
            self._modules = {name: value for name, value in values.items() if isinstance(value, nn.Module)}
            self.optimizers = [value for value in values.values() if isinstance(value, torch.optim.Optimizer)]
            kept = {id(value) for value in (*self._modules.values(), *self.optimizers)}
            self._extra: Mapping[str, Any] = {name: value for name, value in values.items() if id(value) not in kept}
        else:
            self._modules = {"model": state.model}
            self.optimizers = items_of(state.optimizer)
            self._extra = state.extra

    def takes(self, state: TrainState | DictState) -> bool:
        """Return whether a state has the same models and optimizers. Then its other values replace those of before."""
        before = [*self._modules.values(), *self.optimizers]
        self._take(state)
        return list(map(id, before)) == list(map(id, [*self._modules.values(), *self.optimizers]))

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [each for optimizer in self.optimizers for each in parameters_of(optimizer)]

    def structure(self) -> list[list[list[str]]]:
        """Return the names of the parameters of each group of each optimizer."""
        return [
            [[self.names.get(id(each), "?") for each in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def mark(self, turn: int) -> tuple[list[int], bytes]:
        """Return the versions of the parameters, which count changes in place, and a sample of their bytes.

        The sample notices changes through ``parameter.data``, which no version counts. It has 64 bytes of each parameter,
        and of each 128 KiB of a large one, or less often where that is more than 256 places. ``turn`` chooses the places.
        """
        own = [each._local_tensor if type(each) is DTensor else each for each in self.parameters]
        if (at := list(map(torch.Tensor.data_ptr, own))) != self._at:
            self._at, self._turn = at, None
            self._bytes = [(each.device, _bytes_in(each.detach())) for each in own if each.numel()]
        if turn != self._turn:
            self._turn, self._places = turn, {}
            stride = max(128 << 10, sum(len(data) for _, data in self._bytes) // 256)
            for device, data in self._bytes:
                places = range(turn * 64 * 37 % min(stride, len(data)), len(data), stride)
                self._places.setdefault(device, []).extend(data[at : at + 64] for at in places)
        sample = b"".join(
            b"".join(each) if device.type == "cpu" else bytes_of(torch.cat(each))
            for device, each in self._places.items()
        )
        return list(map(attrgetter("_version"), own)), sample

    def replicas(self, rank: int) -> list[int]:
        """Return the ranks that have the same parameters and gradients as this one, as DDP or their placements say."""
        every = self.parameters
        if every and all(isinstance(each, DTensor) and each.device_mesh == every[0].device_mesh for each in every):
            mesh, at = every[0].device_mesh, every[0].device_mesh.get_coordinate()
            is_same = (all(each.placements[number].is_replicate() for each in every) for number in range(mesh.ndim))
            ranks = mesh.mesh[tuple(slice(None) if same else at[number] for number, same in enumerate(is_same))]
            return [int(each) for each in ranks.flatten()]
        modules = [each for each in self._modules.values() if isinstance(each, DistributedDataParallel)]
        groups = {tuple(dist.get_process_group_ranks(each.process_group)) for each in modules}
        trained = {id(each): each.requires_grad for module in modules for each in module.parameters()}
        ours = set(map(id, every))  # not so where ranks share the optimizer's work
        is_whole = ours <= trained.keys() and all(each in ours for each, is_trained in trained.items() if is_trained)
        return list(*groups) if len(groups) == 1 and is_whole else [rank]

    def nbytes(self) -> int:
        """Return the bytes of this rank's part of the parameters and the optimizers' state."""
        states = (value for optimizer in self.optimizers for own in optimizer.state.values() for value in own.values())
        return sum(local(each).nbytes for each in (*self.parameters, *states) if isinstance(each, torch.Tensor))

    def build(self) -> dict[str, Any]:
        """Return the facts about this program and machine on which the bits of an update depend."""
        devices = sorted({each.device.type for each in self.parameters})
        found: dict[str, Any] = {"torch": str(torch.__version__), "git": torch.version.git_version, "devices": devices}
        if "cpu" in devices:
            found |= {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
        if "cuda" in devices:
            found |= {"cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()}
        return found

    def digest(self) -> str:
        """Return a digest of this rank's part of the parameters, the optimizers' state and the other tensors."""
        state: dict[str, Any] = {"others": self.others()[1]}
        for number, optimizer in enumerate(self.optimizers):
            for each in parameters_of(optimizer):
                # torch saves no state of frozen parameters, which Adagrad has from its beginning.
                kept = optimizer.state.get(each, {}) if each.requires_grad else {}
                own = {
                    str(key): local(value) if isinstance(value, torch.Tensor) else value for key, value in kept.items()
                }
                state[f"{number}.{self.names[id(each)]}"] = {"parameter": local(each), "state": own}
        return checksum(json.dumps(sorted(digests_of(state).items())).encode()).hex()

    # -- everything but parameters and optimizers ----------------------------------------------------------------------

    def others(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the extra values, and the buffers and their tensors by name, without copies."""
        tensors = {f"{REST}{name}": local(module.get_buffer(inner)) for name, (module, inner) in self._buffers.items()}

        def take(path: str, tensor: torch.Tensor) -> str:
            if id(tensor) not in self.names:  # gradients explain optimized parameters
                tensors[path] = local(tensor)
            return _TENSOR

        extra = {name: _mapped(_content(each), f"{REST}extra.{name}", take) for name, each in self._extra.items()}
        return {"extra": extra}, tensors

    def values(self) -> dict[str, Any]:
        """Return the epoch, and the state of schedulers, the scaler, data loaders and random generators."""
        state = self.state
        if not isinstance(state, TrainState):
            return {}
        found = {
            "epoch": state.epoch,
            "scheduler": [each.state_dict() for each in items_of(state.scheduler)],
            "scaler": None if state.scaler is None else state.scaler.state_dict(),
            "loader": positions(items_of(state.dataloader)),
        }
        return {**found, "rng": generators()}  # last, because a loader may draw a number for its state

    def set_tensors(self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the buffers and the extra values as `others` returned them, with the newest of each logged tensor."""
        entries = self.state.entries if isinstance(self.state, DictState) else self.state.extra
        with torch.no_grad():
            for name, (module, inner) in self._buffers.items():
                if (found := tensors.get(f"{REST}{name}")) is not None:
                    local(module.get_buffer(inner)).copy_(found)
            for name, each in list(self._extra.items()):
                if name not in values["extra"]:
                    continue
                live: dict[str, Any] = {}  # a tensor that was never logged has not changed since the full save
                _mapped(_content(each), path := f"{REST}extra.{name}", live.setdefault)
                content = _mapped(values["extra"][name], path, {**live, **tensors}.get)
                if hasattr(each, "load_state_dict"):
                    each.load_state_dict(content)
                elif isinstance(each, torch.Tensor):
                    if content is not each:
                        local(each).copy_(content)
                elif isinstance(entries, dict):
                    entries[name] = content

    def set_values(self, step: int, values: Mapping[str, Any]) -> list[str]:
        """Set the step, and what `values` returned. Return in words what could not be set exactly."""
        state = self.state
        if not isinstance(state, TrainState):
            return []
        state.step, state.epoch = step, int(values["epoch"])
        for scheduler, saved in zip(items_of(state.scheduler), values["scheduler"], strict=True):
            scheduler.load_state_dict(saved)
        if state.scaler is not None and values["scaler"]:
            state.scaler.load_state_dict(values["scaler"])
        notes = set_positions(items_of(state.dataloader), values["loader"], state.epoch)
        return notes + set_generators(values["rng"])


def _bytes_in(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes, to be sliced: its own memory, or only that of its first element if it has gaps."""
    own = tensor.view(-1) if tensor.is_contiguous() else tensor[(slice(1),) * tensor.dim()].view(-1)
    return bytes_of(own) if own.device.type == "cpu" else own.view(torch.uint8)


def _content(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _mapped(value: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """Return a nested value in which each tensor, or what stands for one, is replaced by ``change(path, it)``."""
    if isinstance(value, torch.Tensor) or (isinstance(value, str) and value == _TENSOR):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, f"{path}.{key}", change) for key, inner in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_mapped(inner, f"{path}.{at}", change) for at, inner in enumerate(value))
    return value


def check_gradient(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raise `InvalidInputError` if a gradient is sparse in another form than COO, or placed unlike its parameter."""
    if isinstance(gradient, DTensor) and gradient.placements != getattr(parameter, "placements", None):
        raise InvalidInputError(
            f"Replay: the gradient of {name} is placed as {gradient.placements}, unlike its parameter: redistribute it first"
        )
    if gradient.layout not in {torch.strided, torch.sparse_coo} or gradient.dtype not in SAFETENSORS_NAMES:
        raise InvalidInputError(
            f"Replay: the gradient of {name} cannot be logged: its layout is {gradient.layout}, its dtype {gradient.dtype}"
        )


FACTS = "tierfs.replay"
VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The content of a file beside its tensors.

    Attributes:
        parent: The chain, or the save, that had the state at the step that the file's chain follows.
        base: The step that the file's chain follows.
        rank: The rank whose file has the gradients: this one, or one of the same host that has the same gradients.
        build: The facts about this program and machine on which the bits of an update depend.
        structure: The names of the parameters of each group of each optimizer.
        events: The calls of ``optimizer.step``, in order: the optimizer's number and class, its numbers before the call,
            and for each parameter the form of its gradient.
        groups: The numbers of each group of each optimizer after the step.
        values: See `Parts.others` and `Parts.values`.
        digest: See `Parts.digest`, of the state after the step; empty unless the step is to be proven.
        sample: The turn of a sample of the weights after the step, and its checksum: see `Parts.mark`.
        metrics: The metrics of each training step in the file.
    """

    parent: str
    base: int
    rank: int
    build: Mapping[str, Any]
    structure: list[list[list[str]]]
    events: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]
    values: dict[str, Any]
    digest: str
    sample: tuple[int, str]
    metrics: dict[int, dict[str, float]]

    def forms(self) -> list[Any]:
        """Return which gradients the optimizers got, and in which form."""
        names = ("optimizer", "none", "sparse", "strides")
        return [self.structure, *([event[name] for name in names] for event in self.events)]


def commit_log(file: ShardFile, path: str, facts: StepFacts, level: Level) -> int:
    """Publish a file of the log, which holds its tensors already, on this host. Return its length in bytes.

    Raises `CapacityError` if there is no room, and as `Writer.commit` does.
    """
    text = pack({"version": VERSION, **{name: getattr(facts, name) for name in facts.__slots__}}).encode()
    file.add_objects([(FACTS, memoryview(text))])
    file.wait_filled()
    places = [(run, entry) for run in file.runs for entry in run.entries]
    return commit_shard(file, path, places, log_level=level)[0]


class LoggedFile:
    """A file of the log, opened for reading.

    Attributes:
        logged: Its name.
        facts: Its content beside the tensors.
        length: Of the file, in bytes.

    Raises:
        NotFoundError, CorruptionError, FormatError: It cannot be read, or a newer tierfs wrote it.
    """

    def __init__(self, store: Store, run: str, logged: LoggedStep) -> None:
        self.logged = logged
        self._other = partial(LoggedFile, store, run)
        path = logged.path(run)
        self._reader = open_entry(store, stat_to_read(store, path))
        self._where, self.length = store.where(path), self._reader.length
        self._table, self._begin = read_table(self._reader.read_into, self.length, self._where)
        if FACTS not in self._table:
            raise FormatError(f"{self._where} is not a file of a log: it lacks {FACTS}")
        entry = self._table.pop(FACTS)
        data = bytearray(entry.length)
        self._reader.read_into(self._begin + entry.at, memoryview(data))
        found = unpack(data.decode(), self._where)
        if found.pop("version", None) != VERSION:
            raise FormatError(f"{self._where} has another version than {VERSION}")
        self.facts = StepFacts(**found)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the tensors, by name. Raises as the constructor does."""
        data = {name: bytearray(entry.length) for name, entry in self._table.items()}
        parts = [(self._begin + self._table[name].at, memoryview(each)) for name, each in data.items()]
        self._reader.read_parts(parts)
        found = {}
        for name, entry in self._table.items():
            kind = in_torch(entry.dtype, entry.shape)
            if kind is None:
                raise FormatError(f"{self._where}: {name} has a dtype that torch lacks: {entry.dtype}")
            found[name] = tensor_in(data[name], *kind)
        if self.facts.rank != self.logged.rank:
            other = self._other(replace(self.logged, rank=self.facts.rank))
            if other.facts.forms() != self.facts.forms():
                raise FormatError(f"{other._where} has other gradients than {self._where} refers to")
            found |= {name: each for name, each in other.tensors().items() if not name.startswith(REST)}
        return found
