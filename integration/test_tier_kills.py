"""SIGKILL at every ordered step of a trainer and of its flusher, with every setup of the local tiers.

After each kill the next flusher continues, and every acknowledged file must reach the object tier, complete.
``tests/support/killing.py`` has the method. The steps are those of a run without a kill.
"""

import itertools
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
from drawing import SEED, SHARE, drawn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.killing import (
    DAMAGES,
    MIB,
    Case,
    Life,
    Mode,
    dry_run,
    filling_points,
    kill_both,
    kill_flusher,
    kill_trainer,
    kill_trainer_sometime,
    kill_while_making,
    kill_while_opening,
    opening_points,
    write,
    zygotes,
)

PARALLEL = 2
PATIENCE_S = 60
LARGEST = 256 * MIB


def checkpoints(*levels):
    """Return operations of two checkpoints. Levels are those of files, of ``latest``, and of moves and deletions."""
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


def all_at(level, operations):
    return [[*one[:-1], level] for one in operations]


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
LARGER = [write("run/1/a", MIB, "staged"), write("run/1/large", 90 * MIB, "staged"), write("latest", 101, "staged")]
# Large enough that the second segment finds no room for its file.
MANY = [
    write("run/1/a", 30 * MIB, "local"),
    write("run/2/a", 30 * MIB, "local"),
    write("run/2/b", MIB, "staged"),
    write("latest", 101, "local"),
]

# The setup of the tiers, and the visits of each step that are killed: of the flusher, of the trainer with a working
# flusher, and of the trainer with a flusher that does nothing yet.
MODES = {
    "both tiers, mixed levels": (Mode(checkpoints("local", "object", "staged")), 2, 2, 0),
    "both tiers, staged": (Mode(checkpoints("staged"), ram=128 * MIB), 1, 1, 1),
    "both tiers, local, through fsspec": (Mode(checkpoints("local"), door=True), 1, 1, 0),
    "ram tier, staged": (Mode(checkpoints("staged"), ram=128 * MIB, nvme=0), 2, 1, 1),
    "ram tier, object on top": (Mode(checkpoints("staged", "object", "staged"), ram=128 * MIB, nvme=0), 1, 1, 0),
    "nvme tier, local": (Mode(checkpoints("local"), ram=0), 1, 1, 0),
    "a file larger than the ram tier": (Mode(LARGE, ram=40 * MIB, nvme=120 * MIB), 1, 1, 0),
    "a file larger than the ram tier, no nvme tier": (Mode(all_at("staged", LARGE), ram=40 * MIB, nvme=0), 1, 1, 0),
    "a file too large for the nvme tier": (Mode(PASSING, ram=160 * MIB, nvme=40 * MIB), 1, 1, 0),
    "a large write at once": (Mode(LARGER, ram=160 * MIB, nvme=240 * MIB, piece=LARGEST), 0, 2, 0),
    "a large write at once, larger than both tiers": (Mode(LARGER, ram=40 * MIB, nvme=40 * MIB, piece=LARGEST), 1, 1, 0),
    "a file larger than both tiers, local": (Mode(all_at("local", LARGER), ram=40 * MIB, nvme=40 * MIB), 1, 1, 0),
    "segments on disk, mixed levels": (Mode(checkpoints("local", "object", "staged"), shm_room=0), 1, 1, 0),
    "segments on disk, staged": (Mode(checkpoints("staged"), ram=128 * MIB, shm_room=0), 1, 1, 1),
    "segments on disk, ram tier": (Mode(checkpoints("staged"), ram=128 * MIB, nvme=0, shm_room=0), 1, 1, 0),
    "some segments on disk": (Mode(MANY, ram=70 * MIB, shm_room=40 * MIB), 1, 1, 0),
}  # fmt: skip
KILLS_MIN = 500


@pytest.fixture(scope="module")
def kills():
    return {}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.timeout(600)
def test_a_kill_at_any_step_loses_nothing_that_was_acknowledged(name, kills):
    noise = seeded(name)
    mode, of_flusher, of_trainer, of_trainer_held = MODES[name]
    with zygotes(PARALLEL) as found:
        trainer, flusher = with_case(found[0], mode, dry_run)
        jobs = [(kill_flusher, point) for point in chosen(flusher, of_flusher, noise)]
        jobs += [(kill_trainer, point) for point in chosen(trainer, of_trainer, noise)]
        jobs += [(kill_trainer_alone, point) for point in chosen(trainer, of_trainer_held, noise)]
        if mode.shm_room is None:
            jobs += [(kill_both, point) for point in noise.sample(flusher, 4)]
        if mode.shm_room == 0:
            jobs += [(kill_both_the_trainer_first, point) for point in noise.sample(trainer, 8)]
        kills[name] = do_all(found, mode, jobs, name)


