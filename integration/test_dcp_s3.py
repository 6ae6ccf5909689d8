"""Checkpoints on an S3 server: ranks of a host fetch each chunk once, and a slice fetches little beyond itself."""

import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import s3server
import torch.distributed.checkpoint as dcp
from leftovers import flushers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import tierfs
from tierfs.dcp import TierReader, TierWriter
from tierfs.testing import TcpFaultProxy

s3server.require()

pytestmark = pytest.mark.filterwarnings("default")

RANKS = 4
TENSORS = 6
ROWS = 6_000  # of 1024 float32: 24.6 MB each, so two chunks

LOAD = """
import json, sys
import torch
import torch.distributed.checkpoint as dcp
from tierfs.dcp import TierReader

url, options, tensors, rows = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
state = {f"w{number}": torch.zeros(rows, 1024) for number in range(tensors)}
print("ready", flush=True)
sys.stdin.readline()
dcp.load(state, storage_reader=TierReader(url, ram="1GiB", nvme="0", s3=options), no_dist=True)
for number in range(tensors):
    assert torch.equal(state[f"w{number}"], torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024) + number)
print("loaded", flush=True)
sys.stdin.readline()
"""

SAVE = """
import json, sys
import torch
import torch.distributed.checkpoint as dcp
from tierfs.dcp import TierWriter
from tierfs.errors import ConflictError

url, options, ack, overwrite, number = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4] == "over", int(sys.argv[5])

class Stopping(TierWriter):
    def finish(self, metadata, results):
        print("stored", flush=True)
        sys.stdin.readline()
        super().finish(metadata, results)

writer = Stopping(url, ack=ack, overwrite=overwrite, ram="64MiB", nvme="0", s3=options)
try:
    dcp.save({"w": torch.full((100_000,), float(number))}, storage_writer=writer, no_dist=True)
    writer.wait("object", 60)
    print("saved", writer.ack(), flush=True)
except BaseException as error:  # torch raises a CheckpointException, which is none of `Exception`
    [(cause, _)] = getattr(error, "failures", {0: (error, None)}).values()
    print(type(cause).__name__, flush=True)
"""


NEVER = """
import json, sys
from tierfs.dcp import TierWriter

TierWriter(sys.argv[1], s3=json.loads(sys.argv[2]))
print("made", flush=True)
sys.stdin.readline()
"""


FORK = """
import faulthandler, json, os, sys, time
import fsspec
from tierfs.dcp import TierWriter

options = json.loads(sys.argv[2])
TierWriter(sys.argv[1], s3=options)
time.sleep(float(sys.argv[3]))
if (child := os.fork()) == 0:
    faulthandler.dump_traceback_later(30, exit=True)
    fs, path = fsspec.url_to_fs(sys.argv[1], s3=options)
    assert not fs.exists(path)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def whole(number):
    return torch.arange(ROWS * 1024, dtype=torch.float32).view(ROWS, 1024) + number


@pytest.fixture(scope="module")
def port():
    with s3server.running() as number:
        yield number


@pytest.fixture
def checkpoint(port, tmp_path, monkeypatch):
    """Return the URL of a checkpoint in a store that this host has never opened."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "writer"))
    options = s3server.options(port)
    bucket = s3server.new_bucket(port)
    tierfs.init(f"s3://{bucket}/run", options=options)
    url = f"tierfs::s3://{bucket}/run/step_1"
    state = {f"w{number}": whole(number) for number in range(TENSORS)}
    dcp.save(state, storage_writer=TierWriter(url, ack="object", ram="1GiB", nvme="0", s3=options), no_dist=True)
    return url


def wait_until(condition):
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.1)


def load_on(count, port, url, directory, *, at_once=True):
    """Load the whole checkpoint on this many ranks of a host without state. Return how often each chunk was fetched.

    No rank ends before all have loaded, like the ranks of a job. The chunks that a rank keeps for the others would end
    with it.
    """
    with TcpFaultProxy("127.0.0.1", port) as proxy:
        environment = {**os.environ, "TIERFS_STATE_DIR": str(directory), "LOCAL_WORLD_SIZE": str(count)}
        options = json.dumps(s3server.options(proxy.port))
        command = [sys.executable, "-c", LOAD, url, options, str(TENSORS), str(ROWS)]
        ranks = [
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        for together in [ranks] if at_once else [[rank] for rank in ranks]:
            for rank in together:
                rank.stdin.write("go\n")
                rank.stdin.flush()
            for rank in together:
                assert rank.stdout.readline() == "loaded\n"
        for rank in ranks:
            rank.communicate(timeout=200)
            assert rank.returncode == 0
        return Counter(
            {
                path: number
                for (method, path), number in proxy.requests.items()
                if method == "GET" and "/chunks/" in path
            }
        )


def test_a_loader_may_fork_while_its_writer_opens_the_store(port, tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path))
    url = f"s3://{s3server.new_bucket(port)}"
    tierfs.init(url, options=s3server.options(port))
    for number in range(8):
        arguments = [f"tierfs::{url}/run", json.dumps(s3server.options(port)), str(0.14 + 0.02 * number)]
        subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, *arguments], check=True, timeout=120)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after the other"])
def test_ranks_of_a_host_fetch_each_chunk_once(port, checkpoint, tmp_path, at_once):
    chunks = load_on(RANKS, port, checkpoint, tmp_path / "together", at_once=at_once)
    assert len(chunks) >= 2 * TENSORS
    assert set(chunks.values()) == {1}


