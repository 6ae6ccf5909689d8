"""SIGKILL of ranks, flushers and whole hosts at each step of a checkpoint's save, on one host and on two.

A host here is a state directory, a folder of shared memory and the processes that use them. All hosts share one
object tier. The newest complete checkpoint must load from anywhere, with each byte from one save. A save whose files
all reached the object tier becomes that checkpoint as soon as a process looks. A save that did not finish is an error
on every surviving rank and changes nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist

import tierfs

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import dcp_kill_worker as worker
from dcp_kill_worker import ABSENT, WORLD
from drawing import SEED, drawn
from leftovers import flushers
from support.killing import MIB, Child, Zygote, points_of

from tierfs.session import parse_url
from tierfs.session.open import open_bare

# TIERFS_TEST_KILLS=1000 kills once at each step of each process. TIERFS_TEST_KILLS_S=3600 kills at random for an hour.
KILLS = int(os.environ.get("TIERFS_TEST_KILLS", "0"))
KILLS_S = float(os.environ.get("TIERFS_TEST_KILLS_S", "20"))
PARALLEL = 2
PATIENCE_S = 60
UNREACHED_S = 2
INCOMPLETE_S = 0.5
COMPLETE_S = 30
BEFORE = 1  # the seed of the existing checkpoint
NAMES = re.compile(r"waits for \d of \d files: rank-0000\d")


class Machine:
    """A host: its processes, their state directory, and their shared memory."""

    def __init__(self, job, name):
        self.state, self.shm = job.directory / f"state-{name}", job.shm / name
        self.shm.mkdir()
        self.processes = []

    def kill(self):
        for process in self.processes:
            process.kill()
        self.kill_flushers()

    def kill_flushers(self):
        while found := flushers(self.state):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def crash(self):
        """Kill all processes at once, and delete shared memory."""
        self.kill()
        shutil.rmtree(self.shm)
        self.shm.mkdir()

    def lose(self):
        self.crash()
        shutil.rmtree(self.state, ignore_errors=True)


class Job:
    """One store, the hosts that save to it, and their processes.

    Args:
        zygote: Forks the processes.
        hosts: Number of hosts.
        template: A job whose store is copied. Without it the store is empty.
        spec: Options of all processes; see `dcp_kill_worker`.
    """

    def __init__(self, zygote, hosts, *, template=None, ram=64 * MIB, nvme=96 * MIB, **spec):
        self.zygote = zygote
        shared = os.environ["TIERFS_SHM_DIR"]
        self.directory, self.shm = Path(tempfile.mkdtemp(dir=shared)), Path(tempfile.mkdtemp(dir=shared))
        self._numbers = itertools.count()
        self.children = []
        self.hosts = [self.new_host() for _ in range(hosts)]
        if template is not None:
            shutil.copytree(template.directory / "store", self.directory / "store")
        url = f"file://{self.directory}/store"
        uuid = tierfs.init(url).descriptor.uuid
        self.spec = {"url": url, "door": f"tierfs::{url}", "uuid": uuid, "ram": ram, "nvme": nvme, **spec}

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for child in self.children:
            child.kill()
        for host in self.hosts:
            host.kill_flushers()
        if kind is None or not os.environ.get("TIERFS_TEST_KEEP"):
            shutil.rmtree(self.directory)
            shutil.rmtree(self.shm)
        else:
            print(f"kept: {self.directory} {self.shm}")

    def new_host(self):
        return Machine(self, f"host{next(self._numbers)}")

    def start(self, role, host, **spec):
        label = f"{next(self._numbers)}-{role}"
        names = {name: str(self.directory / f"{label}.{name}") for name in ("say", "points", "log")}
        place = {"state": str(host.state), "shm": str(host.shm)}
        child = Child(self.zygote, {**self.spec, **place, **names, "role": role, **spec})
        child.said, child.points, child.log = (Path(names[name]) for name in ("say", "points", "log"))
        child.label = label
        self.children.append(child)
        host.processes.append(child)
        return child

    def start_ranks(self, operations, *, hosts=None, points=None, **spec):
        """Start all ranks on the job's hosts, or on these. ``points`` maps ranks to the steps at which they die."""
        hosts = hosts or self.hosts
        meeting = self.directory / f"meeting-{next(self._numbers)}"
        common = {"operations": operations, "meeting": str(meeting), "is_one_host": len(hosts) == 1, **spec}
        kills = [(points or {}).get(("rank", rank), ()) for rank in range(WORLD)]
        return [
            self.start("rank", hosts[rank % len(hosts)], rank=rank, kill=kill, **common)
            for rank, kill in enumerate(kills)
        ]

    def ask(self, role, host, **spec):
        """Run a process that inspects something, and return its report."""
        child = self.start(role, host, **spec)
        assert child.wait() == 0, self.logs()
        return self.lines(child)[-1]

    def look(self, host=None, names=("ck",), **spec):
        """Return the state of checkpoints as a host sees it; without `host`, a new one without local tiers."""
        if host is None:
            host, spec = self.new_host(), {**spec, "bare": True}
        return self.ask("loader", host, names=names, **spec)["found"]

    @staticmethod
    def lines(child):
        return [json.loads(line) for line in child.said.read_text().splitlines()] if child.said.exists() else []

    def await_word(self, children, word):
        """Wait until each child has reported this word or has ended."""
        ends = time.monotonic() + PATIENCE_S
        while not all(told(child, word) or child.has_ended() for child in children):
            assert time.monotonic() < ends, self.logs()
            time.sleep(0.002)

    def await_end(self, children, patience_s=PATIENCE_S):
        """Wait until all children have ended. Return whether they did in time."""
        ends = time.monotonic() + patience_s
        return all(child.has_ended(max(0.0, ends - time.monotonic())) for child in children)

    def logs(self):
        texts = {child.label: [*map(str, self.lines(child)), child.log.read_text().strip()] for child in self.children}
        return "\n".join(f"--- {name}\n" + "\n".join(text) for name, text in texts.items() if any(text))


