"""Small trainings whose steps are logged and made again: optimizers, ways to compute their update, and features."""

from __future__ import annotations

from typing import Any

import torch

from support.replay_parts import raw
from tierfs.train import TrainState

WIDTH = 12
OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}
WAYS: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
PAIRS = [(name, way) for name in OPTIMIZERS for way in WAYS if (name, way) != ("rmsprop", "fused")]  # torch has none
FEATURES = ("clipping", "accumulation", "scaler", "frozen", "later group", "schedule", "all")
INF_AT = 3
GROUP_AT = 5


class Training:
    """One training. Each object begins the same one anew.

    Args:
        optimizer: A key of `OPTIMIZERS`.
        way: A key of `WAYS`.
        features: Of `FEATURES`.
        groups: Whether the late group is there from the beginning, as after a resume.
        wrap: Wraps the model, for example to shard it.
        rank: Which data it gets.
    """

    def __init__(self, optimizer="adamw", way="foreach", features=(), *, groups=1, wrap=lambda model: model, rank=0):
        self.features = set(FEATURES if "all" in features else features)
        if (optimizer, way) == ("sgd", "fused") and "later group" in self.features:
            self.features.discard("scaler")  # torch 2.13 leaves the momentum of the late group uninitialised with both
        if optimizer == "adagrad" and "later group" in self.features:
            self.features.discard("frozen")  # it makes its state when it is made: a full restore is then not exact
        torch.manual_seed(7)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 24), torch.nn.BatchNorm1d(24), torch.nn.ReLU(), torch.nn.Dropout(0.2)
        )
        self.head = torch.nn.Linear(24, WIDTH)
        if "frozen" in self.features:
            for parameter in self.body.parameters():
                parameter.requires_grad_(False)
        self.model = wrap(torch.nn.Sequential(self.body, self.head))
        kind, numbers = OPTIMIZERS[optimizer]
        last = [parameter for name, parameter in self.model.named_parameters() if name.endswith("1.bias")][-1:]
        self._late = last if "later group" in self.features else []
        first = [each for each in self.model.parameters() if all(each is not late for late in self._late)]
        self.optimizer = kind(first, **numbers, **WAYS[way])
        self.scheduler = None
        if "schedule" in self.features:
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        if groups > 1:
            self._add_group()
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4) if "scaler" in self.features else None
        )
        torch.manual_seed(100 + rank)
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, dataloader=None, scaler=self.scaler
        )

    def _add_group(self):
        if self._late:
            self.optimizer.add_param_group({"params": self._late, "lr": 0.003})
            self._late = []

    def step(self, number: int) -> str:
        """Make a training step. Return its loss, exactly."""
        if number == GROUP_AT:
            self._add_group()
        total = 0.0
        for _ in range(4 if "accumulation" in self.features else 1):
            x = torch.randn(8, WIDTH)
            loss = (self.model(x) - x).square().mean()
            total += float(loss.detach())
            if self.scaler is not None and number == INF_AT:
                loss = loss * float("inf")
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if "clipping" in self.features:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return total.hex()

    def content(self) -> dict[str, Any]:
        """Return everything that decides how training goes on, to be compared bit for bit."""
        found: dict[str, Any] = {"rng": raw(torch.get_rng_state()), **raw(self.model.state_dict())}
        for at, each in enumerate(each for group in self.optimizer.param_groups for each in group["params"]):
            state = self.optimizer.state.get(each, {}) if each.requires_grad else {}
            found[f"state {at}"] = raw(dict(state))
        found["groups"] = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        for name in ("scheduler", "scaler"):
            part = getattr(self, name)
            found[name] = None if part is None else part.state_dict()
        return found