def test_a_writer_that_saves_nothing_leaves_nothing(port, tmp_path):
    """A writer starts the flusher when it is made. Without a save, the flusher ends soon after the process."""
    options = s3server.options(port)
    url = f"s3://{s3server.new_bucket(port)}/run"
    tierfs.init(url, options=options)
    environment = {**os.environ, "TIERFS_STATE_DIR": str(tmp_path / "state"), "TIERFS_SHM_DIR": str(tmp_path)}
    command = [sys.executable, "-c", NEVER, url, json.dumps(options)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout.readline() == "made\n"
        wait_until(lambda: flushers(tmp_path))
        made.communicate(timeout=60)
    assert made.returncode == 0
    wait_until(lambda: not flushers(tmp_path))
    assert list(tmp_path.rglob("*.slab*")) == []


def test_the_first_save_raises_that_its_store_is_missing(port, tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path))
    options = s3server.options(port)
    writer = TierWriter(f"tierfs::s3://{s3server.new_bucket(port)}/run/step_1", s3=options)
    with pytest.raises(CheckpointException, match="no store holds"):
        dcp.save({"w": whole(0)}, storage_writer=writer, no_dist=True)


def test_a_save_asks_for_little_more_than_its_chunks(port, tmp_path, monkeypatch):
    """A writer that saved before sends two records, one lookup of the existing checkpoint, and the reference list.

    For the list it also looks at the directory. The flusher told the host of the record that it published.
    """
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "writer"))
    with TcpFaultProxy("127.0.0.1", port) as proxy:
        options = s3server.options(proxy.port)
        url = f"s3://{s3server.new_bucket(port)}/run"
        tierfs.init(url, options=options)
        writer = TierWriter(f"tierfs::{url}", ack="object", ram="1GiB", s3=options)
        for step in range(3):
            proxy.requests.clear()
            state = {"w": torch.randn(ROWS, 1024)}
            dcp.save(state, storage_writer=writer, checkpoint_id=f"tierfs::{url}/step_{step}", no_dist=True)
            chunks = [method for method, path in proxy.requests.elements() if "/chunks/" in path]
            assert chunks.count("PUT") >= 2
            if step:
                # Chunks that the saves share are read back at their first reuse, and not again in that lease.
                assert chunks.count("GET") <= (1 if step == 1 else 0)
                assert chunks.count("PUT") + chunks.count("GET") == len(chunks)
                others = [method for method, path in proxy.requests.elements() if "/chunks/" not in path]
                assert Counter(others) == Counter(PUT=3, GET=2, HEAD=1), proxy.requests


@pytest.mark.parametrize(
    ("ack", "hosts", "overwrite"),
    [("staged", 1, "new"), ("staged", 2, "over"), ("object", 1, "over"), ("object", 2, "new")],
)
def test_one_of_two_concurrent_saves_of_a_step_wins(port, tmp_path, monkeypatch, ack, hosts, overwrite):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "reader"))
    options = s3server.options(port)
    url = f"tierfs::s3://{s3server.new_bucket(port)}/run/step_1"
    tierfs.init(url.removesuffix("/step_1"), options=options)
    savers = []
    for number in (0, 1):
        environment = {**os.environ, "TIERFS_STATE_DIR": str(tmp_path / f"writer{number % hosts}")}
        command = [sys.executable, "-c", SAVE, url, json.dumps(options), ack, overwrite, str(number)]
        pipe = subprocess.PIPE
        savers.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))
    for saver in savers:
        assert saver.stdout.readline() == "stored\n"
    for saver in savers:
        saver.stdin.write("go\n")
        saver.stdin.flush()
    said = [saver.communicate(timeout=100)[0] for saver in savers]
    assert sorted(said) == ["ConflictError\n", "saved object\n"]
    state = {"w": torch.zeros(100_000)}
    dcp.load(state, storage_reader=TierReader(url, ram="0", nvme="0", s3=options), no_dist=True)
    assert torch.equal(state["w"], torch.full((100_000,), float(said.index("saved object\n"))))


@pytest.mark.parametrize("part", range(0, 8, 3))
def test_a_slice_fetches_what_it_needs(port, checkpoint, tmp_path, monkeypatch, part):
    """Fetch an eighth of the rows of every tensor without local tiers: 1.1 times that, and a block for each range."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "reader"))
    rows = ROWS // 8
    with TcpFaultProxy("127.0.0.1", port) as proxy:
        reader = TierReader(checkpoint, ram="1GiB", nvme="0", s3=s3server.options(proxy.port))
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        before = proxy.response_bytes.total()
        state = {f"w{number}": torch.zeros(rows, 1024) for number in range(TENSORS)}
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata, is_coordinator=True)
        items = [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(name, (0, 0)),
                dest_offsets=torch.Size((0, 0)),
                storage_index=MetadataIndex(name, (0, 0)),
                storage_offsets=torch.Size((part * rows, 0)),
                lengths=torch.Size((rows, 1024)),
            )
            for name in state
        ]
        reader.read_data(LoadPlan(items), planner)
        fetched = proxy.response_bytes.total() - before
    for number in range(TENSORS):
        assert torch.equal(state[f"w{number}"], whole(number)[part * rows : (part + 1) * rows])
    needed = sum(tensor.nbytes for tensor in state.values())
    ranges = 2 * TENSORS  # a slice may span two chunks
    heads = 64 << 10  # manifests, and the table of blocks of each chunk
    assert fetched <= 1.1 * needed + ranges * (1 << 20) + heads, (fetched, needed)