def told(child, word):
    return [line[word] for line in Job.lines(child) if word in line]


# -- one kill ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mode:
    """The number of hosts, their tiers, and the level of their saves."""

    hosts: int
    ack: str
    nvme: int = 96 * MIB

    def survives(self, scope):
        """Return whether acknowledged saves, and saves in flight, survive this scope."""
        if scope in {"process", "ranks", "everything"} or self.ack == "object":
            return True
        return scope in {"crash", "crash of all"} and self.ack == "local"


@dataclasses.dataclass(frozen=True)
class Kill:
    """A process to kill, the step at which it dies, and the scope of the failure.

    Attributes:
        role: ``rank`` or ``flusher``.
        number: Number of the rank, or of the flusher's host.
        point: The step, and the number of the visit to it.
        scope: ``process`` alone, all ``ranks``, all processes of all hosts (``everything``), those of one host and its
            memory (``crash``), its disk as well (``loss``), those of all hosts and their memory (``crash of all``).
        waits: Whether surviving ranks wait for the complete checkpoint, and so help to commit it.
    """

    role: str
    number: int
    point: tuple[str, int]
    scope: str = "process"
    waits: bool = True


def saves(mode, waits_s):
    """Return two saves over an existing checkpoint, the second while the first is in flight."""
    found = [["async", "ck", mode.ack, BEFORE + 1], ["async", "ck", mode.ack, BEFORE + 2]]
    return found + ([["wait", "ck", mode.ack, waits_s]] if waits_s else [])


def run(zygote, template, mode, kill):
    """Run one kill and check the result. Return whether the process reached its step; if not, it dies at the end."""
    with Job(zygote, mode.hosts, template=template, nvme=mode.nvme) as job:
        is_safe = mode.survives(kill.scope)
        is_up = kill.scope in {"process", "ranks"}
        operations = saves(mode, kill.waits and (COMPLETE_S if is_up else INCOMPLETE_S))
        points = {(kill.role, kill.number): kill.point}
        flushers = [
            job.start("flusher", host, kill=points.get(("flusher", number), ()))
            for number, host in enumerate(job.hosts)
        ]
        ranks = job.start_ranks(operations, points=points)
        doomed = (ranks if kill.role == "rank" else flushers)[kill.number]
        reached = await_death(job, doomed, ranks)
        host = job.hosts[kill.number % len(job.hosts)]
        dead = bring_down(job, kill.scope, host, doomed, ranks)
        before = job.look(looks_on=True)["ck"]
        assert before["seed"] in {BEFORE, *seeds(operations)}, f"{before}\n{job.logs()}"
        if kill.role == "flusher" and is_up:
            job.start("flusher", host)  # like the next process that opens the store there
        alive = [rank for rank in ranks if rank not in dead]
        assert job.await_end(alive), f"a rank hangs\n{job.logs()}"
        check_told(job, operations, ranks, alive)
        check_waited(job, operations, alive, is_up)
        recover(job, kill.scope, host)
        has_announced = passed(ranks[0], "before finish") == len(told(ranks[0], "finished"))
        if is_safe and has_announced and not (alive and kill.waits):
            await_commit(job)
        check_end(job, mode, kill, operations, ranks, before)
    return reached


