"""SIGKILL at every ordered step of a trainer and of its flusher, in every way that the local tiers are set up.

After each the next flusher takes up what is there, and what a process was told is safe is in the object tier, whole.
``tests/flush/killing.py`` says how; the steps are those that a run without a kill passes.
"""

import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "flush"))
from killing import MIB, Case, Mode, dry_run, kill_both, kill_flusher, kill_trainer, write, zygotes

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
PARALLEL = 2
PATIENCE_S = 60


def checkpoints(*levels):
    """Two of them, and what goes on around: levels are those of files, of ``latest``, of what is moved and deleted."""
    files, latest, others = levels * 3 if len(levels) == 1 else levels
    return [
        write("run/1/inline", 1000, files),
        write("run/1/a", 17 * MIB + 5, files),  # two chunks
        write("latest", 101, latest),
        write("run/tmp", MIB, files),
        ["rename", "run/tmp", "run/2/a", others],
        write("run/junk", MIB + 1, files),
        ["delete", "run/junk", others],
        write("latest", 102, latest),
    ]


LARGE = [
    write("run/1/a", MIB, "staged"),
    write("run/1/large", 40 * MIB, "staged"),
    write("latest", 101, "staged"),
    write("run/1/large", 34 * MIB, "local"),
]
PASSING = [
    write("run/1/a", MIB, "staged"),
    write("run/1/large", 24 * MIB, "staged"),
    ["rename", "run/1/large", "run/1/moved", "staged"],
    write("latest", 101, "staged"),
]

# How the tiers are set up; how many visits of each step the flusher is killed at, and the trainer with a flusher at work,
# and with one that does nothing yet.
MODES = {
    "both tiers, mixed levels": (Mode(checkpoints("local", "object", "staged")), 2, 2, 0),
    "both tiers, staged": (Mode(checkpoints("staged"), ram=128 * MIB), 1, 1, 1),
    "both tiers, object, through fsspec": (Mode(checkpoints("object"), door=True), 1, 1, 0),
    "ram tier, staged": (Mode(checkpoints("staged"), ram=128 * MIB, nvme=0), 2, 1, 1),
    "ram tier, object on top": (Mode(checkpoints("staged", "object", "staged"), ram=128 * MIB, nvme=0), 1, 1, 0),
    "nvme tier, local": (Mode(checkpoints("local"), ram=0), 1, 1, 0),
    "a file larger than the ram tier": (Mode(LARGE, ram=40 * MIB, nvme=120 * MIB), 1, 1, 0),
    "a file larger than the ram tier, no nvme tier": (Mode([[*one[:-1], "staged"] for one in LARGE], ram=40 * MIB, nvme=0), 1, 1, 0),
    "a file too large for the nvme tier": (Mode(PASSING, ram=160 * MIB, nvme=40 * MIB), 1, 1, 0),
}  # fmt: skip
KILLS_MIN = 200


@pytest.fixture(scope="module")
def kills():
    """How many there were."""
    return {}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.timeout(600)
def test_a_kill_at_any_step_loses_nothing_that_was_acknowledged(name, kills):
    print(f"seed {SEED}")
    noise = random.Random(f"{SEED} {name}")
    mode, of_flusher, of_trainer, of_trainer_held = MODES[name]
    shared = os.environ["TIERFS_SHM_DIR"]
    jobs, failures = queue.Queue(), []
    with zygotes(PARALLEL) as found:
        with Case(found[0], mode, shared, shared) as case:
            trainer, flusher = dry_run(case)
        for point in chosen(flusher, of_flusher, noise):
            jobs.put((kill_flusher, point))
        for point in chosen(trainer, of_trainer, noise):
            jobs.put((kill_trainer, point))
        for point in chosen(trainer, of_trainer_held, noise):
            jobs.put((kill_trainer_alone, point))
        for point in noise.sample(flusher, 4):
            jobs.put((kill_both, point))
        count = jobs.qsize()
        threads = [threading.Thread(target=work, args=(one, mode, shared, jobs, failures)) for one in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    kills[name] = count
    assert not failures, f"{len(failures)} of {count} failed\n" + "\n".join(failures[:3])


def work(zygote, mode, shared, jobs, failures):
    while True:
        try:
            kill, point = jobs.get_nowait()
        except queue.Empty:
            return
        try:
            with Case(zygote, mode, shared, shared) as case:
                kill(case, point)
        except BaseException:
            failures.append(f"{kill.__name__} {point}\n{traceback.format_exc()}")


def kill_trainer_alone(case, point):
    return kill_trainer(case, point, held=True)


def chosen(points, visits, noise):
    """So many visits of each step, the first one among them."""
    by_step = {}
    for step, number in points:
        by_step.setdefault(step, []).append(number)
    return [
        (step, number)
        for step, numbers in by_step.items()
        for number in (
            noise.sample(numbers, 1) if visits == 1 else {numbers[0], *noise.sample(numbers, visits)} if visits else ()
        )
    ]


def test_there_were_enough_kills(kills):
    if len(kills) < len(MODES):
        pytest.skip("not all were asked for")
    print(kills)
    assert sum(kills.values()) >= KILLS_MIN
