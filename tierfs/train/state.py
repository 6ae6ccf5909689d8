"""`TrainState`: the complete state that a training run needs to go on exactly. `DictState`: a dict in its place."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tierfs.errors import InvalidInputError
from tierfs.train.optimizers import (
    HAS_GRADIENTS,
    as_saved,
    complete_state,
    drop_gradients,
    gradients_of,
    parameters_of,
    unchanged,
)
from tierfs.train.position import BUFFERS, ModuleBuffers, generators, positions, reseed, set_generators, set_positions
from tierfs.train.run import OWN, About
from tierfs.train.values import check_values, pack, unpack

_logger = logging.getLogger("tierfs.train")
_KINDS = (nn.Module, torch.optim.Optimizer)
FULL_ONLY = "optimizer"
"""The entry of a dict that a light checkpoint leaves out."""
NO_GRADIENTS = "the save was in the middle of a gradient accumulation: gradients are not saved"
LEFT_OUT = ("optimizer", "data loader", "scaler", "extra values")
"""The parts of a `TrainState` that a light checkpoint leaves out."""


class Wanted:
    """The values that a restore loads.

    ``names`` are those of all saved values, ``only`` those of the loaded ones.
    """

    def __init__(self, kind: str, about: About | None, names: Collection[str], only: Collection[str]) -> None:
        self.kind = kind
        self.about = about
        self.names = frozenset(names)
        self._only = frozenset(only)
        self._left_out = set(names) - set(only)
        self._saved = {name[:at] for name in names for at, letter in enumerate(f"{name}.") if letter == "."}

    def has(self, section: str) -> bool:
        """Return whether something of a section of the state is loaded; always if everything is."""
        return not self._left_out or any(name == section or name.startswith(f"{section}.") for name in self._only)

    def has_all(self, section: str = "") -> bool:
        """Return whether everything that was saved of a section of the state is loaded; by default, of all of it."""
        return not any(not section or name.startswith(f"{section}.") for name in self._left_out)

    def is_loaded(self, name: str) -> bool:
        """Return whether a value was saved under this name, and is loaded."""
        return name in self._only

    def was_saved(self, section: str) -> bool:
        """Return whether something of a section was saved, and is loaded."""
        return section in self._saved and self.has(section)

    def saved_in(self, section: str, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return those values of a section for which something was saved."""
        return {key: value for key, value in values.items() if f"{section}.{key}" in self._saved}