def await_death(job, doomed, ranks):
    """Wait until the process has died, or all ranks have ended; then kill it. Return whether it reached its step."""
    ends = time.monotonic() + PATIENCE_S
    while not doomed.has_ended(0.005) and not all(rank.has_ended() for rank in ranks):
        assert time.monotonic() < ends, f"nothing comes to an end\n{job.logs()}"
    reached = doomed.has_ended(UNREACHED_S)
    status = doomed.kill()
    return reached and status < 0


def bring_down(job, scope, host, doomed, ranks):
    """Kill everything else in the scope. Return the dead ranks."""
    if scope == "ranks":
        for rank in ranks:
            rank.kill()
    elif scope == "everything":
        for each in job.hosts:
            each.kill()
    elif scope == "crash":
        host.crash()
    elif scope == "loss":
        host.lose()
    elif scope == "crash of all":
        for each in job.hosts:
            each.crash()
    return [rank for rank in ranks if rank is doomed or rank.status is not None]


def recover(job, scope, host):
    """Start flushers on hosts without processes. A new host replaces a lost one."""
    down = {"crash": [host], "loss": [host]}.get(scope, job.hosts if scope in {"everything", "crash of all"} else [])
    if scope == "loss":
        job.hosts[job.hosts.index(host)] = new = job.new_host()
        down = [new]
    for each in down:
        job.start("flusher", each)


def seeds(operations):
    return [one[3] for one in operations if one[0] != "wait"]


def check_told(job, operations, ranks, alive):
    """A save reported as done is done. A save that failed on one rank failed on all surviving ranks."""
    finished = told(ranks[0], "finished")
    may_stand = [number for number in told(ranks[0], "begin") if passed(ranks[0], "before finish") > number]
    for rank in alive:
        done, failed = told(rank, "done"), told(rank, "failed")
        for number in told(rank, "begin"):
            assert number in done or number in failed, job.logs()
            if operations[number][0] == "wait":
                continue
            assert number not in done or number in finished, f"a save that is none is done\n{job.logs()}"
            assert number in failed or number in may_stand, f"no error of a save that failed\n{job.logs()}"


def passed(child, point):
    return sum(step == point for step, _ in points_of(child))


def check_waited(job, operations, alive, is_up):
    """A rank that waits for a checkpoint succeeds, or learns which files are missing or that its save failed."""
    for rank in alive:
        failed = {line["failed"] for line in job.lines(rank) if "failed" in line}
        for line in job.lines(rank):
            if "failed" in line and operations[line["failed"]][0] == "wait":
                saves = [number for number in range(line["failed"]) if operations[number][0] not in {"wait", "await"}]
                if line["error"] == "NotFoundError":
                    assert failed & set(saves[-1:]), f"{line}\n{job.logs()}"
                    assert "has not finished in this process" in line["message"], line
                    continue
                assert not is_up, f"{line}\n{job.logs()}"
                assert line["error"] == "TimeoutError", f"{line}\n{job.logs()}"
                assert NAMES.search(line["message"]) or "have not reached" in line["message"], line