@pytest.mark.timeout(600)
def test_a_trainer_that_dies_at_any_moment_of_a_large_write_leaves_nothing_of_it(kills):
    noise = seeded("sometime")
    mode = MODES["a large write at once"][0]
    with zygotes(PARALLEL) as found:
        jobs = [(kill_trainer_sometime, noise.uniform(0.02, 0.3)) for _ in range(20)]
        kills["sometime"] = do_all(found, mode, jobs, "sometime")


def seeded(name):
    print(f"seed {SEED}")
    return random.Random(f"{SEED} {name}")


def with_case(zygote, mode, what, *arguments, **options):
    shared = os.environ["TIERFS_SHM_DIR"]
    with Case(zygote, mode, shared, shared) as case:
        return what(case, *arguments, **options)


def do_all(zygotes, mode, jobs, name):
    """Run these kills, or a share drawn by name, several at once. Return their number."""
    jobs = drawn(jobs, name)
    print(f"{len(jobs)} kills")
    waiting, failures = queue.Queue(), []
    for job in jobs:
        waiting.put(job)
    threads = [threading.Thread(target=work, args=(zygote, mode, waiting, failures)) for zygote in zygotes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, f"{len(failures)} of {len(jobs)} failed\n" + "\n".join(failures[:3])
    return len(jobs)


def work(zygote, mode, waiting, failures):
    while True:
        try:
            kill, *arguments = waiting.get_nowait()
        except queue.Empty:
            return
        options = arguments.pop() if isinstance(arguments[-1], dict) else {}
        try:
            with_case(zygote, mode, kill, *arguments, **options)
        except BaseException:
            failures.append(f"{kill.__name__} {arguments} {options}\n{traceback.format_exc()}")


def kill_trainer_alone(case, point):
    return kill_trainer(case, point, held=True)


def kill_both_the_trainer_first(case, point):
    return kill_both(case, point, first="trainer")


def chosen(points, visits, noise):
    by_step = {}
    for step, number in points:
        by_step.setdefault(step, []).append(number)
    return [
        (step, number)
        for step, numbers in by_step.items()
        for number in noise.sample(numbers, min(visits, len(numbers)))
    ]


# -- flushers that die while they start --------------------------------------------------------------------------------

FILLING = [
    write("run/1/a", 17 * MIB + 5, "local"),
    write("latest", 101, "object"),
    ["await", "go"],
    write("run/junk", MIB, "staged"),
    write("run/2/a", 18 * MIB, "staged"),
    ["delete", "run/junk", "staged"],
    write("run/tmp", 1000, "staged"),
    ["rename", "run/tmp", "run/2/b", "staged"],
    write("latest", 102, "local"),
]
FILLED = Mode(FILLING, ram=128 * MIB)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.timeout(600)
def test_flushers_that_die_while_they_open_a_damaged_nvme_tier_lose_nothing_that_was_local(damage, kills):
    """One flusher dies, or two in a row. The second finds the work of the first, or the head damaged again."""
    noise = seeded(damage)
    with zygotes(PARALLEL) as found:
        points = with_case(found[0], FILLED, opening_points, Life(damage))
        assert {step for step, _ in points} >= {"after tier.make", "before tier.scan", "after tier.scan"}
        jobs = [(kill_while_opening, [Life(damage, kill=point)]) for point in points]
        for point, again in itertools.product(points, ("", damage)):
            lives = [Life(damage, kill=point), Life(again, kill=noise.choice(points))]
            jobs.append((kill_while_opening, lives, {"forget": noise.random() < 0.5}))
        kills[f"head, {damage}"] = do_all(found, FILLED, jobs, f"head, {damage}")


@pytest.mark.timeout(600)
def test_a_flusher_that_dies_in_a_commit_and_the_next_while_it_opens_the_tier_lose_nothing_that_was_local(kills):
    noise = seeded("commits")
    steps = {
        *("after chunk.write", "after chunk.sync", "after chunk.rename", "after chunks.sync"),
        *("after batch.write", "after batch.rename", "after batch.sync", "before head.change", "before batch.finish"),
    }
    jobs = []
    with zygotes(PARALLEL) as found:
        filling = [point for point in with_case(found[0], FILLED, filling_points) if point[0] in steps]
        for point in chosen(filling, 4, noise):
            scan = (noise.choice(["before tier.scan", "after tier.scan"]), 1)
            lives = [Life(kill=scan), Life("lose", kill=("after tier.make", 1))]
            jobs.append((kill_while_opening, lives, {"filling": point, "forget": noise.random() < 0.6}))
        kills["commits"] = do_all(found, FILLED, jobs, "commits")


@pytest.mark.timeout(600)
def test_flushers_that_die_while_they_open_the_tier_with_another_budget_lose_nothing_that_was_local(kills):
    """The budget differs each time. The smallest is less than the content of the tier."""
    noise = seeded("sizes")
    budgets = [128 * MIB, 48 * MIB, 24 * MIB]
    jobs = []
    with zygotes(PARALLEL) as found:
        for budget in budgets:
            for point in with_case(found[0], FILLED, opening_points, Life(nvme=budget)):
                first = Life(nvme=budget, kill=point)
                jobs.append((kill_while_opening, [first], {"forget": noise.random() < 0.5}))
                for other in budgets:
                    then = (f"{noise.choice(['before', 'after'])} tier.scan", 1)
                    second = Life(noise.choice(["", "", "lose"]), other, then)
                    jobs.append((kill_while_opening, [first, second], {"forget": noise.random() < 0.5}))
        kills["sizes"] = do_all(found, FILLED, jobs, "sizes")


@pytest.mark.timeout(600)
def test_flushers_that_die_while_they_make_the_nvme_tier_are_replaced(kills):
    steps = [f"{when} {step}" for step in ("tier.make", "tier.scan") for when in ("before", "after")]
    mode = Mode(checkpoints("local"))
    with zygotes(PARALLEL) as found:
        jobs = [(kill_while_making, [(step, 1) for step in some]) for some in itertools.product(steps, steps)]
        kills["making"] = do_all(found, mode, jobs, "making")


def test_there_were_enough_kills(kills):
    asked = {*MODES, "sometime", *(f"head, {damage}" for damage in DAMAGES), "commits", "sizes", "making"}
    if kills.keys() != asked:
        pytest.skip("not all were asked for, or another process had some")
    print(kills)
    assert sum(kills.values()) >= KILLS_MIN // SHARE


# -- whole hosts -------------------------------------------------------------------------------------------------------

MIXED = [
    write("run/1/a", MIB, "local"),
    write("latest", 101, "local"),
    ["await", "go"],
    write("run/2/a", MIB, "staged"),
    write("run/2/b", 1000, "staged"),
    write("latest", 102, "staged"),
]
# Without an nvme tier, the writer itself would publish files at level `local`.
STAGED = [[*one[:-1], "staged"] if one[0] == "write" else one for one in MIXED]


@pytest.fixture
def case(tmp_path):
    """Yield a function that makes a case, on a disk if asked. The case ends before its directory is removed."""
    made = []
    with zygotes(1) as (zygote,):

        def make(mode, directory=None):
            shared = os.environ["TIERFS_SHM_DIR"]
            made.append(Case(zygote, mode, directory or shared, shared))
            return made[-1]

        yield make
        for one in made:
            one.__exit__(None)


def run_until_staged(case, **spec):
    """Run the operations before the wait, then stop the flusher from working, and run the rest."""
    go, held = case.file("go"), case.file("held")
    operations = [["await", str(go)] if one[0] == "await" else one for one in case.mode.operations]
    hold = ["before chunk.write", "before settle.commit", "before publish.record"]
    flusher = case.start("flusher", hold=hold, held_while=str(held), **spec)
    trainer = case.start("trainer", leave=str(case.file("leave")), operations=operations, **spec)
    case.await_done(trainer, 2)
    held.touch()
    go.touch()
    case.await_done(trainer)
    return flusher, trainer


@pytest.mark.parametrize("operations", [MIXED, STAGED], ids=["both tiers", "ram tier"])
@pytest.mark.parametrize("victims", ["trainer", "flusher", "both"])
def test_a_kill_9_loses_nothing_that_was_staged(case, victims, operations, tmp_path):
    case = case(Mode(operations, ram=128 * MIB, nvme=96 * MIB if operations is MIXED else 0), tmp_path)
    flusher, trainer = run_until_staged(case)
    if victims != "flusher":
        trainer.kill()
    if victims != "trainer":
        flusher.kill()
    case.check_right_now(trainer)
    case.file("held").unlink()
    if victims != "trainer":
        flusher = case.start("flusher")
    if victims == "flusher":
        case.file("leave").touch()
        assert trainer.wait() == 0
    case.check_all_went_down([case.mode.states[-1]], flusher)


def test_the_end_of_a_container_keeps_what_is_local_and_what_was_staged_is_not_there_at_all(case, tmp_path):
    case = case(Mode(MIXED, ram=128 * MIB), tmp_path)
    for child in run_until_staged(case):
        child.kill()
    for path in case.shm.iterdir():
        shutil.rmtree(path)
    case.check_all_went_down([case.mode.states[2]], case.start("flusher"))
    assert not case.logs()


def test_a_host_that_is_started_anew_keeps_what_is_local_whatever_lies_in_its_shared_memory(case, tmp_path):
    """A folder on a disk outlives a reboot. The rebooted host must ignore its content."""
    case = case(Mode(MIXED, ram=128 * MIB), tmp_path)
    for child in run_until_staged(case, boot="0123456789abcdef" * 2):
        child.kill()
    assert list(case.shm.rglob("*.slab"))
    case.check_all_went_down([case.mode.states[2]], case.start("flusher"))


RANK = """
import sys, time
import fsspec
url, rank = sys.argv[1:]
def door(ack):
    return fsspec.url_to_fs("tierfs::" + url, ack=ack, ram="256MiB", nvme="256MiB")
fs, root = door("object")
with fs.open(f"{root}/warm-up-{rank}", "wb") as file:
    file.write(b"x")
print(fs._locate(f"{root}/x")[0].tiers.flusher.request("status")["pid"], flush=True)
sys.stdin.readline()
fs, root = door("staged")
# The flusher stands still now, and would not answer.
fs._locate(f"{root}/x")[0].tiers.writer.announce = lambda **_: None
with fs.open(f"{root}/run/shard-{rank}", "wb") as file:
    file.write(rank.encode() * 3_000_000)
print("staged", flush=True)
time.sleep(100)
"""

LAUNCHER = """
import subprocess, sys, threading
ranks = [
    subprocess.Popen([sys.executable, "-c", *sys.argv[1:], str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for rank in range(2)
]
for rank in ranks:
    print(rank.stdout.readline().decode().strip(), flush=True)
sys.stdin.readline()
for rank in ranks:
    rank.stdin.write(b"go\\n")
    rank.stdin.flush()
for rank in ranks:
    print(rank.stdout.readline().decode().strip(), flush=True)
threading.Event().wait()
"""


def command(*arguments, **options):
    done = subprocess.run([sys.executable, "-m", "tierfs.cli", *arguments], check=True, capture_output=True, **options)
    return done.stdout


def test_a_flusher_that_a_rank_started_survives_the_end_of_its_process_group_and_finishes(tmp_path, monkeypatch):
    """torchrun ends a job by killing the process group of its ranks."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    url, tree = f"file://{tmp_path}/store", tmp_path / "store/.tierfs/tree/run"
    command("init", url)
    job = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    stopped = 0
    try:
        flushers = {int(job.stdout.readline()) for _ in range(2)}
        assert len(flushers) == 1, "each rank started one"
        (flusher,) = flushers
        assert os.getpgid(flusher) != job.pid
        # Stop the flusher, so that it cannot publish the next files.
        os.kill(flusher, signal.SIGSTOP)
        stopped = flusher
        job.stdin.write(b"go\n")
        job.stdin.flush()
        assert [job.stdout.readline() for _ in range(2)] == [b"staged\n"] * 2
        assert not tree.exists()
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        job.stdin.close()
        job.stdout.close()
        if stopped:
            os.kill(stopped, signal.SIGCONT)
    ends = time.monotonic() + PATIENCE_S
    while len(list(tree.glob("shard-*"))) < len("01"):
        assert time.monotonic() < ends
        time.sleep(0.05)
    without = {**os.environ, "TIERFS_RAM": "0", "TIERFS_NVME": "0"}
    for rank in ("0", "1"):
        assert command("cat", f"{url}/run/shard-{rank}", env=without) == rank.encode() * 3_000_000
    command("flusher", "stop", url)
