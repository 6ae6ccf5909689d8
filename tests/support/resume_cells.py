"""Contents of a training state, each in a small training, for a table of what comes back from a checkpoint.

A content builds its parts from a seed, makes steps, and tells everything that later steps depend on. `told` looks at the
live objects themselves, so that it sees what tierfs does not save, too.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from tierfs.errors import TierfsError
from tierfs.train import Manager, Replay, TrainState

STEPS = 3
OPTIONS: dict[str, Any] = {"ram": "0", "nvme": "0", "save": ()}


def as_is(model: nn.Module) -> nn.Module:
    return model


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "plain": as_is,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled step": as_is,
    "DDP": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "FSDP2": fully_shard,
}
"""How training runs: what becomes of the model before the optimizer is made."""


class Loader:
    """A data loader with a position, in an order of its own generator."""

    def __init__(self) -> None:
        self.generator, self.at = torch.Generator().manual_seed(3), 0

    def next(self) -> torch.Tensor:
        self.at += 1
        return torch.randn(5, 4, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


class Plain:
    """A model of two layers with AdamW. Other contents change parts of it."""

    def __init__(self, seed: int, how: str = "plain") -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.model: Any = self.make_model()
        self.shown: Any = WRAPPED[how](self.model)  # what the state has as the model
        self.optimizer: Any = self.make_optimizer()
        self.make_step = self.optimizer.step
        if how == "compiled step":
            self.make_step = torch.compile(self.optimizer.step, backend="eager")
        self.scheduler: Any = None
        self.loader: Any = None
        self.scaler: Any = None
        self.extra: dict[str, Any] = {}
        self.held: dict[str, Any] = self.extra

    def make_model(self) -> Any:
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def batch(self, step: int) -> torch.Tensor:
        return torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(next(self.model.parameters()).dtype)

    def backward(self, step: int) -> None:
        x = self.batch(step)
        (self.shown(x) - x).float().square().mean().backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.make_step()
        self.optimizer.zero_grad()
        self.after(step)

    def after(self, step: int) -> None:
        """Change what the optimizer does not change."""

    def state(self, kind: str) -> Any:
        if kind == "dict":
            parts = {"model": self.shown, "optimizer": self.optimizer, "scheduler": self.scheduler}
            parts |= {"loader": self.loader, "scaler": self.scaler, **self.extra}
            self.held = {name: part for name, part in parts.items() if part is not None}
            return self.held
        found = TrainState(
            model=self.shown,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            dataloader=self.loader,
            scaler=self.scaler,
            extra=self.extra,
        )
        self.held = found.extra
        return found

    def told(self) -> dict[str, Any]:
        """Return everything that later steps depend on, by name."""
        found: dict[str, Any] = {}
        for name, each in self.model.named_parameters(remove_duplicate=False):
            found |= {name: local(each), f"{name} is trained": each.requires_grad, f"{name}.grad": local(each.grad)}
        found |= {f"buffer {name}": local(each) for name, each in self.model.named_buffers()}
        for path, module in self.model.named_modules():
            if hasattr(type(module), "seen"):
                found[f"{path} seen"] = module.seen
        for number, group in enumerate(self.optimizer.param_groups):
            for at, parameter in enumerate(group["params"]):
                state = self.optimizer.state.get(parameter, {})
                found |= {f"moment {number}.{at}.{name}": local(each) for name, each in state.items()}
            found |= {f"option {number}.{name}": local(each) for name, each in group.items() if "param" not in name}
        for name, part in {"scheduler": self.scheduler, "loader": self.loader, "scaler": self.scaler}.items():
            if part is not None:
                found |= {f"{name} {key}": each for key, each in part.state_dict().items()}
        for name in self.extra:
            part = self.held[name]  # a restore replaces plain values there
            state = part.state_dict() if hasattr(part, "state_dict") else {"": part}
            found |= {f"{name} {key}": local(each) for key, each in state.items()}
        return found

    def generators(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state()[1].tolist(), "python": random.getstate()}  # noqa: NPY002


def local(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        own = value.to_local() if hasattr(value, "to_local") else value
        return own.detach().clone()
    return value


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return the names of values that are not the same, in dtype and bits."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
        return type(one) is type(other) and one == other

    return [name for name in {**first, **second} if not same(first.get(name), second.get(name))]


class Groups(Plain):
    def make_optimizer(self) -> Any:
        groups = [{"params": self.model[0].parameters(), "lr": 0.1}, {"params": self.model[1].parameters()}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.2)


class Options(Plain):
    """The options of groups change while training runs."""

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False)

    def after(self, step: int) -> None:
        group = self.optimizer.param_groups[0]
        group["lr"].mul_(0.5)
        group["betas"], group["weight_decay"] = (0.8, 0.99), 0.1 * step


class NewOption(Plain):
    """A group gets an option that a new optimizer does not have."""

    def after(self, step: int) -> None:
        self.optimizer.param_groups[0]["warm"] = step


class InNoGroup(Plain):
    """The user's own code changes parameters that no optimizer has, as a momentum teacher's."""

    def make_model(self) -> Any:
        model = super().make_model()
        model[1].requires_grad_(False)
        return model

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model[0].parameters(), lr=0.01)

    def after(self, step: int) -> None:
        self.model[1].weight.mul_(0.9)


class LeftGradients(Plain):
    """Gradients of parameters that no optimizer has: nothing sets them to zero."""

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model[0].parameters(), lr=0.01)


class Tied(Plain):
    def make_model(self) -> Any:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model


class Frozen(Plain):
    """A parameter is frozen while training runs."""

    def after(self, step: int) -> None:
        if step == 2:
            self.model[0].weight.requires_grad_(False)


class Lazy(Plain):
    """A layer gets its shape from the first batch."""

    def make_model(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 4))
        model(torch.ones(1, 4))
        return model


class LazyStill(Lazy):
    """The same, restored before the first batch."""

    def make_model(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 4))

    def make_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def batch(self, step: int) -> torch.Tensor:
        return torch.randn(5, 4, generator=torch.Generator().manual_seed(step))


class QuantizedBuffer(Plain):
    """A buffer has a quantised dtype."""

    def make_model(self) -> Any:
        model = super().make_model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.register_buffer("table", torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8))
        return model


class Parametrised(Plain):
    def make_model(self) -> Any:
        model = super().make_model()
        parametrizations.weight_norm(model[0])
        parametrizations.spectral_norm(model[1])
        return model


class Statistics(Plain):
    """Batch norm changes its buffers in each forward."""

    def make_model(self) -> Any:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


class NotPersistent(Plain):
    def make_model(self) -> Any:
        model = super().make_model()
        model.register_buffer("count", torch.zeros(2), persistent=False)
        return model

    def after(self, step: int) -> None:
        self.model.count.add_(1)


class Counted(nn.Module):
    def __init__(self, *, as_tensor: bool = False) -> None:
        super().__init__()
        self.inner, self.as_tensor = nn.Linear(4, 4), as_tensor
        self.counted: Any = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counted += 1
        return self.inner(x) * (1 + self.counted / 1000)  # type: ignore[no-any-return]

    @property
    def seen(self) -> int:
        return self.counted

    def get_extra_state(self) -> Any:
        return torch.tensor(self.counted) if self.as_tensor else {"counted": self.counted, "names": ("a", "b")}

    def set_extra_state(self, state: Any) -> None:
        self.counted = int(state) if self.as_tensor else state["counted"]


class ExtraState(Plain):
    def make_model(self) -> Any:
        return Counted()


class ExtraTensor(Plain):
    def make_model(self) -> Any:
        return Counted(as_tensor=True)


class CastMoments(torch.optim.Optimizer):
    """An optimizer whose moments have a dtype of their own, one of them in a list."""

    def __init__(self, parameters: Any, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.01, "dtype": str(dtype)})
        self.kept = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state = self.state[each]
            moment = state.setdefault("m", torch.zeros_like(each, dtype=self.kept))
            moment.mul_(0.9).add_(each.grad.to(self.kept), alpha=0.1)
            each.sub_(moment.to(each.dtype), alpha=0.1)


class WideMoments(Plain):
    def make_model(self) -> Any:
        return super().make_model().to(torch.bfloat16)

    def make_optimizer(self) -> Any:
        return CastMoments(self.model.parameters(), torch.float32)


class NarrowMoments(Plain):
    def make_optimizer(self) -> Any:
        return CastMoments(self.model.parameters(), torch.bfloat16)


class FactoredMoments(Plain):
    """Moments of another shape than their parameter."""

    def make_optimizer(self) -> Any:
        return torch.optim.Adafactor(self.model.parameters(), lr=0.01)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other, self.is_whole = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.used(x)
        return used + self.other(x) if self.is_whole else used  # type: ignore[no-any-return]


class PartOfMoments(Plain):
    """A parameter that no step has used yet has no moments."""

    def make_model(self) -> Any:
        return Halves()

    def batch(self, step: int) -> torch.Tensor:
        self.model.is_whole = step > STEPS
        return super().batch(step)


class InFlight(Plain):
    """Gradients that no step of the optimizer has used."""

    def after(self, step: int) -> None:
        if step == STEPS:
            self.backward(77)


class Scaled(Plain):
    def __init__(self, seed: int, how: str = "plain") -> None:
        super().__init__(seed, how)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(self, step: int) -> None:
        x = self.batch(step)
        self.scaler.scale((self.shown(x) - x).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Scheduled(Plain):
    def __init__(self, seed: int, how: str = "plain") -> None:
        super().__init__(seed, how)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)

    def after(self, step: int) -> None:
        self.scheduler.step()


class Generators(Plain):
    """Training draws from the generators of torch, NumPy and Python."""

    def make_model(self) -> Any:
        return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4))

    def batch(self, step: int) -> torch.Tensor:
        return super().batch(step) + random.random() + float(np.random.rand())  # noqa: NPY002


class Loaded(Plain):
    def __init__(self, seed: int, how: str = "plain") -> None:
        super().__init__(seed, how)
        self.loader = Loader()

    def batch(self, step: int) -> torch.Tensor:
        return self.loader.next()


class Averaged(Plain):
    """An average of the weights beside the model."""

    def __init__(self, seed: int, how: str = "plain") -> None:
        super().__init__(seed, how)
        self.extra["average"] = AveragedModel(self.model, multi_avg_fn=None)

    def after(self, step: int) -> None:
        self.extra["average"].update_parameters(self.model)


class Beside(Plain):
    """Values of the user's own: a number, a tensor, a list, an object with ``state_dict``."""

    def __init__(self, seed: int, how: str = "plain") -> None:
        super().__init__(seed, how)
        self.extra = {"seen": 0, "sums": torch.zeros(3), "recent": [0.5], "counter": Loader()}
        self.extra["names"] = {"a"}

    def after(self, step: int) -> None:
        self.extra["seen"] += step
        self.extra["sums"].add_(step)
        self.extra["recent"] = [*self.extra["recent"], step / 3]
        self.extra["counter"].next()
        self.extra["names"] = {*self.extra["names"], f"{step}"}