def check_end(job, mode, kill, operations, ranks, before):
    """Check, with every recoverable host up, which checkpoint is current, and that every complete one was published."""
    finished = [operations[number][3] for number in told(ranks[0], "finished")]
    begun = [operations[number][3] for number in range(passed(ranks[0], "before finish"))]
    is_safe = mode.survives(kill.scope)
    at_least = max([before["seed"], *(finished if is_safe else [])])
    allowed = {seed for seed in (BEFORE, *finished, *begun) if seed >= at_least}
    for host in job.hosts:
        for kind, message in wait_on(job, host, ["ck"], COMPLETE_S if is_safe else INCOMPLETE_S).values():
            assert not is_safe, f"{message}\n{job.logs()}"
            assert kind == "TimeoutError", f"{kind}: {message}\n{job.logs()}"
    views = [job.look()["ck"], *(job.look(host)["ck"] for host in job.hosts)]
    for view in views:
        assert view["seed"] in allowed, f"{view['seed']} stands, and should one of {allowed}\n{job.logs()}"
        assert view["sequence"] >= before["sequence"]
        for sequence, missing in view["waiting"]:
            assert missing, f"a save that is complete was not published: {view}\n{job.logs()}"
            assert sequence > view["sequence"], f"a save that is superseded still waits: {view}\n{job.logs()}"
            assert not is_safe, f"a save that nothing is missing from waits: {view}\n{job.logs()}"
    assert len({view["seed"] for view in views}) == 1, views
    for child in job.children:
        assert "rank" in child.label or "Traceback" not in child.log.read_text(), job.logs()


def await_commit(job):
    """Wait until no save is announced any more. Only flushers are at work."""
    store = bare(job)
    ends = time.monotonic() + COMPLETE_S
    while left := worker.announced(store, "ck"):
        assert time.monotonic() < ends, f"no flusher publishes {left}\n{job.logs()}"
        time.sleep(0.01)


def bare(job):
    return open_bare(parse_url(job.spec["url"]))[0]


def wait_on(job, host, names, timeout_s, **spec):
    """Return why checkpoints are incomplete after the host published its own files: files of other hosts."""
    problems = {"": ["", "have not reached"]}
    ends = time.monotonic() + PATIENCE_S
    while any("have not reached" in message for _, message in problems.values()):
        assert time.monotonic() < ends, f"{problems}\n{job.logs()}"
        problems = job.ask("waiter", host, names=names, timeout=timeout_s, **spec)["problems"]
    assert all(NAMES.search(message) for _, message in problems.values()), f"{problems}\n{job.logs()}"
    return problems


@pytest.fixture(scope="module")
def found_zygotes():
    found = [Zygote(worker.__file__) for _ in range(PARALLEL)]
    yield found
    for zygote in found:
        zygote.close()


@pytest.fixture(scope="module")
def template(found_zygotes):
    with Job(found_zygotes[0], 2) as job:
        for host in job.hosts:
            job.start("flusher", host)
        ranks = job.start_ranks([["async", "ck", "object", BEFORE]])
        assert job.await_end(ranks), job.logs()
        assert job.look()["ck"]["seed"] == BEFORE, job.logs()
        for child in job.children:
            child.kill()
        yield job


# Each mode, and its number of kills.
MODES = {
    "two hosts, staged": (Mode(2, "staged"), 32),
    "two hosts, staged, ram tier alone": (Mode(2, "staged", nvme=0), 14),
    "two hosts, local": (Mode(2, "local"), 18),
    "two hosts, object": (Mode(2, "object"), 10),
    "one host, staged": (Mode(1, "staged"), 18),
    "one host, local": (Mode(1, "local"), 12),
}
SCOPES = {
    1: ["process", "process", "ranks", "everything", "crash"],
    2: ["process", "process", "ranks", "everything", "crash", "loss", "crash of all"],
}
# test_tier_kills covers the steps in between.
STEPS = re.compile(
    "(before|after) (stage|write_data|chunk.seal|draft.seal|announce|finish|put.*|chunk.write|settle.commit|"
    "release.draft|publish.record|finish.release|index.release)|said finish|between"
)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.timeout(600)
def test_a_kill_at_any_step_of_a_save_leaves_the_newest_checkpoint_that_is_complete(found_zygotes, template, name):
    print(f"seed {SEED}")
    noise = random.Random(f"{SEED} {name}")
    mode, count = MODES[name]
    planned = list(plan(mode, steps(found_zygotes[0], template, mode), noise))
    kills = drawn(noise.sample(planned, min(KILLS or count, len(planned))), name)
    waiting = queue.Queue()
    for kill in kills:
        waiting.put(kill)
    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        results = [pool.submit(work, zygote, template, mode, waiting) for zygote in found_zygotes]
    done = [outcome for result in results for outcome in result.result()]
    failures = [f"{kill}\n{error!r}" for kill, error, _ in done if error is not None]
    assert not failures, f"{len(failures)} of {len(kills)} failed\n" + "\n".join(failures[:3])
    reached = sum(reached for *_, reached in done)
    print(f"{len(kills)} kills, {reached} of them where they were to be")
    assert reached >= len(kills) // 2


