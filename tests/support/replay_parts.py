"""Small trainings, each with one part of a state that no gradient explains, or that the log cannot have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tierfs.train import TrainState

WIDTH = 8
CHANGED_AT = 5
"""The step at which a part changes that changes once."""


def raw(value: Any) -> Any:
    """Return a nested value that compares bit for bit."""
    if isinstance(value, torch.Tensor):
        own = value.detach().to_local() if hasattr(value, "to_local") else value.detach()
        return str(own.dtype), tuple(own.shape), own.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: raw(inner) for key, inner in value.items()}
    return [raw(inner) for inner in value] if isinstance(value, (list, tuple)) else value


class Small:
    """A training of a linear layer. Each object begins the same one anew.

    Attributes:
        ends: Words of the warning with which the log ends; empty if it has all steps.
        last: The last step up to which a restore comes, after the steps 0 to 8 were made.
        is_proven: Whether `Manager.verify_resume` can prove it.
        note: Words of the only note of the restore; empty if it is exact.
    """

    ends: ClassVar[str] = ""
    last: ClassVar[int] = 8
    is_proven: ClassVar[bool] = True
    note: ClassVar[str] = ""

    def __init__(
        self, *, as_dict: bool = False, wrap: Callable[[nn.Module], nn.Module] = lambda net: net, rank: int = 0
    ) -> None:
        torch.manual_seed(1)
        self.rank = rank
        self.extra: dict[str, Any] = {}
        self.loader: Any = None
        self.inner = self.make()
        self.net = wrap(self.inner)
        self.optimizers = self.make_optimizers()
        self.prepare()
        torch.manual_seed(2)
        self.as_dict = as_dict
        if as_dict:
            named = {f"optimizer_{at}": each for at, each in enumerate(self.optimizers)}
            loader = {} if self.loader is None else {"loader": self.loader}
            self.state: Any = {"net": self.net, **named, **loader, **self.extra}
            self.extra = self.state
        else:
            self.state = TrainState(
                model=self.net,
                optimizer=self.optimizers,
                scheduler=None,
                dataloader=self.loader,
                extra=self.extra,
            )
            self.extra = self.state.extra

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def make_optimizers(self) -> list[Any]:
        return [torch.optim.AdamW([each for each in self.net.parameters() if each.requires_grad], lr=0.01)]

    def prepare(self) -> None:
        pass

    def batch(self, step: int) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step + 1000 * self.rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, step: int) -> torch.Tensor:
        x = self.batch(step)
        return (self.forward(x) - x).square().mean()

    def update(self, step: int) -> None:
        for each in self.optimizers:
            each.step()
            each.zero_grad()

    def after(self, step: int) -> None:
        """Change the part."""

    def resume(self) -> None:
        """Make the state what a program makes it that goes on after the change."""

    def step(self, step: int) -> float:
        loss = self.loss(step)
        found = float(loss.detach())
        loss.backward()
        self.update(step)
        with torch.no_grad():
            self.after(step)
        return found

    def content(self) -> dict[str, Any]:
        found = {"net": raw(self.net.state_dict()), "random": raw(torch.get_rng_state())}
        found["buffers"] = raw(dict(self.net.named_buffers()))
        for at, each in enumerate(self.optimizers):
            found[f"optimizer {at}"] = raw(each.state_dict())
        for name, each in self.extra.items():
            if name != "loader" and not hasattr(each, "param_groups"):
                found[name] = raw(each.state_dict() if hasattr(each, "state_dict") else each)
        return found


class Pair(nn.ModuleDict):
    """A student and its teacher."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["q"](x) - self["k"](x).detach()


class Teacher(Small):
    """Parameters that no optimizer has: an average of others, changed in place at each step."""

    def make(self):
        net = Pair({"q": nn.Linear(WIDTH, WIDTH)})
        net["k"] = copy.deepcopy(net["q"]).requires_grad_(False)
        return net

    def after(self, step):
        for mine, other in zip(self.inner["k"].parameters(), self.inner["q"].parameters(), strict=True):
            self.average(mine, other)

    def average(self, mine, other):
        mine.mul_(0.9).add_(other, alpha=0.1)