class KindBeside(Plain):
    """A value of a type that tierfs cannot compare."""

    def __init__(self, seed: int, how: str = "plain") -> None:
        super().__init__(seed, how)
        self.extra = {"kind": torch.float64}

    def after(self, step: int) -> None:
        self.extra["kind"] = torch.float32


CONTENTS: dict[str, type[Plain]] = {
    "parameters of one group": Plain,
    "parameters of several groups": Groups,
    "parameters in no optimizer": InNoGroup,
    "tied parameters": Tied,
    "parameters frozen while training runs": Frozen,
    "lazy parameters, made": Lazy,
    "lazy parameters, not made": LazyStill,
    "quantised tensors": QuantizedBuffer,
    "parametrised weights": Parametrised,
    "persistent buffers": Statistics,
    "buffers that are not persistent": NotPersistent,
    "extra state of a module": ExtraState,
    "extra state that is a tensor": ExtraTensor,
    "moments wider than their parameter": WideMoments,
    "moments narrower than their parameter": NarrowMoments,
    "moments of another shape": FactoredMoments,
    "parameters without moments": PartOfMoments,
    "options of groups": Options,
    "options that a new optimizer lacks": NewOption,
    "gradients in flight": InFlight,
    "gradients of parameters in no optimizer": LeftGradients,
    "gradient scaler": Scaled,
    "scheduler": Scheduled,
    "generators of torch, NumPy and Python": Generators,
    "data loader and its generator": Loaded,
    "averaged model": Averaged,
    "values beside the model": Beside,
    "values that cannot be compared": KindBeside,
}


