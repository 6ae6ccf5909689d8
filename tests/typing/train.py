"""Typed uses of the training manager: mypy checks this file, and nothing runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierfs.train import (
    Best,
    Context,
    Deadline,
    Every,
    Latest,
    Manager,
    Preemption,
    Restored,
    SaveHandle,
    TrainState,
    YoungDaly,
)


class AtNight:
    """A user's save policy."""

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """Save if the last save was more than an hour ago."""
        return context.since_s > 3600 and step not in previous


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Train, and save as the policies ask."""
    state = TrainState(model=model, optimizer=optimizer, scheduler=None, dataloader=None)
    with Manager(
        "tierfs::s3://bucket/run",
        save=[Every(steps=500), AtNight(), Preemption(), Deadline(), YoungDaly(mtbf="8h")],
        keep={"object": [Latest(3), Best(2, "loss")], "nvme": [Latest(1)]},
        ack="staged",
    ) as manager:
        restored: Restored | None = manager.restore(state)
        for step in range(restored.step + 1 if restored else 0, 1000):
            saved: SaveHandle | None = manager.step(step, state, metrics={"loss": 1.0})
            if saved is not None:
                saved.wait("local", timeout=60)
            if manager.stopping:
                break
        best: int | None = manager.best("loss")
        return best if best is not None else -1