def work(zygote, template, mode, waiting):
    """Run the waiting kills. Return each kill with its error, if any, and whether it reached its step."""
    done = []
    while True:
        try:
            kill = waiting.get_nowait()
        except queue.Empty:
            return done
        try:
            done.append((kill, None, run(zygote, template, mode, kill)))
        except BaseException as error:
            done.append((kill, error, False))


def steps(zygote, template, mode):
    """Return the steps that each process passes if none dies."""
    with Job(zygote, mode.hosts, template=template, nvme=mode.nvme) as job:
        flushers = [job.start("flusher", host) for host in job.hosts]
        ranks = job.start_ranks(saves(mode, COMPLETE_S))
        assert job.await_end(ranks), job.logs()
        assert job.look()["ck"]["seed"] == BEFORE + 2, job.logs()
        children = {("rank", number): child for number, child in enumerate(ranks)}
        children |= {("flusher", number): child for number, child in enumerate(flushers)}
        return {who: points_of(child) for who, child in children.items()}


def plan(mode, found, noise):
    for (role, number), points in found.items():
        by_step = {}
        for step, visit in points:
            if STEPS.fullmatch(step):
                by_step.setdefault(step, []).append(visit)
        for step, visits in by_step.items():
            yield Kill(
                role, number, (step, noise.choice(visits)), noise.choice(SCOPES[mode.hosts]), noise.random() < 0.5
            )


# -- the job goes on without a host ------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", ["before that is published", "after that is published"])
def test_a_save_on_the_host_that_is_left_stands_whenever_the_other_is_back(found_zygotes, template, back):
    """The other host returns with a part that completes an earlier save."""
    with Job(found_zygotes[0], 2, template=template) as job:
        here, there = job.hosts
        held, go = job.directory / "held", job.directory / "go"
        job.start("flusher", here, hold=["before publish.record"], held_while=str(held))
        (job.directory / "held there").touch()
        job.start("flusher", there, hold=["before publish.record"], held_while=str(job.directory / "held there"))
        both = job.start_ranks([["async", "ck", "local", 2], ["await", str(go)], ["wait", "ck", "local", COMPLETE_S]])
        await_missing(job, "rank-00001")
        job.await_word(both, "done")
        there.crash()
        if back == "before that is published":
            held.touch()
        left = job.start_ranks([["async", "ck", "local", 3]], hosts=[here])
        assert job.await_end(left), job.logs()
        assert told(left[0], "done") == told(left[1], "done") == [0], job.logs()
        if back == "after that is published":
            assert not wait_on(job, here, ["ck"], COMPLETE_S)
            assert job.look(looks_on=True)["ck"]["seed"] == 3
        job.start("flusher", there)
        assert not wait_on(job, there, ["ck"], COMPLETE_S)
        assert job.look(looks_on=True)["ck"]["seed"] == (2 if back == "before that is published" else 3)
        held.unlink(missing_ok=True)
        assert not wait_on(job, here, ["ck"], COMPLETE_S)
        view = job.look(looks_on=True)["ck"]
        assert (view["seed"], view["waiting"]) == (3, []), job.logs()
        go.touch()
        assert both[0].wait() == 0
        (failed,) = [line for line in job.lines(both[0]) if "failed" in line]
        assert failed["error"] == "ConflictError", failed
        assert "superseded" in failed["message"]


def await_missing(job, part):
    """Wait until this part is the only missing file of the announced save."""
    store, ends = bare(job), time.monotonic() + PATIENCE_S
    while [[name.startswith(part) for name in missing] for _, missing in worker.announced(store, "ck")] != [[True]]:
        assert time.monotonic() < ends, job.logs()
        time.sleep(0.01)


