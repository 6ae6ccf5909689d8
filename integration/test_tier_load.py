"""Many processes on one host, with tiers too small for their work: nothing is lost, mixed up or left over."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import describing
import fsspec
import pytest
import s3server
import tier_load_worker
from leftovers import end_flushers, flushers
from tier_load_worker import NAMES, RACES

import tierfs
from tierfs.host.host import Host
from tierfs.store import Store, verify

HERE = Path(__file__).parent
SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
# TIERFS_TEST_LOAD_S=15 is a quick run, 3600 a long one.
SECONDS = float(os.environ.get("TIERFS_TEST_LOAD_S", "60"))
S3_SHARE = 0.4
PATIENCE_S = 150
WRITERS, READERS = 8, 4
RAM = NVME = "192MiB"

pytestmark = pytest.mark.filterwarnings("default")


class Load:
    """The processes of one run, and their results."""

    def __init__(self, directory, url, options, *, seconds, writers=WRITERS, readers=READERS, races=True):
        self.directory, self.url, self.options = directory, url, options
        self.roles = [("writer", number) for number in range(writers)]
        self.roles += [("reader", number) for number in range(readers)]
        self.seconds = seconds
        (directory / "results").mkdir()
        spec = {
            "seed": SEED,
            "url": url,
            "options": options,
            "table": str(directory / "table"),
            "results": str(directory / "results"),
            "writers": writers,
            "races": races,
            "ends": time.time() + seconds,
        }
        tier_load_worker.Table.make(spec["table"], writers)
        self.spec = directory / "spec.json"
        self.spec.write_text(json.dumps(spec))

    def run(self):
        """Run to the end, or fail with the stacks of the processes that hang."""
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(HERE)}
        with contextlib.ExitStack() as stack:
            processes = {}
            for role, number in self.roles:
                log = stack.enter_context(open(self.directory / f"{role}{number}.log", "wb"))
                argv = [sys.executable, str(HERE / "tier_load_worker.py"), str(self.spec), role, str(number)]
                process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
                stack.callback(_end, process)
                processes[f"{role}{number}"] = process
            deadline = time.monotonic() + self.seconds + PATIENCE_S
            while any(process.poll() is None for process in processes.values()):
                if time.monotonic() > deadline:
                    self._dump(processes)
                time.sleep(0.1)
        results = {}
        for name, process in processes.items():
            found = self.directory / "results" / f"{name}.json"
            said = json.loads(found.read_text()) if found.exists() else {"failed": "no result"}
            assert process.returncode == 0, f"{name}: {process.returncode}\n{self.log(name)}"
            results[name] = said
        failed = {name: said for name, said in results.items() if "failed" in said}
        assert not failed, "\n".join(
            f"{name}: {said['failed']}\n{said.get('status')}\n{self.log(name)}" for name, said in failed.items()
        )
        return results

    def log(self, name):
        return (self.directory / f"{name}.log").read_text()[-3000:]

    def _dump(self, processes):
        stuck = {name: process for name, process in processes.items() if process.poll() is None}
        for process in stuck.values():
            process.send_signal(signal.SIGUSR1)
        flusher = dump_flushers(self.directory)
        time.sleep(3)
        logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in stuck)
        pytest.fail(f"seed {SEED}: {sorted(stuck)} hang\n{logs}\n--- flusher\n{flusher}")


def dump_flushers(directory):
    """Return the stacks of the flushers of a state directory, by py-spy, or by faulthandler, which ends them."""
    dumps = []
    for pid in flushers(directory):
        spy = shutil.which("py-spy")
        if spy:
            done = subprocess.run([spy, "dump", "--pid", str(pid)], check=False, capture_output=True, text=True)
            dumps.append(done.stdout + done.stderr)
        else:
            os.kill(pid, signal.SIGABRT)
            time.sleep(1)
    logs = [path.read_text()[-8000:] for path in directory.glob("state/stores/*/flusher.log")]
    return "\n".join(dumps + logs)


def _end(process):
    if process.poll() is None:
        process.kill()
    process.wait()


def summed(results):
    total = Counter()
    for said in results.values():
        total.update(said["counts"])
    return dict(total)


def judge(load, results, store):
    """Check the result of a run: all writes are in the object tier, and nothing is pending or damaged."""
    fs, root = fsspec.url_to_fs(load.url, **load.options)
    fs.wait(root, "object", PATIENCE_S)
    report = fs.status(root)
    assert report["queue_files"] == 0, report
    assert report["conflicts"] == report["errors"] == [], report
    assert report["tiers"]["ram"]["dirty_bytes"] == report["tiers"]["nvme"]["dirty_bytes"] == 0, report
    total = summed(results)
    print(f"seed {SEED}: {total}; {report['counters']}")
    # The tiers stayed within their small budgets.
    for tier in ("ram", "nvme"):
        assert report["tiers"][tier]["used_bytes"] <= report["tiers"][tier]["budget_bytes"]
    # Through the local tiers, and from the object tier alone.
    plain, _ = fsspec.url_to_fs(load.url, **{**load.options, "ram": "0", "nvme": "0", "ack": "object"})
    for where in (fs, plain):
        increments = 0
        lists = {str(race): [] for race in range(RACES)}
        for name, said in results.items():
            if not name.startswith("writer"):
                continue
            judge_files(where, f"{root}/w{name.removeprefix('writer')}", said)
            increments += said["increments"]
            for race, entries in said["races"].items():
                lists[race] += entries
        if increments:
            assert int(where.cat_file(f"{root}/shared/number")) == increments, "an update was lost"
        for race, entries in lists.items():
            if entries:
                there = where.cat_file(f"{root}/race{race}/list").decode().split()
                assert len(there) == len(set(there))
                assert set(entries) <= set(there), f"lost: {set(entries) - set(there)}"
    assert verify(store).damage == []


def judge_files(fs, directory, said):
    for name in NAMES:
        last, removed = said["last"][name], said["removed"][name]
        if not last or last == removed:
            assert not fs.exists(f"{directory}/{name}")
            continue
        records = describing.decode(fs.cat_file(f"{directory}/{name}"))
        assert records[-1].number == last, f"{directory}/{name}: {records} for {last}"
        if name == "log":
            assert [record.number for record in records] == said["log"]
    left = [path for path in fs.ls(directory, detail=False) if path.endswith(".tmp")]
    assert left == []


def judge_leftovers(load, state, uuid):
    """Check after the flusher's end: no process, only clean slabs within the budget, and no stray lock."""
    stopped = subprocess.run(
        [sys.executable, "-m", "tierfs.cli", "flusher", "stop", load.url, "--state-dir", str(state)],
        check=False,
        capture_output=True,
        text=True,
    )
    if "s3" not in load.url:  # for s3, the command has no credentials
        assert stopped.returncode == 0, stopped.stderr
    deadline = time.monotonic() + 60
    while flushers(load.directory):
        assert time.monotonic() < deadline, dump_flushers(load.directory)
        time.sleep(0.1)
    host = Host(state)
    kinds = Counter(path.suffix for folder in host.folders for path in folder.glob("*"))
    assert set(kinds) <= {".slab", ""}, kinds
    assert kinds[""] <= 1, "the file that says whose folder it is"
    total = sum(path.stat().st_size for folder in host.folders for path in folder.glob("*.slab"))
    assert total <= 192 << 20
    # Locks of dead processes are removed when the next process of the host creates its own.
    own = host.owner()
    alive = [path.stem for path in (state / "processes").glob("*.lock") if path.stem != own]
    assert all(host.is_alive(owner) for owner in alive), "the dead are buried"
    directory = state / "stores" / uuid
    known = {
        "nvme",
        "flusher.lock",
        "launch.lock",
        "fetch.lock",
        "seal.lock",
        "place.json",
        "use.lock",
    }
    names = {path.name for path in directory.iterdir()} - {"flusher.log"}
    assert names <= known, names - known