class Held:
    """The modules and optimizers among named values of a state. A value that is neither may have them as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        found: dict[int, tuple[str, Any]] = {}
        for name, value in values.items():
            is_other = not isinstance(value, _KINDS) and hasattr(value, "load_state_dict")
            inner = (
                {f"{name}.{key}": each for key, each in getattr(value, "__dict__", {}).items()}
                if is_other
                else {name: value}
            )
            found |= {id(each): (key, each) for key, each in inner.items() if id(each) not in found}
        self._modules = {name: each for name, each in found.values() if isinstance(each, nn.Module)}
        self._optimizers = {name: each for name, each in found.values() if isinstance(each, torch.optim.Optimizer)}
        self.buffers = ModuleBuffers(self._modules)

    def gradients(self) -> dict[str, Any]:
        """See `gradients_of`."""
        return gradients_of(self._optimizers.values(), self._modules.values())

    def drop_gradients(self) -> list[str]:
        """See `drop_gradients`."""
        return drop_gradients(self._optimizers.values(), self._modules.values())

    def unsaved(self) -> dict[str, Any]:
        """Return what `ModuleBuffers.unsaved` does, and which parameters each optimizer has, in its order."""
        names = {id(each): name for name, each in self.buffers.parameters()}
        orders = {
            f"the order of parameters of {name}": repr([names.get(id(p)) for p in parameters_of(each)])
            for name, each in self._optimizers.items()
        }
        return {**self.buffers.unsaved(), **orders}


class TrainState:
    """The complete state of a training run on this rank. `Manager.save` copies it, `Manager.restore` loads it in place.

    Pass each of optimizer, scheduler and dataloader, or ``None`` if the run has none. If you forget one, the first save
    raises an error, so no resumed run silently differs. The random generators of Python, NumPy, torch and each GPU are
    part of the state without being passed. The generators and the data loader's position are saved for each rank.

    Args:
        model: The model, sharded or not.
        optimizer: The optimizer of the model, or a list of several.
        scheduler: The learning rate scheduler, or a list of several: any objects with ``state_dict`` and
            ``load_state_dict``.
        dataloader: An object with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``,
            or a list of several.
        scaler: A ``torch.amp.GradScaler``.
        extra: More values by name: objects with ``state_dict``, tensors or plain values.
        epoch: The epoch at which training begins.

    Attributes:
        step: The last saved or restored step; -1 before the first one.
        epoch: The present epoch. The training loop sets it. It is saved and restored.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Any = MISSING,
        scheduler: Any = MISSING,
        dataloader: Any = MISSING,
        scaler: Any = None,
        extra: Mapping[str, Any] | None = None,
        epoch: int = 0,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.dataloader = dataloader
        self.scaler = scaler
        self.extra = dict(extra or {})
        self.step = -1
        self.epoch = epoch

    def __repr__(self) -> str:
        return f"TrainState(step={self.step}, epoch={self.epoch})"

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group of each optimizer."""
        return [float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self.optimizer is MISSING else items_of(self.optimizer)

    def check(self) -> None:
        """Check that the state is complete. Every save does this first.

        Raises:
            InvalidInputError: A part is missing or cannot be saved. The message names it.
        """
        for name in ("optimizer", "scheduler", "dataloader"):
            part = getattr(self, name)
            if part is MISSING:
                raise InvalidInputError(f"TrainState has no {name}: pass it, or {name}=None to leave it out")
            for each in items_of(part):
                if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                    hint = ": use torchdata's StatefulDataLoader" if name == "dataloader" else ""
                    raise InvalidInputError(
                        f"the {name}, a {type(each).__name__}, lacks state_dict() or load_state_dict(){hint}"
                    )
        parameters = {id(each) for each in self.model.parameters()}
        owned = Counter(id(p) for each in self._optimizers for group in each.param_groups for p in group["params"])
        for each in self._optimizers:
            kind = type(each).__name__
            if each.state_dict().keys() != {"state", "param_groups"} or not all(map(torch.is_tensor, each.state)):
                raise InvalidInputError(
                    f"the optimizer, a {kind}, has state that belongs to no parameter: pass a dict as the state"
                )
            if any(owned[id(p)] > 1 for group in each.param_groups for p in group["params"]):
                raise InvalidInputError(
                    f"another optimizer has parameters of the optimizer, a {kind}, too: pass a dict as the state"
                )
            outside = [p for group in each.param_groups for p in group["params"] if id(p) not in parameters]
            if outside:
                raise InvalidInputError(
                    f"the optimizer, a {kind}, has {len(outside)} parameters that are not the model's, the "
                    f"first of shape {list(outside[0].shape)}: make them part of the model, or pass a dict as the state"
                )
        is_scheduled = any("initial_lr" in group for each in self._optimizers for group in each.param_groups)
        if is_scheduled and self.scheduler is None:
            raise InvalidInputError(
                "the optimizer has a scheduler, but TrainState has scheduler=None: pass the scheduler"
            )

    def to_save(self, step: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Collect the values to save, and facts about them for `About`. A collective if the model is sharded.

        Args:
            step: The training step. It becomes the attribute ``step``.
            kind: ``full``, or ``light`` for a state without optimizer, data loader, scaler and extra values.

        Raises:
            InvalidInputError: A part is missing or cannot be saved.
        """
        self.check()
        self.step = step
        values = self.values(kind)
        check_values(values)
        return values, {"epoch": self.epoch, "lr": self.learning_rates, **self.held.gradients()}

    def values(self, kind: str) -> dict[str, Any]:
        """Return the values that `to_save` saves, as they are now. A collective if the model is sharded."""
        values: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if kind == "full" and self._optimizers:
            values["optimizer"] = _joined(self._optimizer_to_save(each) for each in self._optimizers)
        values["scheduler"] = [pack(each.state_dict()) for each in items_of(self.scheduler)]
        own: dict[str, Any] = self.held.buffers.to_save()
        if kind == "full":
            values["scaler"] = pack(None if self.scaler is None else self.scaler.state_dict())
            values["extra"] = {name: _state_of(value) for name, value in self.extra.items()}
            own["loader"] = pack(positions(items_of(self.dataloader)))
        own["rng"] = pack(generators())  # last: a loader may make its iterator for its state, and draw a number for it
        values[_own()] = own
        return values

    def unsaved(self) -> dict[str, Any]:
        """Return copies of what training also depends on, and no checkpoint holds. A restore compares it."""
        return self.held.unsaved()

    @property
    def held(self) -> Held:
        """The modules and optimizers of the state, those among the extra values included."""
        optimizers = {f"optimizer {number}": each for number, each in enumerate(self._optimizers)}
        return Held({"model": self.model, **optimizers, **{f"extra.{name}": each for name, each in self.extra.items()}})

    def to_load(self, wanted: Wanted) -> dict[str, Any]:
        """Collect live tensors to load into, and empty text for packed values. A collective if the model is sharded."""
        kind, about = wanted.kind, wanted.about
        values: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if kind == "full" and self._optimizers and wanted.has(FULL_ONLY):
            values["optimizer"] = _joined(self._optimizer_to_load(each, wanted) for each in self._optimizers)
        values["scheduler"] = ["" for _ in items_of(self.scheduler)]
        own: dict[str, Any] = {"rng": ""}
        if kind == "full":
            values["scaler"] = ""
            values["extra"] = {
                name: _entry_to_load(f"extra.{name}", value, wanted) for name, value in self.extra.items()
            }
            own["loader"] = ""
        if about is None or about.world_size == _world_size():
            values[_own()] = {**own, **self.held.buffers.to_load(is_saved=wanted.was_saved(f"{_own()}.{BUFFERS}"))}
        return values

    def loaded(self, values: Mapping[str, Any], wanted: Wanted) -> list[str]:
        """Apply the loaded values of `to_load` to the parts of the state.

        If not everything is loaded, the step and the epoch stay as they are.

        Returns:
            The parts that are only approximately restored, in words.
        """
        about = wanted.about
        set_model_state_dict(self.model, values["model"])
        if "optimizer" in values:
            self._set_optimizers(values["optimizer"])
        for scheduler, text in zip(items_of(self.scheduler), values["scheduler"], strict=True):
            if text:
                scheduler.load_state_dict(unpack(text, "scheduler"))
        if self.scaler is not None and values.get("scaler"):
            state = unpack(values["scaler"], "scaler")
            if state:
                self.scaler.load_state_dict(state)
        for name, value in values.get("extra", {}).items():
            if wanted.has(f"extra.{name}"):
                _load_entry(self.extra, name, value)
        if about is not None and wanted.has_all():
            self.step, self.epoch = about.step, int(about.state.get("epoch", self.epoch))
        light = about is not None and about.kind == "light"
        notes = [f"a light checkpoint: {', '.join(LEFT_OUT)} are not restored"] if light else []
        if wanted.has_all():
            notes += self.held.drop_gradients()
        return notes + _not_saved(about) + self._take_own(values, wanted)

    def _take_own(self, values: Mapping[str, Any], wanted: Wanted) -> list[str]:
        """Apply the values that each rank has for itself, or reseed if another number of ranks saved them."""
        own, about = values.get(_own()), wanted.about
        if own is None:
            assert about is not None, "only a description with another world size omits them"
            if not wanted.has_all():
                return []
            notes = _reseeded(about)
            if self.dataloader is not None:
                notes.append("the data loader's position cannot be restored: it keeps the one it was created with")
            return notes
        notes = []
        self.held.buffers.loaded(own)
        if own.get("loader"):
            notes += set_positions(items_of(self.dataloader), unpack(own["loader"], "loader"), self.epoch)
        if own["rng"]:
            # Last, because the steps before may have drawn random numbers.
            notes += set_generators(unpack(own["rng"], "rng"))
        return notes

    def _optimizer_to_save(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        is_new = not optimizer.state
        try:
            with unchanged(optimizer):
                found: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer)
        finally:
            if is_new:
                # torch made a step with zero gradients. Going on from there differs from a new optimizer's first step.
                optimizer.state.clear()
        if is_new:
            found["state"] = {}
        return found

    def _optimizer_to_load(self, optimizer: torch.optim.Optimizer, wanted: Wanted) -> dict[str, Any]:
        with complete_state(optimizer, is_whole=wanted.has_all(FULL_ONLY)):
            found: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer)
        found["state"] = wanted.saved_in(f"{FULL_ONLY}.state", found["state"])
        return found

    def _set_optimizers(self, values: Mapping[str, Any]) -> None:
        """Set the state of each optimizer. A parameter without saved state, which no step has used, gets none."""
        groups = iter(values["param_groups"])
        for optimizer in self._optimizers:
            own = [next(groups) for _ in optimizer.param_groups]
            names = {name for group in own for name in group["params"]}
            state = {name: each for name, each in values["state"].items() if name in names}
            with as_saved(optimizer):
                set_optimizer_state_dict(
                    self.model, optimizer, {"state": state, "param_groups": own}, options=StateDictOptions(strict=False)
                )


