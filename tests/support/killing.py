"""Trainers and flushers that kill themselves at a named step; helpers that start them and check the state they leave.

As a program, this module reads requests from standard input, one a line, and forks a process for each. The forked
processes are ordinary ones, without the time that an interpreter takes to start.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
PATIENCE_S = 200  # as `support.waiting.HANG_S`, which this program does not import
UNREACHED_S = 3
WORDS = 64
# The step that a flusher passes when it has opened the nvme tier.
OPENED = "opened"


def content(number, size):
    """Return the content of a file, quick to make and encode. No part of it equals a part of another file."""
    import numpy as np

    words = np.arange(-(-size // 8), dtype=np.uint64) // np.uint64(WORDS) * np.uint64(0x9E3779B97F4A7C15)
    return ((words + np.uint64(number)) ^ np.uint64(size << 20)).astype("<u8").tobytes()[:size]


# -- the processes' work -----------------------------------------------------------------------------------------------


class Hook:
    """Record every step that this process passes. At one step kill the process, or wait while a file exists."""

    def __init__(self, spec):
        self._notes = os.open(spec["points"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._kill = tuple(spec.get("kill") or ())
        self._hold = spec.get("hold") or []
        self._while = spec.get("held_while")
        self._lock = threading.Lock()
        self._counts = Counter()

    def __call__(self, point):
        with self._lock:
            self._counts[point] += 1
            number = self._counts[point]
            os.write(self._notes, f"{point} {number}\n".encode())
            if (point, number) == self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
        if point in self._hold:
            await_file(self._while, gone=True)


def await_file(path, *, gone=False):
    while os.path.exists(path) == gone:
        time.sleep(0.002)


def say(spec, **words):
    data = (json.dumps(words) + "\n").encode()
    fd = os.open(spec["say"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, data)
    os.close(fd)


def use_boot(boot):
    """Pretend that the kernel has another boot id."""
    import tierfs.host.slab.segment_file

    tierfs.host.slab.segment_file.boot_id = lambda: boot


def use_small_shared_memory(room):
    """Limit the segments in shared memory to ``room`` bytes, however much is free."""
    from tierfs.host.slab.budget import RamBudget

    free_bytes = RamBudget.free_bytes

    def free(self, folder, files):
        if folder != self.directory:
            return free_bytes(self, folder, files)
        return room - sum(file.size for file in files if file.path.parent == folder)

    RamBudget.free_bytes = free


def open_with_tiers(spec, ack="staged"):
    from dataclasses import replace

    from tierfs.session import TierOptions, open_store, parse_url
    from tierfs.session.tiers import Launcher

    if not spec.get("launches"):
        Launcher.launch = lambda self: None  # the test starts the flushers
    given = TierOptions(ack=ack, ram=spec["ram"], nvme=spec["nvme"], state_dir=spec["state"], timeout=PATIENCE_S)
    return open_store(replace(parse_url(spec["url"]), tiers=given))[0]


def open_bare(spec):
    from tierfs.session import parse_url
    from tierfs.session.open import open_bare

    return open_bare(parse_url(spec["url"]))[0]


def trainer(spec):
    """Run the operations in turn. Report before and after each one."""
    from tierfs.host.pending.levels import Level
    from tierfs.store import Writer, delete, rename

    if spec.get("boot"):
        use_boot(spec["boot"])
    hook = Hook(spec)
    if spec.get("door"):
        through_fsspec(spec, hook)
        return
    store = open_with_tiers(spec)
    use_hook(store.tiers, hook)
    for number, (what, *arguments) in enumerate(spec["operations"]):
        if number < spec.get("first", 0):
            continue
        say(spec, begin=number)
        if what == "write":
            path, size, level = arguments
            writer = Writer(store, path, level=Level.parse(level))
            data = memoryview(content(number, size))
            for at in range(0, size, spec["piece"]):
                writer.write(data[at : at + spec["piece"]])
            writer.commit()
        elif what == "rename":
            source, target, level = arguments
            store.ack = Level.parse(level)
            rename(store, source, target)
        elif what == "delete":
            path, level = arguments
            store.ack = Level.parse(level)
            delete(store, path)
        elif what == "await":
            await_file(arguments[0])
        say(spec, done=number)
    if "leave" in spec:
        await_file(spec["leave"])


def use_hook(tiers, hook):
    tiers._fault = tiers.writer._fault = hook


def through_fsspec(spec, hook):
    """Run the operations through fsspec, with one level for all of them."""
    import fsspec

    from tierfs.session.tiers import Launcher

    Launcher.launch = lambda self: None
    (ack,) = {one[-1] for one in spec["operations"]}
    given = {"ack": ack, "ram": spec["ram"], "nvme": spec["nvme"], "state_dir": spec["state"], "timeout": PATIENCE_S}
    fs, root = fsspec.url_to_fs("tierfs::" + spec["url"], **given)
    use_hook(fs._locate(f"{root}/x")[0].tiers, hook)
    for number, (what, *arguments) in enumerate(spec["operations"]):
        say(spec, begin=number)
        if what == "write":
            with fs.open(f"{root}/{arguments[0]}", "wb") as file:
                file.write(content(number, arguments[1]))
        elif what == "rename":
            fs.mv(f"{root}/{arguments[0]}", f"{root}/{arguments[1]}")
        else:
            fs.rm(f"{root}/{arguments[0]}")
        say(spec, done=number)
    if "leave" in spec:
        await_file(spec["leave"])


def flusher(spec):
    from tierfs import __version__
    from tierfs.flusher import engine as building
    from tierfs.flusher import queue as flush_queue
    from tierfs.flusher.publish import StorePublisher
    from tierfs.flusher.server import Service
    from tierfs.host.host import Host
    from tierfs.session.settings import TierOptions, resolve

    if spec.get("boot"):
        use_boot(spec["boot"])
    host = Host(Path(spec["state"]))
    publisher = StorePublisher(lambda: open_bare(spec))
    options = TierOptions(ram=spec["ram"], nvme=spec["nvme"], state_dir=spec["state"])
    budgets = resolve(options, spec["uuid"], host_local=True, process_local=False)
    hook, open_nvme = Hook(spec), building._nvme_tier
    flush_queue.LARGE_BYTES_MIN = 0  # small drafts are also uploaded while they move to the nvme tier

    def open_and_say(*arguments):
        tier = open_nvme(*arguments)
        hook(OPENED)
        return tier

    building._nvme_tier = open_and_say
    engine = building.build_engine(
        host,
        spec["uuid"],
        None,
        ram_bytes=budgets.ram_bytes,
        nvme_bytes=budgets.nvme_bytes,
        bandwidth=budgets.bandwidth,
        publisher=publisher,
        faults=hook,
    )
    service = Service(engine, host.store_directory(spec["uuid"]), version=__version__, linger_s=PATIENCE_S)
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    assert service.run()


def reader(spec):
    """Open the store as the next trainer does. Wait until all drafts are published and no slot is dirty."""
    from tierfs.host.pending.levels import Level
    from tierfs.store import wait

    store = open_with_tiers(spec)
    seen = look(store, spec)
    wait(store, "", Level.OBJECT, PATIENCE_S)
    ends = time.monotonic() + PATIENCE_S / 4
    store.tiers.writer.announce()
    while (left := leaks(store.tiers.ram)) and time.monotonic() < ends:
        time.sleep(0.01)
    say(spec, seen=seen, settled=look(store, spec), leaks=left, pending=sorted(store.tiers.drafts.pending_below("")))


def asker(spec):
    """Open the store, optionally discard a conflict, and report the remaining conflicts and dirty slots."""
    from tierfs.store import discard_conflict

    store = open_with_tiers(spec)
    discarded = discard_conflict(store, spec["discards"]) if "discards" in spec else 0
    wanted = [] if discarded else [spec["waits_for"]]
    ends = time.monotonic() + PATIENCE_S / 4
    store.tiers.writer.announce()
    while time.monotonic() < ends:
        kept = [item["path"] for item in store.tiers.flusher.request("status", {})["conflicts"]]
        left = leaks(store.tiers.ram) if discarded else []
        if kept == wanted and not left:
            break
        time.sleep(0.01)
    say(spec, discarded=discarded, conflicts=kept, leaks=left)


def leaks(ram):
    """Return the slots that are neither free nor clean, and whether their owner lives. Expects all drafts published."""
    from tierfs.host.slab.table import SlotState

    states = set(SlotState) - {SlotState.FREE, SlotState.CLEAN}
    return [
        [slot.kind.name, slot.state.name, slot.length, ram.host.is_alive(segment.owner)]
        for segment in ram.segments()
        for slot in segment.slots(states=states)
    ]


def auditor(spec):
    """Check the store without any flusher or local tier. Check the nvme tier after its flusher has ended."""
    from tierfs.clock import SystemClock
    from tierfs.host.host import Host
    from tierfs.host.nvme.tier import NvmeTier
    from tierfs.store import verify

    store = open_bare(spec)
    report = {"seen": look(store, spec), "damage": [str(damage) for damage in verify(store).damage]}
    if spec.get("nvme") and spec.get("opens_nvme"):
        tier = NvmeTier(
            Host(Path(spec["state"])).store_directory(spec["uuid"]), budget_bytes=spec["nvme"], clock=SystemClock()
        )
        usage = tier.usage()
        report["nvme"] = {
            "dirty_bytes": usage.dirty_bytes,
            "drafts": usage.drafts + usage.conflicts,
            "fallbacks": dict(usage.fallbacks),
        }
    say(spec, **report)


def look(store, spec):
    """Return which operation wrote each file's content, or -1 if no operation wrote it."""
    from tierfs.errors import NotFoundError
    from tierfs.store import find, load

    found = {}
    writes = [(number, one[2]) for number, one in enumerate(spec["operations"]) if one[0] == "write"]
    for entry in find(store, ""):
        if entry.is_directory:
            continue
        try:
            data = load(store, entry.path)
        except NotFoundError:
            continue  # renamed or deleted since it was listed
        matches = [number for number, size in writes if size == len(data) and content(number, size) == data]
        found[entry.path] = matches[0] if matches else -1
    return found


