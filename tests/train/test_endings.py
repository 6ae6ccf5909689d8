"""A run that is told to end saves its last step, or says in time why it cannot."""

import os
import re
import signal
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

import torch.distributed as dist
from support.training_lives import Lives
from support.waiting import HANG_S

from tierfs.train import Manager

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

TERMINATED = 128 + signal.SIGTERM
MANAGER = {"ram": "16MiB", "nvme": "0"}


@pytest.fixture(scope="module")
def processes():
    return Lives()


@pytest.fixture
def lives(processes):
    yield processes
    processes.kill()


def ended(lives, root, directory, size, first=signal.SIGTERM, then=None, **settings):
    """Run a life, end its process groups, and return its exit codes and the facts of each rank."""
    given = {
        "manager": MANAGER,
        "steps": 10_000,
        "loader": "workers",
        "pause_s": 0.01,
        "grace": f"{HANG_S:g}s",
        **settings,
    }
    life = lives.start(size, directory, "life", root, given)
    life.wait_for_step(6)
    life.signal(first)
    if then is not None:
        time.sleep(0.02)
        life.signal(then)
    return life.codes(), life.facts()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"slow_s": 0.05}, {"loader": "none", "validates": True}])
def test_a_signal_to_the_process_group_saves_the_last_step(lives, root, tmp_path, size, settings):
    codes, facts = ended(lives, root, tmp_path, size, **settings)
    assert codes == [TERMINATED] * size
    last = {each[-1]["ended"] - 1 for each in facts}
    with Manager(root, save=(), **MANAGER) as run:
        assert {run.latest()} == last


@pytest.mark.parametrize("size", [1, 2])
def test_a_later_sigterm_sets_the_exit_code(lives, root, tmp_path, size):
    codes, facts = ended(lives, root, tmp_path, size, signal.SIGUSR1, signal.SIGTERM)
    assert codes == [TERMINATED] * size
    with Manager(root, save=(), **MANAGER) as run:
        assert run.latest() == facts[0][-1]["ended"] - 1


@pytest.mark.parametrize("stuck", ["the main thread", "the process", "the save"])
def test_a_stuck_rank_is_named_within_the_grace_period(lives, root, tmp_path, stuck):
    settings = {"manager": MANAGER, "grace": "4s", "steps": 10_000, "loader": "none", "pause_s": 0.01, "reduces": False}
    settings |= {"stuck": 9 if stuck == "the main thread" else None, "stuck_save": stuck == "the save"}
    life = lives.start(2, tmp_path, "life", root, settings)
    life.wait_for_step(11 if stuck == "the save" else 8)
    if stuck == "the process":
        os.kill(life.pids()[1], signal.SIGSTOP)
    life.signal(signal.SIGTERM)
    assert life.codes(1) == [TERMINATED]
    said = (tmp_path / "life-0.err").read_text()
    # A process may be stopped in the middle of a save, too.
    save = r"the save of step \d+ did not end" if stuck != "the main thread" else "nothing else"
    assert re.search(rf"(rank 1 did not come to this step|{save}) within 3.2 s of SIGTERM", said)
    assert stuck != "the save" or "the save of step" in said