class DictState:
    """A user's dict of tensors, plain values and objects with ``state_dict``, with the interface of `TrainState`.

    This rank's random generators and buffers are saved beside the entries.

    Args:
        entries: The mapping. A load replaces entries without ``load_state_dict`` if this is a dict.
    """

    step = learning_rates = None  # a dict does not tell them

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = entries

    def to_save(self, step: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        values = self.values(kind)
        check_values(values)
        return values, self.held.gradients()

    def values(self, kind: str) -> dict[str, Any]:
        values = {name: _state_of(value) for name, value in self._of_kind(kind)}
        return {**values, self._beside: {**self.held.buffers.to_save(), "rng": pack(generators())}}

    def unsaved(self) -> dict[str, Any]:
        return self.held.unsaved()

    @property
    def _beside(self) -> str:
        """The name of this rank's own values, beside an entry ``rank_N`` that a user's dict may have."""
        return f"{_own()}.tierfs"

    @property
    def held(self) -> Held:
        return Held(self.entries)

    def to_load(self, wanted: Wanted) -> dict[str, Any]:
        values = {name: _entry_to_load(name, value, wanted) for name, value in self._of_kind(wanted.kind)}
        return {**values, **self._own_to_load(wanted)}

    def _own_to_load(self, wanted: Wanted) -> dict[str, Any]:
        own = self.held.buffers.to_load(is_saved=wanted.was_saved(f"{self._beside}.{BUFFERS}"))
        if wanted.was_saved(f"{self._beside}.rng"):
            own["rng"] = ""
        return {self._beside: own} if own else {}

    def _of_kind(self, kind: str) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in self.entries.items() if kind == "full" or name != FULL_ONLY)

    def loaded(self, values: Mapping[str, Any], wanted: Wanted) -> list[str]:
        for name, value in values.items():
            if name in self.entries and wanted.has(name):
                _load_entry(self.entries, name, value)
        own, about = values.get(self._beside, {}), wanted.about
        self.held.buffers.loaded(own)
        missing = sorted(self.entries.keys() - values.keys())
        notes = [f"a light checkpoint: {', '.join(missing)} is not restored"] if missing else []
        notes += _not_saved(about)
        if wanted.has_all():
            notes += self.held.drop_gradients()
        if "rng" in own:
            for value in self.entries.values():
                _state_of(value)  # a loader may make its iterator for its state, and draw a number for it
            return notes + set_generators(unpack(own["rng"], "rng"))
        return notes + (_reseeded(about) if about is not None and wanted.has_all() else [])


