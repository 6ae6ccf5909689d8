"""Two ranks killed and signalled at random moments produce an uninterrupted run's losses and weights, bit for bit.

By default there are three runs of each kind; ``TIERFS_TRAIN_LIVES=10`` runs ten.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

import torch.distributed as dist

import tierfs
from tierfs.checkpoint.catalog import Candidate, standing
from tierfs.dcp.address import Address

sys.path.insert(0, str(Path(__file__).parent))
import train_life

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
LIVES = int(os.environ.get("TIERFS_TRAIN_LIVES", "3"))
STEPS_A_LIFE = 12
PATIENCE_S = 120
TERMINATED = 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def processes():
    """Yield a context whose processes are forks of one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_life", "tierfs.train.manager", "tierfs.train.state"])
    return context


@pytest.fixture
def root(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store"


def environment():
    return {name: value for name, value in os.environ.items() if name.startswith("TIERFS_")}


def start(processes, target, size, *arguments):
    ranks = [processes.Process(target=target, args=(rank, *arguments, environment())) for rank in range(size)]
    for rank in ranks:
        rank.start()
    return ranks


def codes_of(ranks):
    ends_s = time.monotonic() + PATIENCE_S
    for rank in ranks:
        rank.join(max(0.0, ends_s - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        if rank.exitcode is None:
            rank.kill()
            rank.join()
    return codes


def wait_for(ranks, *files):
    ends_s = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < ends_s
        assert all(rank.exitcode is None for rank in ranks), [rank.exitcode for rank in ranks]
        time.sleep(0.005)


def losses_of(directory, life, rank):
    """Return the losses by step, and the step at which the life was stopped."""
    lines = (directory / f"losses-{life}-{rank}").read_text().splitlines()
    pairs = [line.split() for line in lines]
    losses = {int(step): loss for step, loss in pairs if step != "stopped"}
    return losses, next((int(step) for name, step in pairs if name == "stopped"), None)


def test_a_run_that_is_killed_and_signalled_is_the_uninterrupted_one(processes, root, tmp_path):
    chance = random.Random(SEED)
    steps = STEPS_A_LIFE * 2 * LIVES
    assert codes_of(start(processes, train_life.live, 2, str(tmp_path), f"{root}/straight", "straight", steps)) == [
        0,
        0,
    ]
    expected = [losses_of(tmp_path, "straight", rank)[0] for rank in (0, 1)]
    assert [len(losses) for losses in expected] == [steps, steps]
    assert expected[0] != expected[1]

    kinds = ["kill", "terminate"] * LIVES
    chance.shuffle(kinds)
    made, stopped_at = 0, []
    for number, kind in enumerate([*kinds, "finish"]):
        life = f"{number}-{kind}"
        ranks = start(processes, train_life.live, 2, str(tmp_path), f"{root}/broken", life, steps)
        if kind != "finish":
            wait_for(ranks, *(tmp_path / f"begun-{life}-{rank}" for rank in (0, 1)))
            time.sleep(chance.uniform(0, 0.3))
            if kind == "kill":
                for rank in ranks:
                    rank.kill()
            else:
                os.kill(chance.choice(ranks).pid, signal.SIGTERM)
        codes = codes_of(ranks)
        found = [losses_of(tmp_path, life, rank) for rank in (0, 1)]
        for rank, (losses, _) in enumerate(found):
            different = [step for step, loss in losses.items() if loss != expected[rank][step]]
            assert not different, f"{life}, rank {rank}: losses differ from step {different[0]} on"
        made += sum(len(losses) for losses, _ in found)
        stops = [stop for _, stop in found]
        if kind == "terminate" and stops != [None, None]:
            assert codes == [TERMINATED] * 2
            assert stops[0] == stops[1]
            stopped_at.append(stops[0])
        elif kind == "finish" or (kind == "terminate" and codes == [0, 0]):
            assert codes == [0, 0]
    assert made >= 2 * steps
    assert stopped_at, "no signal came while there were steps to make"
    for rank in (0, 1):
        weights = [(tmp_path / f"weights-{life}-{rank}").read_text() for life in ("straight", f"{2 * LIVES}-finish")]
        assert weights[0] == weights[1]


def test_one_signal_during_a_long_evaluation_saves_one_complete_checkpoint(processes, root, tmp_path):
    ranks = start(processes, train_life.evaluate, 2, str(tmp_path), f"{root}/run")
    wait_for(ranks, *(tmp_path / f"begun-evaluation-{rank}" for rank in (0, 1)))
    time.sleep(0.3)
    begun_s = time.monotonic()
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert codes_of(ranks) == [TERMINATED] * 2
    assert time.monotonic() - begun_s < 30
    store, path = Address.of(f"{root}/run", {"ram": "64MiB", "nvme": "0"}).open()
    found = standing(store, Candidate(f"{path}/step_7", (None,)))
    assert (found.state, found.level.label) == ("complete", "object")


def test_other_numbers_of_ranks_go_on_within_tolerance_and_say_what_is_lost(processes, root, tmp_path):
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    for directory in (straight, moved):
        directory.mkdir()
    assert codes_of(start(processes, train_life.reshard, 2, 2, str(straight), f"{root}/straight", 0, 9)) == [0, 0]
    expected = reshard_losses(straight, 0, 2)[0]
    found, notes = {}, []
    for begin, end, size in ((0, 3, 2), (3, 6, 1), (6, 9, 2)):
        codes = codes_of(start(processes, train_life.reshard, size, size, str(moved), f"{root}/moved", begin, end))
        assert codes == [0] * size
        losses, said = reshard_losses(moved, begin, size)
        found.update(losses)
        notes.append(said)
    assert found == pytest.approx(expected, rel=1e-4)
    assert notes[0] == []
    for said, counts in zip(
        notes[1:], ("2 ranks saved it, but 1 restored it", "1 ranks saved it, but 2 restored it"), strict=True
    ):
        assert counts in said[0]
        assert "data loader's position cannot be restored" in said[1]


def reshard_losses(directory, begin, size):
    lines = (directory / f"reshard-{begin}-{size}-0").read_text().splitlines()
    notes = [line.removeprefix("note ") for line in lines if line.startswith("note ")]
    return {int(line.split()[0]): float(line.split()[1]) for line in lines if not line.startswith("note ")}, notes
