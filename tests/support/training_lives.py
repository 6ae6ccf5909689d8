"""Lives of a training run, each rank in a process group of its own, for tests that end them."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tierfs
from support.torch_ranks import zygote
from support.waiting import HANG_S
from tierfs.train import Every, Manager, Preemption, TrainState

ITEMS, BATCH = 24, 2
WIDTH = 8192  # wide enough for chunks: small files lie in their records
PATIENCE_S = HANG_S


class Lives:
    """Starts lives as forks of one process that has imported torch."""

    def __init__(self) -> None:
        self._started: list[Life] = []

    def start(self, size: int, directory: Path, name: str, url: str, settings: dict[str, Any]) -> Life:
        ranks = [zygote.start(live, rank, size, str(directory), name, url, settings) for rank in range(size)]
        self._started.append(Life(ranks, [directory / f"{name}-{rank}.jsonl" for rank in range(size)]))
        return self._started[-1]

    def straight(self, directory: Path, loader: str, size: int, steps: int) -> list[dict[int, str]]:
        """Return the losses of an uninterrupted run, by rank and step."""
        tierfs.init(f"file://{directory}/store")
        settings = {"manager": {"save": (), "ram": "0", "nvme": "0"}, "loader": loader, "steps": steps}
        life = self.start(size, directory, "straight", f"tierfs::file://{directory}/store/run", settings)
        assert life.codes() == [0] * size, life.errors()
        return life.losses()

    def kill(self) -> None:
        """Kill the lives that have not ended."""
        while self._started:
            self._started.pop().kill()


class Life:
    """A life that runs or has ended."""

    def __init__(self, ranks: list[Any], files: list[Path]) -> None:
        self._ranks = ranks
        self._files = files

    def facts(self) -> list[list[dict[str, Any]]]:
        """Return the facts that each rank has noted."""
        lines = [file.read_text().split("\n")[:-1] if file.exists() else [] for file in self._files]
        return [[json.loads(line) for line in each] for each in lines]

    def losses(self) -> list[dict[int, str]]:
        """Return the losses of each rank by step."""
        return [{fact["step"]: fact["loss"] for fact in facts if "step" in fact} for facts in self.facts()]

    def errors(self) -> str:
        """Return what the ranks wrote to their standard error."""
        return "\n".join(file.with_suffix(".err").read_text() for file in self._files)

    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def wait_for_step(self, step: int) -> None:
        """Wait until each rank has made a step."""
        ends_s = time.monotonic() + PATIENCE_S
        while not all(step in losses for losses in self.losses()):
            assert time.monotonic() < ends_s
            assert all(rank.exitcode is None for rank in self._ranks), [rank.exitcode for rank in self._ranks]
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Signal the process group of each rank, with the workers of its loaders."""
        for pid in self.pids():
            os.killpg(pid, number)

    def kill(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):  # it has no group yet
                os.killpg(rank.pid, signal.SIGKILL)
            rank.kill()
            rank.join()

    def codes(self, count: int | None = None) -> list[int]:
        """Wait for the first ranks, all by default, and return their exit codes."""
        for rank in self._ranks[:count]:
            rank.join(PATIENCE_S)
        found = [rank.exitcode for rank in self._ranks[:count]]
        assert None not in found, f"a rank hangs, and has written where: {found}\n{self.errors()}"
        return found


