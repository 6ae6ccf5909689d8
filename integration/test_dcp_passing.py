"""DCP saves, in a process of its own, the state that TierWriter staged in the trainer; either one dies by SIGKILL.

Kills come at any moment. A save is then complete or absent, and no slot of the ram tier leaks.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from leftovers import end_flushers
from test_dcp_processes import DEADLINE_S, KILLED, Job, content, join_world, run
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tierfs
from tierfs.dcp import TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.errors import NotFoundError
from tierfs.host.slab.table import SlotState

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.timeout(400),
]

OPTIONS = {"ram": "512MiB", "nvme": "0", "ack": "staged"}
SWEPT_S = 3.0  # after this time a flusher has swept up after dead processes
SEED = 20261121
ROUNDS = 6


@pytest.fixture
def job(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    yield Job(f"tierfs::file://{tmp_path}/store", tmp_path, 1)
    end_flushers(tmp_path)


class Dying(TierWriter):
    """Kill the saving process, the trainer or both during the save of the step called ``fatal``."""

    when = "before"
    whom = "us"

    def write_data(self, plan, planner):
        fatal = self.checkpoint_id.endswith("fatal")
        if fatal and self.when == "before":
            self.die()
        future = super().write_data(plan, planner)
        if fatal and self.when == "after":
            self.die()
        return future

    def die(self):
        trainer = os.getppid()
        if self.whom in ("trainer", "both"):
            os.kill(trainer, signal.SIGKILL)
        if self.whom in ("us", "both"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SWEPT_S)

    def __getstate__(self):
        return super().__getstate__() | {"when": self.when, "whom": self.whom}


def options_of(job):
    return {**OPTIONS, "state_dir": str(job.directory / "state")}


def save(writer, job, name, seed):
    live = content(0, seed)
    future = dcp.async_save(
        live,
        storage_writer=writer,
        checkpoint_id=f"{job.root}/{name}",
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    for tensor in live.values():
        tensor.zero_()
    return future


def save_and_die(rank, job, when, whom):
    join_world(rank, job)
    writer = Dying(f"{job.root}/first", **options_of(job))
    writer.when, writer.whom = when, whom
    save(writer, job, "first", 1).result(DEADLINE_S)
    future = save(writer, job, "fatal", 2)
    with pytest.raises(RuntimeError, match="process is dead"):
        future.result(DEADLINE_S)
    settled(job)  # although the exception still refers to staged tensors
    os._exit(0)


def load(job, name, seed):
    found = {key: torch.zeros_like(value) for key, value in content(0, seed).items()}
    dcp.load(found, storage_reader=TierReader(f"{job.root}/{name}", **options_of(job)), no_dist=True)
    for key, value in content(0, seed).items():
        assert torch.equal(found[key], value), f"{name}: {key}"


def is_there(job, name):
    try:
        TierReader(f"{job.root}/{name}", **options_of(job)).read_metadata()
    except NotFoundError:
        return False
    return True


def settled(job):
    """Wait until the ram tier holds only clean copies."""
    tiers = Address.of(job.root, options_of(job)).open()[0].tiers
    tiers.writer.announce()
    ends = time.monotonic() + DEADLINE_S
    while True:
        left = [slot for segment in tiers.ram.segments() for slot in segment.slots() if slot.state != SlotState.CLEAN]
        if not left:
            return
        assert time.monotonic() < ends, left
        time.sleep(0.05)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_process_that_saves_is_killed(job, when):
    assert run(save_and_die, job, when, "us") == [0]
    settled(job)
    load(job, "first", 1)
    assert not is_there(job, "fatal")


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_trainer_is_killed_and_its_save_goes_on(job, when):
    assert run(save_and_die, job, when, "trainer") == [KILLED]
    ends = time.monotonic() + DEADLINE_S
    while not is_there(job, "fatal"):
        assert time.monotonic() < ends
        time.sleep(0.1)
    settled(job)
    for name, seed in (("first", 1), ("fatal", 2)):
        load(job, name, seed)


@pytest.mark.parametrize("when", ["before", "after"])
def test_both_are_killed(job, when):
    assert run(save_and_die, job, when, "both") == [KILLED]
    settled(job)
    load(job, "first", 1)
    assert not is_there(job, "fatal")


# -- at any moment -----------------------------------------------------------------------------------------------------


def save_step_after_step(rank, job, first):
    join_world(rank, job)
    writer = TierWriter(job.root, **options_of(job))
    save(writer, job, f"step_{first}", first).result(DEADLINE_S)
    saver = _async_process_executor._CHECKPOINT_PROCESS._save_process
    (job.directory / f"saver-{first}").write_text(str(saver.pid))
    future = None
    for step in range(first + 1, first + 1000):
        if future is not None:
            future.result(DEADLINE_S)
        future = save(writer, job, f"step_{step}", step)


def test_whichever_is_killed_whenever_every_step_is_whole_or_absent(job):
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    context = mp.get_context("spawn")
    first = 0
    for number in range(ROUNDS):
        (job.directory / "rendezvous").unlink(missing_ok=True)
        trainer = context.Process(target=save_step_after_step, args=(0, job, first))
        trainer.start()
        began, mark = time.monotonic(), job.directory / f"saver-{first}"
        while not mark.exists() or not mark.read_text():
            assert time.monotonic() - began < DEADLINE_S
            assert trainer.is_alive()
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1.0))
        os.kill(int(mark.read_text()) if number % 2 else trainer.pid, signal.SIGKILL)
        trainer.join(DEADLINE_S)
        assert trainer.exitcode == (1 if number % 2 else KILLED)
        settled(job)
        there = [step for step in range(first, first + 1000) if is_there(job, f"step_{step}")]
        assert there == list(range(first, first + len(there)))
        for step in there:
            load(job, f"step_{step}", step)
        first += len(there) + 1