# -- at any moment -----------------------------------------------------------------------------------------------------


class History:
    """A job that saves repeatedly, on both hosts or on one, and the saves that must not be lost.

    Args:
        job: The store and the hosts.
        noise: Random decisions.
    """

    def __init__(self, job, noise):
        self.job, self.noise = job, noise
        self._seeds = itertools.count(BEFORE + 1)
        # Saves by name of the checkpoint: all; the last seen as the current one; the last acknowledged at a level that
        # outlives a crash; and the last acknowledged that no crash since can have lost.
        self.begun, self.seen, self.safe, self.finished = {}, {}, {}, {}
        self.rounds = self.saves = self.kills = 0

    def round(self):
        """Run some saves, kill something in the middle, and check the checkpoints."""
        self.rounds += 1
        operations = self._operations()
        hosts = self.noise.choice([self.job.hosts, self.job.hosts, *([host] for host in self.job.hosts)])
        ranks = self.job.start_ranks(operations, hosts=hosts, launches=True)
        self.job.await_word(ranks, "joined")
        time.sleep(self.noise.uniform(0, 1))
        crashes = [self._kill(ranks) for _ in range(self.noise.randint(1, 2))]
        assert self.job.await_end(ranks), f"a rank hangs\n{self.job.logs()}"
        for number in told(ranks[0], "finished"):
            _, name, ack, seed = operations[number]
            self.saves += 1
            if ack == "object":
                self.safe[name] = seed
            elif not any(crashes):
                self.finished[name] = seed
        self._look(looks_on=True)

    def settle(self):
        """Check, with both hosts up, that each checkpoint is at least as new as its last safe save."""
        for host in self.job.hosts:
            wait_on(self.job, host, list(self.begun), INCOMPLETE_S, launches=True)
        found = self._look()
        for name, seed in [*self.safe.items(), *self.finished.items()]:
            assert found[name]["seed"] >= seed, f"{name}: {found[name]} stands, and not {seed}\n{self.job.logs()}"

    def _operations(self):
        operations = []
        for _ in range(self.noise.randint(3, 8)):
            seed = next(self._seeds)
            name = self.noise.choice(["ck", "ck", f"step_{seed}"])
            self.begun.setdefault(name, []).append(seed)
            operations.append(["async", name, self.noise.choice(["staged", "staged", "object"]), seed])
        return operations

    def _kill(self, ranks):
        """Kill a rank, all ranks, a host's flusher, or a host. Return whether memory was lost."""
        self.kills += 1
        time.sleep(self.noise.uniform(0, 0.2))
        host = self.noise.choice(self.job.hosts)
        match self.noise.choice(["rank", "rank", "ranks", "flusher", "flusher", "flusher", "crash"]):
            case "rank":
                self.noise.choice(ranks).kill()
            case "ranks":
                for rank in ranks:
                    rank.kill()
            case "flusher":
                host.kill_flushers()
            case "crash":
                host.crash()
                self.finished = {}  # the crash may have lost them
                return True
        return False

    def _look(self, **spec):
        found = self.job.look(names=list(self.begun), **spec)
        for name, view in found.items():
            assert view["seed"] in {ABSENT, BEFORE, *self.begun[name]}, f"{name}: {view}\n{self.job.logs()}"
            assert view["seed"] >= self.seen.get(name, ABSENT), f"{name}: {view}\n{self.job.logs()}"
            self.seen[name] = view["seed"]
            if "looks_on" not in spec:
                assert all(missing for _, missing in view["waiting"]), f"{name}: {view}\n{self.job.logs()}"
        return found


@pytest.mark.timeout(600)
def test_kills_at_any_moment_leave_the_newest_checkpoint_that_is_complete(found_zygotes, template):
    print(f"seed {SEED}")
    with Job(found_zygotes[0], 2, template=template) as job:
        go_on_for(History(job, random.Random(f"{SEED} at any moment")), KILLS_S)


def go_on_for(history, seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        history.round()
        if history.rounds % 4 == 0:
            history.settle()
    history.settle()
    print(f"{history.rounds} rounds, {history.saves} saves, {history.kills} kills")
    assert history.saves