class TeacherByData(Teacher):
    """The same through ``data``, which no version counts."""

    def average(self, mine, other):
        mine.data.mul_(0.9).add_(other.data, alpha=0.1)


class ReplacedTeacher(Teacher):
    """The same with new storage at each step."""

    def average(self, mine, other):
        mine.data = mine.data * 0.9 + other.data * 0.1


class OneElement(Teacher):
    """One element of a parameter changes through ``data`` at each step."""

    def average(self, mine, other):
        mine.data.view(-1)[-1] += 0.01


class LargeTeacher(Teacher):
    """A large parameter without an optimizer, which a sample looks at, changes now and then."""

    def make(self):
        net = super().make()
        net["base"] = nn.Linear(1024, 4500, bias=False).requires_grad_(False)
        return net

    def forward(self, x):
        return super().forward(x) * self.net["base"].weight[0, 0].detach()

    def after(self, step):
        super().after(step)
        if step == CHANGED_AT:
            self.net["base"].weight.data.mul_(1.5)


class Merged(Small):
    """A frozen base, into which an adapter is merged once (LoRA). The adapter goes on as it is."""

    def make(self):
        net = nn.ModuleDict({"base": nn.Linear(WIDTH, WIDTH), "down": nn.Linear(WIDTH, 2), "up": nn.Linear(2, WIDTH)})
        net["base"].requires_grad_(False)
        return net

    def forward(self, x):
        return self.net["base"](x) + self.net["up"](self.net["down"](x))

    def after(self, step):
        if step == CHANGED_AT:
            self.net["base"].weight.data += self.net["up"].weight @ self.net["down"].weight


class MergedAndReset(Merged):
    """The adapter begins anew after it was merged (ReLoRA): its weights and moments change outside of the optimizer."""

    ends = f"no step after {CHANGED_AT - 1} is logged"

    def after(self, step):
        super().after(step)
        if step == CHANGED_AT:
            self.net["up"].weight.zero_()
            self.optimizers[0].state.clear()


class ResetMoments(Small):
    """The moments begin anew, and the weights stay."""

    ends = "the optimizer's state were changed outside"

    def after(self, step):
        if step == CHANGED_AT:
            for each in self.optimizers[0].state.values():
                each["exp_avg"].zero_()


class Resized(Teacher):
    """A parameter without an optimizer gets another dtype."""

    ends = "the model has other tensors than before"

    def after(self, step):
        super().after(step)
        if step == CHANGED_AT:
            self.widen()

    def widen(self):
        self.net["k"].to(torch.float64)

    resume = widen

    def forward(self, x):
        wide = self.net["k"].weight.dtype
        return self.net["q"](x) - self.net["k"](x.to(wide)).detach().to(x.dtype)

    def average(self, mine, other):
        mine.mul_(0.9).add_(other.to(mine.dtype), alpha=0.1)


class TeacherBefore(Teacher):
    """The teacher changes before a step. FSDP 2 leaves it whole after the step: it has no backward pass."""

    def loss(self, step):
        self.inner["k"].reshard()
        with torch.no_grad():
            super().after(step)
        return super().loss(step)

    def after(self, step):
        pass


class FrozenLater(Small):
    note = "other parameters of the optimizers needed a gradient after the step than do now"

    def loss(self, step):
        self.net[0].requires_grad_(step < CHANGED_AT)
        return super().loss(step)