def cell(content: str, root: str, *, kind: str = "state", how: str = "full", runs: str = "plain") -> tuple[str, Any]:
    """Save a state, and restore it. Return whether it came back: equal, noted, refused or silent; and details."""
    make = CONTENTS[content]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            first = make(0, runs)
            for step in range(1, STEPS + 1):
                first.step(step)
        except Exception as error:
            return "not run", repr(error)
        with Manager(root, **OPTIONS) as run:
            try:
                run.save(STEPS, first.state(kind), kind="light" if how == "light" else "full").wait()
            except TierfsError as error:
                return "refused", repr(error)
            before = {**first.told(), **first.generators()}
            if how == "rollback":
                for step in range(STEPS + 1, STEPS + 3):
                    first.step(step)
                run.save(STEPS + 2, first.state(kind)).wait()
                return compared(first, before, lambda: run.restore(first.state(kind), step=STEPS))
        second = make(1, runs)
        with Manager(root, **OPTIONS) as run:
            more = {"kind": "any"} if how == "light" else {"only": ["model.*"]} if how == "only=" else {}
            return compared(second, before, lambda: run.restore(second.state(kind), **more))


def replayed(content: str, root: str, kind: str) -> tuple[str, Any]:
    """Log steps, and restore the newest one. ``ended``: the log ended aloud, and an earlier step came back exactly."""
    make = CONTENTS[content]
    options = {"save": [Replay(ring="4MiB", prove_every=2, elementwise=[CastMoments])], "ram": "64MiB", "nvme": "0"}
    before = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = make(0)
        try:
            with Manager(root, **options) as run:
                for step in range(1, STEPS + 4):
                    first.step(step)
                    run.step(step, first.state(kind))
                    before[step] = {**first.told(), **first.generators()}
                    run.wait()
                if run.errors:
                    return "refused", run.errors
        except (TierfsError, ValueError, RuntimeError) as error:
            return "refused", repr(error)
        second = make(1)
        with Manager(root, **options) as run:
            try:
                restored = run.restore(second.state(kind))
            except (TierfsError, ValueError, RuntimeError) as error:
                return "refused", repr(error)
        if restored is None:
            return "refused", run.errors
        differ = differences(before[restored.step], {**second.told(), **second.generators()})
    details = restored.step, restored.notes, restored.stopped, differ
    if restored.notes:
        return "noted", details
    return ("silent" if differ else "equal" if restored.step == STEPS + 3 else "ended"), details


def compared(made: Plain, before: dict[str, Any], restore: Callable[[], Any]) -> tuple[str, Any]:
    try:
        restored = restore()
    except (TierfsError, ValueError, RuntimeError) as error:
        return "refused", repr(error)
    differ = differences(before, {**made.told(), **made.generators()})
    if restored.notes:
        return "noted", restored.notes
    return ("silent" if differ else "equal"), differ
