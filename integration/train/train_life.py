"""One rank's life in a killed and signalled training: FSDP2, dropout, schedule, scaler, shuffled data of a worker."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tierfs.train import Every, Manager, Preemption, TrainState

WIDTH = 16
ITEMS = 40
BATCH = 4
OPTIONS: dict[str, Any] = {"ram": "64MiB", "nvme": "0", "timeout": 120.0}


class Items(Dataset):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Batches:
    """An endless sequence of batches from a worker process, each epoch in another order. It can resume at any batch."""

    def __init__(self, seed: int) -> None:
        # A worker that is not a fork would import torch, which takes seconds.
        own = {"num_workers": 1, "multiprocessing_context": "fork", "generator": torch.Generator().manual_seed(seed)}
        self._loader = StatefulDataLoader(Items(), batch_size=BATCH, shuffle=True, **own)
        self._batches: Any = None

    def __next__(self) -> torch.Tensor:
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._batches = None


class Run:
    """The objects that are trained.

    Args:
        rank: This process's rank.
        size: Number of ranks.
        dropout: Whether to use dropout, so that the ranks' random numbers matter.
    """

    def __init__(self, rank: int, size: int, *, dropout: float = 0.2) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 40), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(40, WIDTH)
        )
        if size > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
        self.loader = Batches(rank)
        torch.manual_seed(100 + rank)
        self.state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            dataloader=self.loader,
        )

    def step(self, batch: torch.Tensor | None = None) -> float:
        batch = next(self.loader) if batch is None else batch
        loss = (self.model(batch) - batch).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.item())

    def weights(self) -> str:
        parts = [
            value.to_local() if isinstance(value, DTensor) else value for value in self.model.state_dict().values()
        ]
        return "".join(
            part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex() for part in parts
        )


def begin(rank: int, size: int, directory: str, name: str, environment: dict[str, str]) -> None:
    os.environ.update(
        environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/{name}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )


def live(rank: int, directory: str, url: str, life: str, steps: int, environment: dict[str, str]) -> None:
    """Train from the newest checkpoint to the last step. Note each loss before it can be saved."""
    begin(rank, 2, directory, f"world-{life}", environment)
    run = Run(rank, 2)
    with (
        Path(directory, f"losses-{life}-{rank}").open("w") as losses,
        Manager(url, save=[Every(steps=4), Preemption()], **OPTIONS) as manager,
    ):
        restored = manager.restore(run.state)
        assert restored is None or restored.is_exact
        Path(directory, f"begun-{life}-{rank}").touch()
        for step in range(restored.step + 1 if restored else 0, steps):
            loss = run.step()
            losses.write(f"{step} {loss.hex()}\n")
            losses.flush()
            manager.step(step, run.state, metrics={"loss": loss})
            if manager.stopping:
                losses.write(f"stopped {step}\n")
                break
            time.sleep(0.005)
        else:
            Path(directory, f"weights-{life}-{rank}").write_text(run.weights())
            report = manager.verify_resume(run.state, lambda _: run.step())
            assert report.is_proven, str(report)
            assert report.replayed


def evaluate(rank: int, directory: str, url: str, environment: dict[str, str]) -> None:
    """Make a step, then evaluate for a minute, unless a rank is signalled to end."""
    begin(rank, 2, directory, "world-evaluation", environment)
    run = Run(rank, 2)
    with Manager(url, save=[Preemption(grace="30s")], **OPTIONS) as manager:
        manager.step(7, run.state, metrics={"loss": run.step()})
        Path(directory, f"begun-evaluation-{rank}").touch()
        ends_s = time.monotonic() + 60
        while time.monotonic() < ends_s and not manager.check():
            time.sleep(0.005)


def reshard(
    rank: int, size: int, directory: str, url: str, begin_at: int, end_at: int, environment: dict[str, str]
) -> None:
    """Train some steps on any number of ranks, with the same data in all and nothing random."""
    begin(rank, size, directory, f"world-{begin_at}-{size}", environment)
    run = Run(rank, size, dropout=0.0)
    with (
        Path(directory, f"reshard-{begin_at}-{size}-{rank}").open("w") as told,
        Manager(url, save=(), **OPTIONS) as manager,
    ):
        restored = manager.restore(run.state)
        told.write("".join(f"note {note}\n" for note in (restored.notes if restored else ())))
        assert (restored.step + 1 if restored else 0) == begin_at
        for step in range(begin_at, end_at):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(8, WIDTH, generator=generator)
            share = 8 // size
            loss = torch.tensor(run.step(batch[rank * share : (rank + 1) * share]))
            if size > 1:
                dist.all_reduce(loss)
            told.write(f"{step} {loss.item() / size!r}\n")
        manager.save(end_at - 1, run.state).wait("object", timeout=60)
