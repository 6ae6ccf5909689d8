"""Two ranks that log their steps, are killed, and make the steps again."""

from __future__ import annotations

import os
import pickle
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from support.replay_cases import FEATURES, Training
from support.replay_parts import ExtraState, Small, Teacher, TeacherBefore, Unreduced
from support.waiting import HANG_S
from tierfs.checkpoint.notes import logged_steps
from tierfs.checkpoint.step_logs import open_log
from tierfs.session import open_store, parse_url
from tierfs.store import stat
from tierfs.train import Manager, Replay

WORLD = 2
OPTIONS: dict[str, Any] = {"ram": "192MiB", "nvme": "0", "timeout": HANG_S}
CASES = [
    ("adamw", "foreach", "all"),
    ("adam", "fused", "scaler"),
    ("sgd", "loop", "clipping"),
    ("rmsprop", "foreach", "frozen"),
]
STEPS, KILLED = 10, 7


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    return model


def replicated(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model whose one shard each rank has (HSDP)."""
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicas", "shards")))
    return model


WRAPS = {"ddp": DistributedDataParallel, "fsdp": sharded, "hsdp": replicated}


def training(wrap: str, case: int, rank: int) -> Training:
    optimizer, way, feature = CASES[case]
    # Ranks agree on a save some steps after a late group comes.
    features = [each for each in FEATURES if each not in {"all", "later group"}] if feature == "all" else [feature]
    return Training(optimizer, way, features, wrap=WRAPS[wrap], rank=rank)


def begin(rank: int, directory: Path, name: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/{name}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=HANG_S)
    )


class Killed:
    """A policy that kills the process when it is asked after the last step, whose file is there then."""

    is_uniform = True

    def should_save(self, step: int, previous: Any, *, context: Any) -> bool:
        if step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def first_life(rank: int, directory: Path, url: str, wrap: str, case: int) -> None:
    """Train without a manager, to know what has to come out. Then train with one, until killed in a step.

    Rank 0 has the file of that step, rank 1 has not.
    """
    begin(rank, directory, "first")
    plain = training(wrap, case, rank)
    losses = [plain.step(step) for step in range(STEPS)]
    (directory / f"straight-{rank}").write_bytes(pickle.dumps((losses, plain.content())))
    logged = training(wrap, case, rank)
    run = Manager(url, save=[Killed(), Replay(ring="16MiB", prove_every=3)], **OPTIONS)
    for step in range(KILLED + 1):
        assert logged.step(step) == losses[step]
        if step == KILLED and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(step, logged.state, metrics={"loss": float.fromhex(losses[step])})
        run.wait()


def second_life(rank: int, directory: Path, url: str, wrap: str, case: int) -> None:
    begin(rank, directory, "second")
    losses, content = pickle.loads((directory / f"straight-{rank}").read_bytes())
    store, directory_of_run = open_store(parse_url(url))
    log = open_log(store, directory_of_run)
    files = [one for one in logged_steps(directory_of_run, log) if one.step == KILLED - 1]
    lengths = {one.rank: stat(log, one.path(directory_of_run)).length for one in files}
    if wrap != "fsdp":  # one rank logs the gradients of both
        assert lengths[1] < lengths[0] - 1000
    resumed = training(wrap, case, rank)
    with Manager(url, save=[Replay(ring="16MiB", prove_every=3)], **OPTIONS) as run:
        restored = run.restore(resumed.state)
        assert restored is not None
        assert restored.notes == ()
        assert (restored.step, restored.stopped) == (KILLED - 1, "")
        for step in range(KILLED, STEPS):
            assert resumed.step(step) == losses[step]
            run.step(step, resumed.state)
            run.wait()
    found = resumed.content()
    assert {name for name in content if found[name] != content[name]} == set()


PARTS_MADE, PARTS_STEPS = 8, 11
PARTS: list[tuple[str, type[Small]]] = [
    ("ddp", Teacher),
    ("ddp", Unreduced),
    ("children", TeacherBefore),
    ("fsdp", Unreduced),
    ("fsdp", ExtraState),
]


def sharded_children(model: torch.nn.Module) -> torch.nn.Module:
    for each in model.children():
        sharded(each)
    return model


def part(case: int, rank: int) -> Small:
    wrap, kind = PARTS[case]
    return kind(wrap={**WRAPS, "children": sharded_children}[wrap], rank=rank)


def first_life_of_part(rank: int, directory: Path, url: str, case: int) -> None:
    """Do as `first_life` does, with a case of `PARTS`. Both ranks are killed after the same step."""
    begin(rank, directory, "first")
    plain = part(case, rank)
    losses, contents = [], []
    for step in range(PARTS_STEPS):
        losses.append(plain.step(step))
        contents.append(plain.content())
    (directory / f"straight-{rank}").write_bytes(pickle.dumps((losses, contents)))
    logged = part(case, rank)
    run = Manager(url, save=[Replay(ring="16MiB", prove_every=3)], **OPTIONS)
    for step in range(PARTS_MADE):
        assert logged.step(step) == losses[step]
        handle = run.step(step, logged.state, metrics={"loss": losses[step]})
        assert (handle is not None) == (step == 0)
        run.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def second_life_of_part(rank: int, directory: Path, url: str, case: int) -> None:
    begin(rank, directory, "second")
    losses, contents = pickle.loads((directory / f"straight-{rank}").read_bytes())
    resumed = part(case, rank)
    with Manager(url, save=[Replay(ring="16MiB", prove_every=3)], **OPTIONS) as run:
        restored = run.restore(resumed.state)
        assert restored is not None
        at = 6 if isinstance(resumed, Unreduced) else PARTS_MADE - 1
        assert (restored.step, restored.notes, restored.stopped) == (at, (), "")
        assert resumed.content() == contents[at]
        for step in range(at + 1, PARTS_STEPS):
            assert resumed.step(step) == losses[step]
            run.step(step, resumed.state)
            run.wait()
    assert resumed.content() == contents[-1]
