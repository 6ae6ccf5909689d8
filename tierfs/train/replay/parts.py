"""`Parts`: the parts of a user's state as the log sees them: optimizers with named parameters, and everything else.

Gradients explain how parameters and the optimizers' state change. All else that a full save would store is logged as it
is after a step: small values always, tensors when their bytes have changed. Such tensors are buffers, parameters that no
optimizer has, and those in extra values and in the extra state of modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tierfs.digest import checksum
from tierfs.train.optimizers import parameters_of
from tierfs.train.position import generators, positions, set_generators, set_positions
from tierfs.train.replay.sample import Sample, inner, versions
from tierfs.train.state import DictState, TrainState, items_of
from tierfs.train.values import digests_of, pack

REST = "rest:"
"""The beginning of the names of logged tensors that are no gradients."""
SELDOM, BUFFER, STATE, HOOK, EXTRA = (f"{REST}{name}." for name in ("seldom", "buffer", "state", "hook", "extra"))
"""Those of what seldom changes (parameters without optimizer, and buffers that no save has), of other buffers, extra
state, what hooks add to a state, and extra values."""
_EXTRA_STATE = "_extra_state"
"""torch's name of extra state in a module's state."""
_TENSOR = "tierfs.tensor"
"""Stands for a tensor among packed values."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank has, without autograd."""
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


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
        self._sample = Sample()
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
        self._added = {place: names for place, each in self._modules.items() if (names := _added_by_hooks(each))}

    def _take(self, state: TrainState | DictState) -> None:
        self.state = state
        if isinstance(state, DictState):
            values = state.entries
            self._modules = {name: value for name, value in values.items() if isinstance(value, nn.Module)}
            self.optimizers = [value for value in values.values() if isinstance(value, torch.optim.Optimizer)]
        else:
            self._modules = {"model": state.model}
            self.optimizers = items_of(state.optimizer)

    @property
    def _extra(self) -> Mapping[str, Any]:
        """The extra values, as they are now: training may replace them."""
        if not isinstance(self.state, DictState):
            return self.state.extra
        own = {id(each) for each in (*self._modules.values(), *self.optimizers)}
        return {name: value for name, value in self.state.entries.items() if id(value) not in own}

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
        """Return the versions of the parameters and the optimizers' state, and a sample of the parameters' bytes.

        Versions count changes in place. The sample notices changes through ``parameter.data``, which no version counts:
        see `Sample`. ``turn`` chooses its places.
        """
        own = list(map(inner, self.parameters))
        states = [
            value for optimizer in self.optimizers for each in optimizer.state.values() for value in each.values()
        ]
        moments = [inner(value) for value in states if isinstance(value, torch.Tensor)]
        return versions([*own, *moments]), b"".join(self._sample.of(own, turn))

    @property
    def has_unused_gradients(self) -> bool:
        """Whether there are gradients that no step of an optimizer has used, as amid a gradient accumulation."""
        return bool(self.state.held.gradients())

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

    def build(self) -> dict[str, Any]:
        """Return the facts about this program and machine on which the bits of an update depend."""
        devices = sorted({each.device.type for each in self.parameters})
        found: dict[str, Any] = {"torch": str(torch.__version__), "git": torch.version.git_version, "devices": devices}
        if "cpu" in devices:
            found |= {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
        if "cuda" in devices:
            found |= {"cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()}
        return found

    def frozen(self) -> list[str]:
        """Return the names of optimized parameters that need no gradient now."""
        return [self.names[id(each)] for each in self.parameters if not each.requires_grad]

    def digest(self, frozen: Collection[str], others: Mapping[str, str] | None = None) -> str:
        """Return a digest of this rank's part of the parameters, the optimizers' state and the other tensors.

        ``frozen`` has the names of parameters whose state does not count: torch saves none of frozen parameters, which
        Adagrad has from its beginning. ``others`` has the digests of the other tensors, if they are known.
        """
        state: dict[str, Any] = {"others": digests_of(self.others()[1]) if others is None else dict(others)}
        for number, optimizer in enumerate(self.optimizers):
            for each in parameters_of(optimizer):
                name = self.names[id(each)]
                kept = {} if name in frozen else optimizer.state.get(each, {})
                own = {
                    str(key): local(value) if isinstance(value, torch.Tensor) else value for key, value in kept.items()
                }
                state[f"{number}.{name}"] = {"parameter": local(each), "state": own}
        return checksum(json.dumps(sorted(digests_of(state).items())).encode()).hex()

    # -- everything but parameters and optimizers ----------------------------------------------------------------------

    def others(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the values beside the optimizers' parameters: packed ones, and tensors by name, without copies."""
        tensors: dict[str, torch.Tensor] = {}

        def take(path: str, tensor: torch.Tensor) -> str:
            if id(tensor) not in self.names:  # gradients explain optimized parameters
                tensors[path] = local(tensor)
            return _TENSOR

        for place, module in self._modules.items():
            for each in module.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()  # a model that has no backward pass stays whole after its forward pass
            for name, parameter in module.named_parameters():
                take(f"{SELDOM}{place}.{name}", parameter)
            for inner_place, each in module.named_modules():
                for name, buffer in each._buffers.items():
                    if buffer is not None:
                        kind = SELDOM if name in each._non_persistent_buffers_set else BUFFER
                        take(f"{kind}{place}.{inner_place}.{name}", buffer)
        state = {path: _mapped(each.get_extra_state(), f"{STATE}{path}", take) for path, each in self._stateful()}
        hooks: dict[str, Any] = {}
        for place, names in self._added.items():
            found = self._modules[place].state_dict(keep_vars=True)
            hooks[place] = {name: _mapped(found.get(name), f"{HOOK}{place}.{name}", take) for name in names}
        extra = {name: _mapped(_content(each), f"{EXTRA}{name}", take) for name, each in self._extra.items()}
        return {"extra state": state, "hooks": hooks, "extra": extra}, tensors

    def _stateful(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that have extra state, each with its place."""
        for place, module in self._modules.items():
            for name, each in module.named_modules():
                if type(each).get_extra_state is not nn.Module.get_extra_state:
                    yield f"{place}.{name}", each

    def values(self, *, has_loaders: bool = True) -> dict[str, Any]:
        """Return the epoch, and the state of schedulers, the scaler, data loaders and random generators.

        ``has_loaders=False`` leaves out data loaders, which tell the same position in several ways.
        """
        state = self.state
        if not isinstance(state, TrainState):
            return {"rng": generators()}
        found = {
            "epoch": state.epoch,
            "scheduler": [each.state_dict() for each in items_of(state.scheduler)],
            "scaler": None if state.scaler is None else state.scaler.state_dict(),
        }
        if has_loaders:
            found["loader"] = positions(items_of(state.dataloader))
        return {**found, "rng": generators()}  # last, because a loader may draw a number for its state

    def misfit(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return in words which logged tensor has no place of its form in the models; empty if all have one."""
        own = [(name, tensor) for name, tensor in tensors.items() if is_of_model(name)]
        live = self.others()[1] if own else {}
        for name, tensor in own:
            if name not in live or form_of(live[name]) != form_of(tensor):
                there = form_of(live[name]) if name in live else "no such tensor"
                return f"{name.removeprefix(REST)} was {form_of(tensor)}, and the model has {there}"
        return ""

    def set_others(self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Set what `others` returned, with the newest of each logged tensor."""
        entries = self.state.entries if isinstance(self.state, DictState) else self.state.extra
        live = self.others()[1]  # a tensor that was never logged has not changed since the full save
        newest = {**live, **tensors}
        with torch.no_grad():
            for name in tensors.keys() & live.keys():
                if is_of_model(name):
                    live[name].copy_(tensors[name])
            for path, module in self._stateful():
                if path in values["extra state"]:
                    module.set_extra_state(_mapped(values["extra state"][path], f"{STATE}{path}", newest.get))
            for name, each in list(self._extra.items()):
                if name not in values["extra"]:
                    continue
                content = _mapped(values["extra"][name], f"{EXTRA}{name}", newest.get)
                if hasattr(each, "load_state_dict"):
                    each.load_state_dict(content)
                elif isinstance(each, torch.Tensor) and content is None:
                    pass  # a parameter of an optimizer
                elif isinstance(each, torch.Tensor) and form_of(local(each)) == form_of(content):
                    local(each).copy_(content)
                elif isinstance(entries, dict):
                    entries[name] = content

    def differences(self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return in words which values of a file lie not in the state, after they were set."""
        drawn = generators()  # an extra value may draw a number for its state
        packed, live = self.others()
        set_generators(drawn)
        now = {**packed, **self.values(has_loaders=False)}
        names = [name for name, value in now.items() if pack(value) != pack(values.get(name))]
        digests = digests_of({name: live[name] for name in tensors.keys() & live.keys()})
        names += [name for name, digest in digests_of(tensors).items() if digests.get(name, digest) != digest]
        return [f"{name.removeprefix(REST)!r} is not as it was logged, although it was set" for name in names]

    def set_values(self, step: int, values: Mapping[str, Any]) -> list[str]:
        """Set the step, and what `values` returned. Return in words what could not be set exactly."""
        state = self.state
        if not isinstance(state, TrainState):
            return set_generators(values["rng"])
        state.step, state.epoch = step, int(values["epoch"])
        for scheduler, saved in zip(items_of(state.scheduler), values["scheduler"], strict=True):
            scheduler.load_state_dict(saved)
        if state.scaler is not None and values["scaler"]:
            state.scaler.load_state_dict(values["scaler"])
        notes = set_positions(items_of(state.dataloader), values["loader"], state.epoch)
        return notes + set_generators(values["rng"])


def form_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def is_of_model(name: str) -> bool:
    return name.startswith((SELDOM, BUFFER))


def _added_by_hooks(module: nn.Module) -> list[str]:
    """Return the names in a module's state that are neither its parameters or buffers nor extra state."""
    if any(isinstance(each, FullyShardedDataParallel) for each in module.modules()):
        return []  # its state is a copy of the parameters, made by all ranks
    found = module.state_dict(keep_vars=True)  # first: FSDP 2 shards its parameters here
    known = {id(each) for each in (*module.parameters(), *module.buffers())}
    names = [name for name, value in found.items() if id(value) not in known]
    return [name for name in names if name.rpartition(".")[2] != _EXTRA_STATE]


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