class Half(Teacher):
    """Weights and moments in bfloat16, the teacher's in float8."""

    def make(self):
        net = super().make().to(torch.bfloat16)
        net["k"].weight.data = net["k"].weight.data.to(torch.float8_e4m3fn)
        return net

    def batch(self, step):
        return super().batch(step).to(torch.bfloat16)

    def forward(self, x):
        return self.net["q"](x) - x @ self.net["k"].weight.to(x.dtype).T.detach()

    def average(self, mine, other):
        mine.data = (mine.to(torch.float32) * 0.9 + other.to(torch.float32) * 0.1).to(mine.dtype)


class Parametrised(Small):
    def make(self):
        net = super().make()
        return nn.Sequential(weight_norm(net[0]), spectral_norm(net[1]))


class Buffers(Small):
    """Buffers that a save has, of some dtypes, and one that it has not."""

    def make(self):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        net.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        net.register_buffer("code", torch.zeros(3, dtype=torch.float16))
        net.register_buffer("cache", torch.zeros(3), persistent=False)
        return net

    def after(self, step):
        self.net.seen.data += 1
        self.net.code.data[1] += step
        self.net.cache.fill_(step)


class Scaled(nn.Linear):
    """A layer with extra state: numbers, and a tensor as FP8 scaling has it."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.seen, self.scale = 0, torch.ones(2)

    def forward(self, x):
        self.seen += 1
        self.scale = self.scale * 1.01
        return super().forward(x) * self.scale[0] * (1 + self.seen / 1000)

    def get_extra_state(self):
        return {"seen": self.seen, "history": [self.scale, self.scale * 2], "nothing": None}

    def set_extra_state(self, state):
        self.seen, self.scale = state["seen"], state["history"][0]


class ExtraState(Small):
    def make(self):
        return nn.Sequential(Scaled(), nn.Linear(WIDTH, WIDTH), Scaled())


class Ignoring(Small):
    """A module that does not take its extra state."""

    note = "'extra state' is not as it was logged, although it was set"
    is_proven = False

    def make(self):
        class Deaf(Scaled):
            def get_extra_state(self):
                return max(self.seen, 1)  # so that the first save is restored exactly

            def set_extra_state(self, state):
                pass

        return nn.Sequential(Deaf())


class Hooked(Small):
    """A hook adds a tensor to the state that the module does not have."""

    ends = "rate has changed, which is neither a parameter, a buffer nor extra state"

    def make(self):
        net = super().make()
        net.rate = torch.ones(())

        def add(module, state, prefix, _):
            state[f"{prefix}rate"] = module.rate

        def take(module, state, prefix, *_):
            module.rate = state.pop(f"{prefix}rate")

        net._register_state_dict_hook(add)
        net.register_load_state_dict_pre_hook(take)
        return net

    def forward(self, x):
        return super().forward(x) * self.net.rate

    def after(self, step):
        if step == CHANGED_AT:
            self.net.rate = self.net.rate * 1.5


class Options(Small):
    """Options of groups that the program changes, each at a step of its own."""

    def make_optimizers(self):
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[1].parameters(), "weight_decay": 0.1}]
        return [torch.optim.AdamW(groups, lr=0.01)]

    def after(self, step):
        first, second = self.optimizers[0].param_groups
        first["lr"] *= 0.9
        second["betas"] = (0.8, 0.9 + step / 1000)


class Accumulated(Small):
    """Three batches a step of the optimizer. The log ends where one was made."""

    last = 6
    phase = 0

    def update(self, step):
        if step % 3 == self.phase:
            super().update(step)


class AccumulatedFirst(Accumulated):
    """The first save is in the middle of an accumulation, which a proof cannot begin again."""

    last = 7
    phase = 1
    is_proven = False


class ZeroedLate(Accumulated):
    """Gradients stay after the optimizer's step, and become zeros before the next batch."""

    def update(self, step):
        if step % 3 == self.phase:
            self.optimizers[0].step()

    def loss(self, step):
        if step % 3 == (self.phase + 1) % 3:
            self.optimizers[0].zero_grad(set_to_none=False)
        return super().loss(step)