@pytest.fixture
def state(tmp_path):
    """Yield a state directory. Its flushers end with the test, even if the test fails."""
    yield tmp_path / "state"
    end_flushers(tmp_path)


def tier_options(state, **more):
    return {"ack": "staged", "ram": RAM, "nvme": NVME, "state_dir": str(state), "timeout": 120.0, **more}


@pytest.mark.timeout(600 + SECONDS)
def test_many_processes_on_a_directory_lose_nothing_and_read_no_wrong_byte(tmp_path, state):
    url = f"tierfs::file://{tmp_path}/store"
    bare = tierfs.init(f"file://{tmp_path}/store")
    load = Load(tmp_path, url, tier_options(state), seconds=SECONDS)
    results = load.run()
    assert all(said["counts"]["writes"] for name, said in results.items() if name.startswith("writer")), results
    judge(load, results, Store(bare.objects, bare.descriptor, url=bare.url))
    judge_leftovers(load, state, bare.descriptor.uuid)


@pytest.mark.timeout(600 + SECONDS)
def test_many_processes_on_s3_lose_nothing_and_read_no_wrong_byte(tmp_path, state):
    s3server.require()
    with s3server.running() as port:
        bucket = s3server.new_bucket(port)
        target = s3server.options(port)
        bare = tierfs.init(f"s3://{bucket}/run", options=target)
        load = Load(
            tmp_path,
            f"tierfs::s3://{bucket}/run",
            tier_options(state, s3=target),
            seconds=SECONDS * S3_SHARE,
            writers=4,
            readers=2,
            # Through the generic backend the store is single-writer. If two processes put a record past the flusher at
            # the same moment, one may replace the other's, as the descriptor and `tierfs init` say.
            races=False,
        )
        results = load.run()
        judge(load, results, Store(bare.objects, bare.descriptor, url=bare.url))
        for pid in flushers(tmp_path):
            os.kill(pid, signal.SIGTERM)
        judge_leftovers(load, state, bare.descriptor.uuid)
