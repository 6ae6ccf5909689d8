"""Stock DCP through the URL, with processes killed by SIGKILL: earlier saves stay, and no partial file appears."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import fsspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tierfs
from tierfs.fs import TierFileSystem

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]

WORLD = 2
NUMBERS = 3 << 20  # 12 MiB as float32; a data file with three of them fills two chunks and part of a third
PARTS = 3
DEADLINE_S = 120
KILLED = -signal.SIGKILL
SEED = 20261120
ROUNDS = 5


class Job(NamedTuple):
    """The task of the processes of one world."""

    root: str
    directory: Path
    world: int = WORLD


class KillingPlanner(DefaultSavePlanner):
    """Kill the process in the middle of its file, with chunks in flight."""

    def __init__(self, parts: int = PARTS - 1) -> None:
        super().__init__()
        self.parts = parts

    def resolve_data(self, write_item):
        if self.parts == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.parts -= 1
        return super().resolve_data(write_item)


def content(rank, seed, parts=PARTS):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return {f"rank{rank}.{part}": torch.randn(NUMBERS, generator=generator) for part in range(parts)}


def digest(state):
    found = hashlib.sha256()
    for key in sorted(state):
        found.update(key.encode())
        found.update(state[key].numpy().tobytes())
    return found.hexdigest()


def loaded_digest(url, state):
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(loaded, checkpoint_id=url, no_dist=True)
    return digest(loaded)


def everything(seed, world=WORLD):
    return {key: value for rank in range(world) for key, value in content(rank, seed).items()}


def join_world(rank, job):
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.directory}/rendezvous",
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=DEADLINE_S),
    )


def run(function, job, *args):
    """Run ``function(rank, job, *args)`` in each rank, and return the exit codes."""
    (job.directory / "rendezvous").unlink(missing_ok=True)
    context = mp.get_context("spawn")
    ranks = [context.Process(target=function, args=(rank, job, *args)) for rank in range(job.world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S + 60)
        if process.is_alive():
            process.kill()
            process.join()
            pytest.fail("a rank hangs")
    return [process.exitcode for process in ranks]


@pytest.fixture
def job(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return Job(f"tierfs::file://{tmp_path}/store", tmp_path)


# -- a rank dies -------------------------------------------------------------------------------------------------------


def save_and_maybe_die(rank, job, name, seed, victim=None):
    join_world(rank, job)
    planner = KillingPlanner() if rank == victim else None
    failed = False
    try:
        dcp.save(content(rank, seed), checkpoint_id=f"{job.root}/{name}", planner=planner)
    except BaseException:
        failed = True
    # Skips Python's exit, which would wait for the other rank.
    os._exit(0 if failed is (victim is not None) else 1)


@pytest.mark.parametrize("victim", range(WORLD))
def test_a_rank_killed_while_it_writes_leaves_no_metadata_and_the_checkpoint_before(job, victim):
    survivor = 1 - victim
    assert run(save_and_maybe_die, job, "step_1", 1) == [0, 0]
    codes = run(save_and_maybe_die, job, "step_2", 2, victim)
    assert codes[victim] == KILLED
    assert codes[survivor] == 0, "the other rank must be told"
    fs, path = fsspec.url_to_fs(job.root)
    assert [name.rpartition("/")[2] for name in fs.find(f"{path}/step_2")] == [f"__{survivor}_0.distcp"]
    assert loaded_digest(f"{job.root}/step_1", everything(1)) == digest(everything(1))
    # The next attempt starts over under the same id.
    assert run(save_and_maybe_die, job, "step_2", 2) == [0, 0]
    assert loaded_digest(f"{job.root}/step_2", everything(2)) == digest(everything(2))


def test_a_rank_killed_while_it_saves_to_the_same_id_leaves_each_file_old_or_new(job):
    """The files are complete, but of two saves, which DCP cannot tell apart: an id is best used once."""
    fs, path = fsspec.url_to_fs(job.root)
    names = [f"__{rank}_0.distcp" for rank in range(WORLD)]
    digests = {}
    for name, seed in (("ck", 1), ("elsewhere", 2)):
        assert run(save_and_maybe_die, job, name, seed) == [0, 0]
        digests[seed] = [fs.info(f"{path}/{name}/{file}")["digest"] for file in names]
    codes = run(save_and_maybe_die, job, "ck", 2, 1)
    assert codes == [0, KILLED]
    found = [fs.info(f"{path}/ck/{file}")["digest"] for file in names]
    assert found[1] == digests[1][1], "what the killed rank had there before"
    assert found[0] in {digests[1][0], digests[2][0]}
    assert fs.isfile(f"{path}/ck/.metadata")


# -- the coordinator dies between the data and the metadata ------------------------------------------------------------


def save_and_die_at_the_rename(rank, job):
    join_world(rank, job)
    TierFileSystem.mv = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    try:
        dcp.save(content(rank, 2), checkpoint_id=f"{job.root}/ck")
    except BaseException:
        os._exit(0)
    os._exit(1)


def test_a_coordinator_killed_before_the_rename_leaves_a_save_that_a_rename_completes(job):
    assert run(save_and_maybe_die, job, "ck", 1) == [0, 0]
    assert run(save_and_die_at_the_rename, job) == [KILLED, 0]
    fs, path = fsspec.url_to_fs(f"{job.root}/ck")
    assert not fs.exists(f"{path}/.metadata")
    fs.mv(f"{path}/.metadata.tmp", f"{path}/.metadata")
    assert loaded_digest(f"{job.root}/ck", everything(2)) == digest(everything(2))


# -- the process that saves in the background dies ---------------------------------------------------------------------


def save_in_a_process_that_dies(rank, job):
    join_world(rank, job)
    options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    dcp.async_save(content(rank, 1), checkpoint_id=f"{job.root}/step_1", **options).result()
    future = dcp.async_save(content(rank, 2), checkpoint_id=f"{job.root}/step_2", planner=KillingPlanner(), **options)
    try:
        future.result(DEADLINE_S)
    except RuntimeError as error:
        (job.directory / f"error-{rank}").write_text(str(error))
        os._exit(0)
    os._exit(1)


def test_a_killed_background_process_is_reported_and_leaves_the_checkpoint_before(job):
    alone = job._replace(world=1)
    assert run(save_in_a_process_that_dies, alone) == [0]
    assert "process is dead" in (job.directory / "error-0").read_text()
    fs, path = fsspec.url_to_fs(job.root)
    assert fs.find(f"{path}/step_2") == []
    assert loaded_digest(f"{job.root}/step_1", everything(1, world=1)) == digest(everything(1, world=1))


# -- a trainer dies at any moment --------------------------------------------------------------------------------------


def save_step_after_step(rank, job, first):
    torch.set_num_threads(1)
    (job.directory / f"began-{first}").touch()
    for step in range(first, first + 1000):
        dcp.save(content(0, step, parts=2), checkpoint_id=f"{job.root}/step_{step}", no_dist=True)


def test_whenever_a_trainer_is_killed_every_step_with_metadata_is_whole(job):
    chance = random.Random(SEED)
    fs, path = fsspec.url_to_fs(job.root)
    first = 0
    context = mp.get_context("spawn")
    for number in itertools.count():
        process = context.Process(target=save_step_after_step, args=(0, job, first))
        process.start()
        began = time.monotonic()
        while not (job.directory / f"began-{first}").exists():
            assert time.monotonic() - began < DEADLINE_S
            time.sleep(0.01)
        time.sleep(chance.uniform(0.1, 1.2 if number < ROUNDS else number))  # a busy machine saves slowly
        process.kill()
        process.join()
        assert process.exitcode == KILLED
        steps = sorted(int(name.rpartition("_")[2]) for name in fs.ls(path, detail=False) if "/step_" in name)
        complete = [step for step in steps if fs.isfile(f"{path}/step_{step}/.metadata")]
        assert steps[: len(complete)] == complete, "only the step that was being saved may be incomplete"
        assert len(steps) - len(complete) <= 1
        for step in complete:
            state = content(0, step, parts=2)
            if step >= first:
                assert loaded_digest(f"{job.root}/step_{step}", state) == digest(state), f"seed {SEED}, step {step}"
        # As after a restart, save incomplete steps again.
        first = len(complete)
        if first > 0 and number >= ROUNDS - 1:
            break