class AccumulatedInOne(Accumulated):
    """Between the optimizer's steps only the last layer gets gradients. Those of the first one stay, and are used."""

    def update(self, step):
        if step % 3 == self.phase:
            self.optimizers[0].step()
            self.net[1].zero_grad()

    def loss(self, step):
        self.net[0].requires_grad_(step % 3 == self.phase)
        if step % 3 == self.phase:
            self.net[0].zero_grad()
        return super().loss(step)


class LeftUnused(Small):
    """Two optimizers, as in a GAN. The loss of the second one leaves gradients in the parameters of the first one."""

    def make_optimizers(self):
        return [torch.optim.SGD(each.parameters(), lr=0.01) for each in self.net]

    def update(self, step):
        first, second = self.optimizers
        first.step()
        second.zero_grad()
        self.loss(step).backward()
        second.step()

    def step(self, step):
        self.optimizers[0].zero_grad()
        return super().step(step)


class Unreduced(Accumulated):
    """Only the last batch of an accumulation reduces gradients. Until then, FSDP 2 keeps them itself."""

    def loss(self, step):
        is_last = step % 3 == self.phase
        if hasattr(self.net, "set_requires_gradient_sync"):
            self.net.set_requires_gradient_sync(is_last)
        self.net.require_backward_grad_sync = is_last  # DDP's
        return super().loss(step)


class Loaded(Small):
    def prepare(self):
        torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
        data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(5))
        self.loader = torchdata.StatefulDataLoader(data, batch_size=4, num_workers=0)
        self.batches = None

    def batch(self, step):
        if self.batches is None:
            self.batches = iter(self.loader)
        return next(self.batches)


class Beside(Small):
    """Values beside the model: tensors changed in place and replaced, a number and a nested list."""

    def prepare(self):
        self.extra |= {"mean": torch.zeros(WIDTH), "newest": torch.zeros(1), "seen": 0, "all": [torch.zeros(1), "a"]}

    def after(self, step):
        self.extra["mean"].data += self.net[0].bias
        self.extra["newest"] = torch.full((1,), float(step))
        self.extra["seen"] += 3
        self.extra["all"] = [torch.full((1,), float(step)), "b" * step]


class Grown(Small):
    """Tensors beside the model that get longer."""

    is_proven = False  # a full save loads no tensor of another shape

    def prepare(self):
        self.extra |= {"queue": torch.zeros(1), "all": [torch.zeros(1)]}

    def after(self, step):
        if step:
            self.extra["queue"] = torch.cat([self.extra["queue"], torch.full((1,), float(step))])
            self.extra["all"] = [*self.extra["all"][-2:], torch.full((2,), float(step))]


class Compiled(Small):
    """``optimizer.step`` inside torch.compile, which calls no hook."""

    ends = "or inside torch.compile, which hides its calls"
    last = 2  # the log ends at three steps, and each time with a full save

    def prepare(self):
        torch.compiler.reset()  # compiled again too often, a function is called as it is

    def update(self, step):
        if not hasattr(self, "compiled"):
            self.compiled = torch.compile(self.optimizers[0].step, backend="eager")
        self.compiled()
        self.optimizers[0].zero_grad()


class CompiledAll(Compiled):
    """A whole training step inside torch.compile."""

    def update(self, step):
        if not hasattr(self, "compiled"):

            def made():
                self.optimizers[0].step()
                self.optimizers[0].zero_grad()

            self.compiled = torch.compile(made, backend="eager")
        self.compiled()


CASES = [
    Small, Teacher, TeacherByData, ReplacedTeacher, OneElement, LargeTeacher, Merged, MergedAndReset, ResetMoments,
    Resized, FrozenLater, Half, Parametrised, Buffers, ExtraState, Ignoring, Hooked, Options,
    Accumulated, AccumulatedFirst, ZeroedLate, AccumulatedInOne, Loaded, Beside, Grown, Compiled, CompiledAll,
]  # fmt: skip