class Items(Dataset):
    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.slow_s)
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Random:
    """An endless loader that draws its batches from torch's random generator, and has no position of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(lambda: torch.randn(BATCH, 4), None)


def loader_of(kind: str, slow_s: float, rank: int, size: int) -> tuple[Any, Any]:
    """Return a loader of a kind, and its distributed sampler if it has one."""
    if kind == "none":
        return None, None
    from torchdata.stateful_dataloader import StatefulDataLoader

    items = Items(slow_s)
    sampler = DistributedSampler(items, size, rank) if kind in {"distributed", "workers"} else None
    given: dict[str, Any] = {"batch_size": BATCH, "sampler": sampler}
    if sampler is None:
        given |= {"shuffle": True, "generator": torch.Generator().manual_seed(rank)}
    if kind == "workers":
        given |= {"num_workers": 2, "multiprocessing_context": "fork"}
    return StatefulDataLoader(items, **given), sampler


def live(rank: int, size: int, directory: str, life: str, url: str, settings: dict[str, Any]) -> None:
    """Train from the newest checkpoint, and note every fact in ``directory/life-rank.jsonl`` as soon as it is known.

    Args:
        rank: This process's rank.
        size: The number of ranks.
        directory: Where the facts go.
        life: The name of this life.
        url: The root of the run.
        settings: ``manager`` has arguments of `Manager`. ``steps`` is the number of steps of the run, ``loader`` the
            kind of the loader, ``restore`` the step to restore instead of the newest one, ``slow_s`` seconds for each
            item, ``pause_s`` seconds for each step. ``validates`` keeps
            the workers of another loader alive. At the step ``stuck`` the last rank hangs, and with ``stuck_save`` its
            saves do from the second one on. ``reduces=False`` makes the model of each rank its own.
    """
    os.setsid()
    os.dup2(os.open(Path(directory, f"{life}-{rank}.err"), os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.dump_traceback_later(PATIENCE_S * 0.9, file=2)  # it says where a life hangs
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/{life}-world", rank=rank, world_size=size,
            timeout=timedelta(seconds=HANG_S),
        )  # fmt: skip
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Dropout(0.5), torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader, sampler = loader_of(settings["loader"], settings.get("slow_s", 0.0), rank, size)
    state = TrainState(model=model, optimizer=optimizer, scheduler=None, dataloader=loader)
    torch.manual_seed(100 + rank)
    with contextlib.ExitStack() as stack:
        facts = stack.enter_context(Path(directory, f"{life}-{rank}.jsonl").open("w"))

        def note(**fact: Any) -> None:
            facts.write(json.dumps(fact) + "\n")
            facts.flush()

        preemption = Preemption(grace=settings.get("grace", "30s"))
        given = {"save": [Every(steps=4), preemption], "timeout": HANG_S, **settings["manager"]}
        if settings.get("stuck_save") and rank == size - 1:
            naps = iter([0])
            given["planner"] = lambda: time.sleep(next(naps, 600)) or DefaultSavePlanner()
        with Manager(url, **given) as manager:
            restored = manager.restore(state, step=settings.get("restore"))
            if restored is not None:
                note(restored=restored.step, kind=restored.kind, is_exact=restored.is_exact, notes=restored.notes)
            if settings.get("validates"):
                validating = DataLoader(
                    Items(0), num_workers=1, multiprocessing_context="fork", persistent_workers=True
                )
                next(iter(validating))
            note(pid=os.getpid())
            step = restored.step + 1 if restored is not None else 0
            while step < settings["steps"]:
                if sampler is not None:
                    sampler.set_epoch(state.epoch)
                for batch in loader if loader is not None else Random():
                    if step == settings.get("stuck") and rank == size - 1:
                        time.sleep(600)
                    loss = model(batch).square().mean()
                    loss.backward()
                    for each in model.parameters() if size > 1 and settings.get("reduces", True) else ():
                        dist.all_reduce(each.grad)
                    optimizer.step()
                    optimizer.zero_grad()
                    note(step=step, loss=loss.item().hex())
                    saved = manager.step(step, state, metrics={"loss": loss.item()})
                    if saved is not None:
                        note(saved=step, kind=saved.kind)
                    step += 1
                    time.sleep(settings.get("pause_s", 0.0))
                    if manager.stopping or step == settings["steps"]:
                        break
                else:
                    state.epoch += 1
                    continue
                break
            manager.wait(PATIENCE_S)
            note(ended=step, errors=[str(failed) for failed in manager.errors])
