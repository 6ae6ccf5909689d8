"""After a crash before or after any ordered step, acknowledged data is intact and no draft is incomplete."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.nvme_tools import Crash, Steps, content_of, draft, open_tier, read, save, write
from support.waiting import HANG_S

from tierfs.host.nvme.reader import NvmeReader

LAST = 99999
# Path of each draft, and the numbers of its chunks.
NEEDS = {
    "a": (1, 2),
    "b": (2, 3),
    "g": (),
    "c": (4,),
    "d": (5, 6, 7),
    "e1": (8,),
    "e2": (8, 9),
    "f": (1, 10),
}


class Story:
    """A sequence of operations on the tier, and the results that its callers were given."""

    def __init__(self, directory, steps):
        self.directory = directory
        self.steps = steps
        self.tier = None
        self.safe = set()  # acknowledged, and not to be published yet
        self.gone = set()  # publishing has returned
        self.doubtful = set()  # an operation on the path was in flight
        self.seqs = {}

    def commit(self, *some):
        self.doubtful |= set(some)
        drafts = [draft(path, write(self.tier, *NEEDS[path])) for path in some]
        self.seqs.update(zip(some, self.tier.commit(drafts), strict=True))
        self.doubtful -= set(some)
        self.safe |= set(some)

    def publish(self, *some):
        self.safe -= set(some)
        self.doubtful |= set(some)
        self.tier.forget_drafts(*(self.seqs[path] for path in some))
        self.doubtful -= set(some)
        self.gone |= set(some)

    def open(self, budget=3 << 20):
        self.tier = open_tier(self.directory, faults=self.steps, budget=budget)

    def run(self):
        self.open()
        self.commit("a")
        self.commit("b", "g")
        self.tier.keep_as_conflict(self.seqs["b"], "why")
        self.publish("a")
        self.tier.quarantine(content_of(1)[0])
        write(self.tier, 20, 21, keep=False)
        self.tier.evict()
        self.commit("c")
        self.open(budget=2 << 20)
        self.commit("d", "e1")
        self.publish("e1", "g")
        self.commit("e2")  # makes room by eviction
        self.publish("c")
        write(self.tier, 30, 31, 32, 33, keep=False)
        self.commit("f")
        assert self.tier.usage().evicted_bytes, "the story lacks the eviction that makes room"

    def crash(self):
        with contextlib.suppress(Crash):
            self.run()

    def check(self, tier):
        found = {item.path: item for item in tier.drafts()}
        assert self.safe <= set(found)
        assert not set(found) & self.gone
        assert set(found) <= self.safe | self.doubtful
        for path, item in found.items():
            assert item.state in ("pending", "conflict"), (path, item)
            assert item.data == f"manifest of {path}".encode()
            assert all(read(tier, number) for number in NEEDS[path]), path
        reader = NvmeReader(self.directory)
        for number in range(1, 34):
            read(reader, number)  # absent or correct
        assert {item.path for item in reader.drafts_below("", conflicts=True)} == set(found)
        for path, item in found.items():
            assert [each.path for each in reader.drafts_below(path, conflicts=True)] == [path]
            assert item.state == "conflict" or reader.draft(path).write_id == item.write_id
        order = [item.path for item in tier.drafts() if item.path in self.seqs]
        assert order == sorted(order, key=list(NEEDS).index)


@pytest.fixture
def memory(tmp_path):
    """A directory in memory, where flushing costs nothing. A crash of the process keeps all writes, flushed or not."""
    shm = "/dev/shm"
    if not os.access(shm, os.W_OK) or os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize < 64 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="tierfs-test-", dir=shm) as directory:
        yield Path(directory)


def total_steps(tmp_path):
    steps = Steps()
    story = Story(tmp_path / "rehearsal", steps)
    story.run()
    story.check(story.tier)
    return len(steps.points)


def test_a_crash_at_any_step_loses_nothing_and_leaves_nothing_half_there(memory):
    total = total_steps(memory)
    assert total > 100
    for crash_at in range(total):
        story = Story(memory / "n", Steps(crash_at))
        story.crash()
        tier = open_tier(story.directory)
        try:
            story.check(tier)
            # The tier works as usual.
            tier.forget_drafts(*(item.seq for item in tier.drafts()))
            save(tier, "after", 50, 1, 2)
            assert read(tier, 50)
            left = {file.name for file in (story.directory / "nvme").rglob("new*")}
            assert not left
        except BaseException:
            print(f"after a crash at {crash_at}: {story.steps.points[crash_at - 1 : crash_at + 1]}")
            raise
        tier = open_tier(story.directory)
        assert [item.path for item in tier.drafts()] == ["after"], (crash_at, story.steps.points[crash_at - 1])
        shutil.rmtree(story.directory, ignore_errors=True)


class PowerLoss(Steps):
    """Remember what is durable, and restore it: the host lost its power.

    The bytes of a file are durable after `os.fdatasync` of it, its name after `os.fsync` of the directory. Renames and
    removals that were not flushed are undone in one case, and kept in the other.
    """

    def __init__(self, crash_at, directory, monkeypatch, *, undone):
        super().__init__(crash_at)
        self.directory = directory
        self.undone = undone
        self.bytes = {}  # by inode
        self.names = {}  # by directory, then by name: inodes
        self.held = contextlib.ExitStack()  # open files, whose inodes no later file gets
        fdatasync, fsync = os.fdatasync, os.fsync

        def flush(fd):
            fdatasync(fd)
            self.bytes[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()
            self.held.callback(os.close, os.dup(fd))

        def flush_names(fd):
            fsync(fd)
            place = Path(os.readlink(f"/proc/self/fd/{fd}"))
            entries = [entry for entry in os.scandir(place) if entry.is_file()]
            self.names[place] = {entry.name: entry.inode() for entry in entries}
            for entry in entries:
                self.held.callback(os.close, os.open(entry, os.O_RDONLY))

        monkeypatch.setattr(os, "fdatasync", flush)
        monkeypatch.setattr(os, "fsync", flush_names)

    def lose_power(self):
        """Leave of each file in the directories of chunks and drafts what is durable."""
        self.held.close()
        for part in ("chunks", "drafts"):
            place = self.directory / "nvme" / part
            if not place.exists():
                continue
            now = {entry.name: entry.inode() for entry in os.scandir(place)}
            contents = {entry.inode(): Path(entry.path).read_bytes() for entry in os.scandir(place)}
            for name in now:
                (place / name).unlink()
            for name, inode in (self.names.get(place, {}) if self.undone else now).items():
                # A file that is being overwritten may have any part of its new bytes.
                found = contents.get(inode, b"") if not self.undone else self.bytes.get(inode, b"")
                (place / name).write_bytes(
                    found if part == "drafts" or inode in self.bytes else found[: len(found) // 2]
                )


@pytest.mark.parametrize("undone", [True, False])
def test_a_host_that_loses_its_power_at_any_step_keeps_what_was_acknowledged(memory, monkeypatch, undone):
    for crash_at in range(0, total_steps(memory), 2):
        with monkeypatch.context() as patch:
            steps = PowerLoss(crash_at, memory / "n", patch, undone=undone)
            story = Story(memory / "n", steps)
            story.crash()
        steps.lose_power()
        tier = open_tier(story.directory)
        story.check(tier)
        shutil.rmtree(story.directory)


CHILD = """
import os, signal, sys
sys.path[:0] = {path!r}
from pathlib import Path
from support.nvme_tools import open_tier, save, write
kill_at, seen = {kill_at}, 0

