"""A run of a few steps with every state that can differ after a restart."""

from __future__ import annotations

import random

import numpy as np
import torch

from tierfs.train import TrainState


class Shuffled:
    """A data loader that shuffles and has a position."""

    def __init__(self):
        self.order, self.at = list(range(64)), 0
        random.shuffle(self.order)

    def __next__(self):
        item = self.order[self.at % 64]
        self.at += 1
        return torch.full((4,), float(item)) / 64

    def state_dict(self):
        return {"order": self.order, "at": self.at, "empty": {}}

    def load_state_dict(self, state):
        assert state["empty"] == {}
        self.order, self.at = list(state["order"]), state["at"]


class Training:
    """A small run: dropout, a scheduler, a scaler, shuffling, NumPy, an average of weights."""

    def __init__(self, seed):
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.average = torch.nn.Linear(4, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        self.loader = Shuffled()
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            dataloader=self.loader,
            extra={"average": self.average, "note": {"seen": 0}},
        )

    def step(self):
        noise = torch.from_numpy(np.random.standard_normal(4).astype(np.float32)) * random.random()  # noqa: NPY002
        loss = self.model(next(self.loader) + noise).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        with torch.no_grad():
            self.average.weight.lerp_(self.model[0].weight, 0.1)
        self.state.extra["note"] = {"seen": self.state.extra["note"]["seen"] + 1}
        return loss.item().hex()