def as_state(state: Any) -> TrainState | DictState:
    """Return a user's state with the interface of `TrainState`, and wrap a mapping.

    Raises:
        InvalidInputError: The state is neither a mapping nor a `TrainState`.
    """
    if not isinstance(state, Mapping) and not hasattr(state, "to_save"):
        raise InvalidInputError(
            f"the state is a {type(state).__name__}: give a TrainState or a dict, {{'model': model}}"
        )
    found: TrainState | DictState = DictState(state) if isinstance(state, Mapping) else state
    return found


def items_of(part: Any) -> list[Any]:
    """Return the items of a part that may be ``None``, one object or a sequence."""
    return [] if part is None else list(part) if isinstance(part, Sequence) else [part]


def _joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states of several optimizers as one."""
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    for part in parts:
        joined["state"].update(part["state"])
        joined["param_groups"].extend(part["param_groups"])
    return joined


def _not_saved(about: About | None) -> list[str]:
    if about is None or not about.state.get(HAS_GRADIENTS):
        return []
    return [NO_GRADIENTS]


def _reseeded(about: About) -> list[str]:
    """Seed the random generators, whose states at the save are not this rank's. Return a note."""
    seed = reseed(about.run, about.step, _rank())
    ranks = f"{about.world_size} ranks saved it, but {_world_size()} restored it"
    seeded = f"seeded from the run, the step and the rank ({seed} on this one)"
    return [f"{ranks}: random generators cannot be restored, and are {seeded}"]


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _entry_to_load(name: str, value: Any, wanted: Wanted) -> Any:
    """Return the state of a value of the user to load into; of an optimizer, with the state that its parameters lack."""
    if not isinstance(value, torch.optim.Optimizer) or not wanted.has(name):
        return _state_of(value)
    try:
        with complete_state(value, is_whole=wanted.has_all(name)):
            _init_optim_state(value)
    except Exception as error:  # noqa: BLE001 - a step without a closure may raise anything
        _logger.warning("a %s can load only the state that it has already: %s", type(value).__name__, error)
    found = value.state_dict()
    return {**found, "state": wanted.saved_in(f"{name}.state", found["state"])}


def _load_entry(entries: Mapping[str, Any], name: str, value: Any) -> None:
    entry = entries[name]
    if isinstance(entry, torch.optim.Optimizer):
        with ExitStack() as loading:
            for each in (entry, *getattr(entry, "optimizers", ())):  # torchtitan's holds others
                loading.enter_context(as_saved(each))
            entry.load_state_dict(value)
    elif hasattr(entry, "load_state_dict"):
        entry.load_state_dict(value)
    elif isinstance(entries, dict):
        entries[name] = value


def _own() -> str:
    """Return the name of the values that this rank has for itself."""
    return f"{OWN}{_rank()}"


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