def steps(point):
    global seen
    seen += 1
    if seen == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

tier = open_tier(Path({directory!r}), faults=steps)
for number in range(1000):
    seq = save(tier, f"f{{number}}", number, 5000 + number // 3)
    os.write(1, f"saved {{number}}\\n".encode())
    if number % 2:
        os.write(1, f"publishing {{number}}\\n".encode())
        tier.forget_drafts(seq)
        os.write(1, f"published {{number}}\\n".encode())
    write(tier, 9000 + number, keep=False)
    if len(tier.drafts()) > 3:
        first = tier.drafts()[0]
        os.write(1, f"publishing {{first.path[1:]}}\\n".encode())
        tier.forget_drafts(first.seq)
        os.write(1, f"published {{first.path[1:]}}\\n".encode())
"""


def told(output):
    events = {"saved": set(), "publishing": set(), "published": set()}
    for line in output.decode().splitlines():
        what, number = line.split()
        events[what].add(int(number))
    return events


def check_killed(directory, events):
    tier = open_tier(directory)
    found = {int(item.path[1:]): item for item in tier.drafts()}
    assert events["saved"] - events["publishing"] <= set(found)
    assert not set(found) & events["published"]
    for number, item in found.items():
        assert item.state == "pending"
        assert read(tier, number)
        assert number == LAST or read(tier, 5000 + number // 3)
    save(tier, f"f{LAST}", LAST)


@pytest.mark.parametrize("kill_at", [20, 61, 62, 63, 64, 71, 150])
def test_a_process_that_is_killed_at_a_step_leaves_what_it_acknowledged(tmp_path, kill_at):
    directory = str(tmp_path / "n")
    script = CHILD.format(path=sys.path, kill_at=kill_at, directory=directory)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    check_killed(tmp_path / "n", told(done.stdout))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_process_that_is_killed_at_any_time_leaves_what_it_acknowledged(tmp_path, seed):
    script = CHILD.format(path=sys.path, kill_at=0, directory=str(tmp_path / "n"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    first = os.read(process.stdout.fileno(), 65536)
    time.sleep(random.Random(seed).uniform(0.05, 0.4))
    process.kill()
    rest = process.stdout.read()
    process.stdout.close()
    process.wait()
    events = told(first + rest)
    assert events["saved"]
    check_killed(tmp_path / "n", events)