ROLES = {"trainer": trainer, "flusher": flusher, "reader": reader, "asker": asker, "auditor": auditor}


def main():
    # Import here everything that the forked processes need. Nothing is opened, and no thread runs.
    import gc
    import sqlite3  # noqa: F401

    import fsspec.implementations.local  # noqa: F401
    import numpy as np  # noqa: F401
    import zstandard  # noqa: F401

    import tierfs.flusher.engine
    import tierfs.flusher.publish
    import tierfs.flusher.server
    import tierfs.fs.filesystem
    import tierfs.session.tiers
    import tierfs.store.encode.encoder
    import tierfs.store.maintenance.gc.run  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "await" in request:
            _, status = os.waitpid(request["await"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if not pid:
                become(request)
                return
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def become(spec):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if spec.get("group"):
        os.setpgid(0, 0 if spec["group"] is True else spec["group"])
    os.environ["TIERFS_STATE_DIR"], os.environ["TIERFS_SHM_DIR"] = spec["state"], spec["shm"]
    if spec.get("shm_room") is not None:
        use_small_shared_memory(spec["shm_room"])
    # Processes die here, but the kernel does not. So shared memory is as durable as a disk, and much faster.
    import tierfs.host.nvme.tier
    import tierfs.session.tiers

    tierfs.host.nvme.tier.is_durable = tierfs.session.tiers.is_durable = lambda _: True
    ROLES[spec["role"]](spec)


# -- how tests start them ----------------------------------------------------------------------------------------------


class Zygote:
    """Fork the processes of one case after another.

    Args:
        program: The forking program: this module, or one that adds roles to it and calls its `main`.
        *arguments: Arguments of the program.
    """

    def __init__(self, program=__file__, *arguments):
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._replies = self._process.stdout

    def ask(self, **request):
        with self._lock:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            line = b""
            while not line.endswith(b"\n"):
                piece = self._replies.read(4096)
                assert piece, "the process that forks is gone"
                line += piece
            return json.loads(line)

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._replies.close()


class Child:
    """A forked process."""

    def __init__(self, zygote, spec):
        self._zygote = zygote
        self.pid = zygote.ask(**spec)["pid"]
        self._handle = os.pidfd_open(self.pid)
        self._poll = select.poll()  # unlike select(2), it supports descriptors of 1024 and above
        self._poll.register(self._handle, select.POLLIN)
        self.status = None

    def has_ended(self, timeout_s=0.0):
        return self.status is not None or bool(self._poll.poll(timeout_s * 1000))

    def wait(self, timeout_s=PATIENCE_S):
        if self.status is None:
            assert self.has_ended(timeout_s), f"process {self.pid} does not end"
            self.status = self._zygote.ask(**{"await": self.pid})["status"]
            os.close(self._handle)
        return self.status

    def send(self, number):
        if not self.has_ended():
            os.kill(self.pid, number)

    def kill(self):
        self.send(signal.SIGKILL)
        return self.wait()


def write(path, size, level):
    return ["write", path, size, level]


@dataclass
class Mode:
    """The tiers' setup and the trainer's operations."""

    operations: list
    ram: int = 64 * MIB
    nvme: int = 96 * MIB
    piece: int = MIB
    door: bool = False
    shm_room: int | None = None
    states: list = field(init=False)

    def __post_init__(self):
        """Compute the state after each operation: for every path, the number of the operation that wrote it."""
        self.states = [{}]
        for number, (what, *arguments) in enumerate(self.operations):
            state = dict(self.states[-1])
            if what == "write":
                state[arguments[0]] = number
            elif what == "rename":
                state[arguments[1]] = state.pop(arguments[0])
            elif what == "delete":
                del state[arguments[0]]
            self.states.append(state)

    def after_a_crash(self, done):
        """Return the states allowed when ``done`` operations were acknowledged and one more may have begun."""
        allowed = [self.states[done]]
        if done < len(self.operations):
            allowed.append(self.states[done + 1])
            if self.operations[done][0] == "rename":
                source = self.operations[done][1]
                allowed.append({**self.states[done + 1], source: self.states[done][source]})
        return allowed

    def after_a_loss(self, done):
        """Return the states allowed if all data outside the nvme tier was lost.

        Everything up to the last operation that was acknowledged as `local` must be there.
        """
        return [state for number in range(self.local_after(done), done + 1) for state in self.after_a_crash(number)]

    def local_after(self, done):
        """Return how many of ``done`` acknowledged operations survive such a loss."""
        return max(
            (at + 1 for at, one in enumerate(self.operations[:done]) if one[-1] in {"local", "object"}), default=0
        )

    def is_at_least(self, path, value, number):
        """Return whether a path's value is the one after operation ``number`` or a later one."""
        return any(state.get(path) == value for state in self.states[number + 1 :])

    def paths(self):
        return {path for state in self.states for path in state}

    def check_order(self, seen, acknowledged=()):
        """Check the object tier: files are whole, and none is older than acknowledged or than ``latest`` says."""
        assert -1 not in seen.values(), f"a file that nobody wrote: {seen}"
        for path, value in seen.items():
            assert self.is_at_least(path, value, 0), f"{path} was never that"
        if "latest" in seen:
            for path in self.paths():
                ok = self.is_at_least(path, seen.get(path), seen["latest"])
                assert ok, f"latest is of {seen['latest']}, and {path} still of {seen.get(path)}: {seen}"
        for number in acknowledged:
            what, *arguments = self.operations[number]
            for path in arguments[: 2 if what == "rename" else 1]:
                assert self.is_at_least(path, seen.get(path), number), f"{path} was acknowledged at 'object': {seen}"


class Case:
    """One host, one store, one trainer."""

    def __init__(self, zygote, mode, directory, shared):
        from tierfs.objects import LocalObjects
        from tierfs.store.create import create_store

        self.zygote, self.mode = zygote, mode
        self.directory = Path(tempfile.mkdtemp(dir=directory))
        self.shm = Path(tempfile.mkdtemp(dir=shared))
        url = f"file://{self.directory}/store"
        self.objects = LocalObjects(self.directory / "store")
        self.descriptor, _ = create_store(self.objects, url, random_bytes=os.urandom(16))
        self.common = {
            "url": url,
            "uuid": self.descriptor.uuid,
            "state": f"{self.directory}/state",
            "shm": str(self.shm),
            "ram": mode.ram,
            "nvme": mode.nvme,
            "piece": mode.piece,
            "door": mode.door,
            "shm_room": mode.shm_room,
            "operations": mode.operations,
        }
        self.children = []
        self._numbers = itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for child in self.children:
            child.kill()
        if kind is None or not os.environ.get("TIERFS_TEST_KEEP"):
            shutil.rmtree(self.directory)
            shutil.rmtree(self.shm)
        else:
            print(f"kept: {self.directory} {self.shm}")

    def file(self, name):
        return self.directory / name

    def start(self, role, **spec):
        number = next(self._numbers)
        names = {name: str(self.file(f"{number}-{role}.{name}")) for name in ("say", "points", "log")}
        child = Child(self.zygote, {**self.common, **names, "role": role, **spec})
        child.said, child.points, child.log = (Path(names[name]) for name in ("say", "points", "log"))
        self.children.append(child)
        return child

    def ask(self, role, **spec):
        """Run a process in a role and return its report."""
        child = self.start(role, **spec)
        assert child.wait() == 0, self.logs()
        return json.loads(child.said.read_text())

    def lines(self, child):
        return [json.loads(line) for line in child.said.read_text().splitlines()] if child.said.exists() else []

    def done(self, trainer):
        """Return how many operations a trainer reported as done."""
        return max((line["done"] + 1 for line in self.lines(trainer) if "done" in line), default=0)

    def await_done(self, trainer, count=None):
        """Wait until a trainer has done ``count`` operations, or all of them."""
        ends = time.monotonic() + PATIENCE_S
        count = len(self.mode.operations) if count is None else count
        while self.done(trainer) < count:
            assert not trainer.has_ended(0.005), self.logs()
            assert time.monotonic() < ends, self.logs()

    def await_conflict(self, flusher):
        """Wait until a flusher has logged a conflict."""
        ends = time.monotonic() + PATIENCE_S
        while not (flusher.log.exists() and "conflict" in flusher.log.read_text()):
            assert not flusher.has_ended(0.005), self.logs()
            assert time.monotonic() < ends, self.logs()

    def object_acknowledged(self, done):
        return [number for number, one in enumerate(self.mode.operations[:done]) if one[-1] == "object"]

    def logs(self):
        texts = {child.log.name: child.log.read_text().strip() for child in self.children if child.log.exists()}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items() if text)

    def check_right_now(self, trainer):
        """Check that the object tier is consistent, whether processes are dead or running."""
        done = self.done(trainer) if trainer is not None else 0
        report = self.ask("auditor")
        assert not report["damage"], report["damage"]
        self.mode.check_order(report["seen"], self.object_acknowledged(done))

    def check_all_went_down(self, allowed, flusher):
        """Let a running flusher publish everything, end it, and check the content of every tier."""
        said = self.ask("reader")
        assert said["seen"] in allowed, f"the host sees {said['seen']}, and should {allowed}\n{self.logs()}"
        assert said["settled"] == said["seen"]
        assert not said["leaks"], f"{said['leaks']}\n{self.logs()}"
        assert not said["pending"]
        flusher.send(signal.SIGTERM)
        assert flusher.wait() == 0, self.logs()
        report = self.ask("auditor", opens_nvme=True)
        assert report["seen"] == said["seen"], f"{report['seen']} is in the object tier, not {said['seen']}"
        assert not report["damage"], report["damage"]
        if self.mode.nvme:
            nvme = report["nvme"]
            assert (nvme["dirty_bytes"], nvme["drafts"]) == (0, 0), f"{nvme}\n{self.logs()}"
            assert "drafts_damaged" not in nvme["fallbacks"]
        assert "Traceback" not in self.logs(), self.logs()


def points_of(child):
    """Return the steps that a process passed, in order, as (name, number of passes so far)."""
    lines = child.points.read_text().splitlines() if child.points.exists() else []
    return [(line.rpartition(" ")[0], int(line.rpartition(" ")[2])) for line in lines]


def dry_run(case):
    """Kill nothing. Return the steps that the trainer and the flusher pass."""
    flusher = case.start("flusher")
    trainer = case.start("trainer")
    assert trainer.wait() == 0, case.logs()
    case.check_all_went_down([case.mode.states[-1]], flusher)
    return points_of(trainer), points_of(flusher)


def kill_flusher(case, point):
    """Kill the flusher at this step and start another. The trainer must not notice.

    Returns whether the flusher reached the step. Its threads may run in another order; then it is killed at the end.
    """
    first = case.start("flusher", kill=point)
    trainer = case.start("trainer", leave=str(case.file("leave")))
    done_at = None
    while not first.has_ended(0.005):
        assert not trainer.has_ended(), case.logs()
        if done_at is None and case.done(trainer) == len(case.mode.operations):
            done_at = time.monotonic()
        if done_at is not None and time.monotonic() > done_at + UNREACHED_S:
            break
    reached = first.has_ended()
    assert first.kill() == -signal.SIGKILL, case.logs()
    case.check_right_now(trainer)
    second = case.start("flusher")
    case.await_done(trainer)
    case.file("leave").touch()
    assert trainer.wait() == 0, case.logs()
    case.check_all_went_down([case.mode.states[-1]], second)
    return reached


HOLD = ("before chunk.write", "before settle.commit", "before upload.chunk", "before publish.record")


def kill_trainer(case, point, *, held=False):
    """Kill the trainer at this step. All operations acknowledged to it must reach the object tier.

    Returns whether the trainer reached the step.

    Args:
        case: The case.
        point: The step.
        held: Whether the flusher does nothing until the trainer is dead.
    """
    case.file("held").touch()
    flusher = case.start("flusher", hold=HOLD if held else (), held_while=str(case.file("held")))
    trainer = case.start("trainer", kill=point)
    status = trainer.wait()
    case.check_right_now(trainer)
    case.file("held").unlink()
    assert status in {0, -signal.SIGKILL}, case.logs()
    case.check_all_went_down(case.mode.after_a_crash(case.done(trainer)), flusher)
    return status != 0


def kill_both(case, point, *, first="flusher"):
    """Kill one process at this step and the other right after it, at any step. Return whether the first got there."""
    flusher = case.start("flusher", kill=point if first == "flusher" else ())
    trainer = case.start("trainer", kill=point if first == "trainer" else ())
    while not flusher.has_ended(0.002) and not trainer.has_ended():
        pass
    reached = (flusher if first == "flusher" else trainer).has_ended()
    trainer.kill()
    flusher.kill()
    case.check_right_now(trainer)
    case.check_all_went_down(case.mode.after_a_crash(case.done(trainer)), case.start("flusher"))
    return reached


def kill_trainer_sometime(case, after_s):
    """Kill the trainer ``after_s`` seconds after its start, at any step. Return whether that was before it finished."""
    flusher = case.start("flusher")
    trainer = case.start("trainer")
    while not case.lines(trainer):
        assert not trainer.has_ended(0.002), case.logs()
    trainer.has_ended(after_s)
    status = trainer.kill()
    case.check_right_now(trainer)
    case.check_all_went_down(case.mode.after_a_crash(case.done(trainer)), flusher)
    return status != 0


# -- flushers that die while they open the nvme tier -------------------------------------------------------------------


def lose(path):
    path.unlink()


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def overwrite(path):
    path.write_bytes(b"garbage" * (os.path.getsize(path) // 7))


DAMAGES = {damage.__name__: damage for damage in (lose, cut, overwrite)}
UPLOADS = ("before upload.chunk", "before publish.record")


@dataclass
class Life:
    """The conditions under which one flusher starts, and the step at which it dies."""

    damage: str = ""
    nvme: int = 0
    kill: tuple = ()


def fill_nvme(case, *, kill=(), forget=True):
    """Run a trainer's operations, then kill the flusher. Drafts after the ``await`` get no further than the nvme tier.

    Args:
        case: The case.
        kill: The step at which the flusher dies. If empty, it is killed when the trainer has done everything.
        forget: Whether to kill the trainer and delete shared memory as well, so that only the nvme tier is left.

    Returns:
        Flusher and trainer.
    """
    number = [one[0] for one in case.mode.operations].index("await")
    flusher = case.start("flusher", kill=kill, hold=UPLOADS, held_while=str(case.file("held")))
    operations = [["await", str(case.file("go"))] if one[0] == "await" else one for one in case.mode.operations]
    trainer = case.start("trainer", operations=operations, leave=str(case.file("leave")))
    await_done_or_end(case, trainer, number, flusher)
    case.file("held").touch()
    case.file("go").touch()
    await_done_or_end(case, trainer, len(operations), flusher)
    flusher.kill()
    case.file("held").unlink()
    if forget:
        trainer.kill()
        for path in case.shm.iterdir():
            shutil.rmtree(path)
    return flusher, trainer


def await_done_or_end(case, trainer, count, flusher):
    ends = time.monotonic() + PATIENCE_S
    while case.done(trainer) < count and not flusher.has_ended():
        assert not trainer.has_ended(0.002), case.logs()
        assert time.monotonic() < ends, case.logs()


def open_and_die(case, life):
    """Start a flusher that dies while it opens the nvme tier. Return it, and whether it reached the step."""
    if life.nvme:
        case.common["nvme"] = life.nvme
    for path in case.directory.glob("state/stores/*/nvme/head") if life.damage else ():
        DAMAGES[life.damage](path)
    flusher = case.start("flusher", kill=life.kill)
    while not flusher.has_ended(0.002) and (OPENED, 1) not in points_of(flusher):
        pass
    reached = flusher.has_ended()
    if life.kill:
        assert flusher.kill() == -signal.SIGKILL, case.logs()
    return flusher, reached


def filling_points(case):
    """Return the steps of a flusher that only fills the nvme tier. No process dies at a step."""
    flusher, _ = fill_nvme(case)
    case.check_all_went_down([case.mode.states[-1]], case.start("flusher"))
    return points_of(flusher)


def opening_points(case, *lives, filling=()):
    """Return the steps that the last of these flushers passes until it has opened the nvme tier."""
    _, trainer = fill_nvme(case, kill=filling)
    for life in lives:
        flusher, _ = open_and_die(case, life)
    case.check_all_went_down(case.mode.after_a_loss(case.done(trainer)), flusher)
    points = points_of(flusher)
    return points[: points.index((OPENED, 1))]


def kill_while_opening(case, lives, *, filling=(), forget=True):
    """Kill one flusher after another while it opens the nvme tier. Everything `local` must reach the object tier.

    Args:
        case: The case.
        lives: One for each flusher.
        filling: The step at which the first flusher dies, which fills the nvme tier.
        forget: See `fill_nvme`.

    Returns:
        How many flushers reached the step at which they were to die.
    """
    _, trainer = fill_nvme(case, kill=filling, forget=forget)
    reached = 0
    for life in lives:
        reached += open_and_die(case, life)[1]
        case.check_right_now(trainer)
    flusher = case.start("flusher")
    if forget:
        case.check_all_went_down(case.mode.after_a_loss(case.done(trainer)), flusher)
        return reached
    case.await_done(trainer)
    case.file("leave").touch()
    assert trainer.wait() == 0, case.logs()
    case.check_all_went_down([case.mode.states[-1]], flusher)
    return reached


def kill_while_making(case, points):
    """Kill one flusher after another while it creates the nvme tier and a trainer waits for it."""
    trainer = case.start("trainer", leave=str(case.file("leave")))
    reached = sum(open_and_die(case, Life(kill=point))[1] for point in points)
    case.check_right_now(trainer)
    flusher = case.start("flusher")
    case.await_done(trainer)
    case.file("leave").touch()
    assert trainer.wait() == 0, case.logs()
    case.check_all_went_down([case.mode.states[-1]], flusher)
    return reached


@contextlib.contextmanager
def zygotes(count):
    found = [Zygote() for _ in range(count)]
    try:
        yield found
    finally:
        for zygote in found:
            zygote.close()


if __name__ == "__main__":
    main()
