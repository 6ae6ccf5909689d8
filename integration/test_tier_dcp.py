"""Stock DCP through the URL with tiers: a save ends before S3 has it, and survives the process that made it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import NamedTuple

import fsspec
import outages
import pytest
import s3server
from leftovers import flushers
from test_tier_faults import IMPATIENT

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_dcp_processes import WORLD, content, digest, everything, join_world, run

import tierfs
from tierfs.store import verify
from tierfs.testing import TcpFaultProxy

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(400),
]


class Job(NamedTuple):
    """The task of the processes of one world; `url` and `options` as fsspec takes them."""

    root: str
    directory: object
    options: dict
    world: int = WORLD


@pytest.fixture(scope="module")
def s3():
    s3server.require()
    with s3server.running() as port:
        yield port


@pytest.fixture
def proxy(s3):
    with TcpFaultProxy("127.0.0.1", s3) as proxy:
        yield proxy


@pytest.fixture
def job(tmp_path, s3, proxy, monkeypatch):
    monkeypatch.setenv("TIERFS_RAM", "0")
    monkeypatch.setenv("TIERFS_NVME", "0")
    bucket = s3server.new_bucket(s3)
    tierfs.init(f"s3://{bucket}/run", options=s3server.options(s3))
    options = {
        "ack": "local",
        "ram": "192MiB",
        "nvme": "256MiB",
        "state_dir": str(tmp_path / "state"),
        "timeout": 120.0,
        "s3": {**s3server.options(proxy.port), **IMPATIENT},
    }
    yield Job(f"tierfs::s3://{bucket}/run", tmp_path, options)
    for pid in flushers(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def writer_of(job, name):
    return dcp.FsspecWriter(f"{job.root}/{name}", **job.options) if hasattr(dcp, "FsspecWriter") else _fsspec()[0](
        f"{job.root}/{name}", **job.options
    )  # fmt: skip


def _fsspec():
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    return FsspecWriter, FsspecReader


def save_all(rank, job, steps, die):
    join_world(rank, job)
    for step in steps:
        dcp.save(content(rank, step), storage_writer=writer_of(job, f"step_{step}"))
    (job.directory / f"saved-{rank}").touch()
    if die:
        while not all((job.directory / f"saved-{other}").exists() for other in range(job.world)):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def save_while_s3_is_away(rank, job, step):
    """Open the store while S3 is up, and save the checkpoint while S3 is down."""
    join_world(rank, job)
    dcp.save(content(rank, 1), storage_writer=writer_of(job, "step_1"))
    (job.directory / f"ready-{rank}").touch()
    while not (job.directory / "go").exists():
        time.sleep(0.01)
    began = time.monotonic()
    dcp.save(content(rank, step), storage_writer=writer_of(job, f"step_{step}"))
    (job.directory / f"took-{rank}").write_text(str(time.monotonic() - began))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def load_all(rank, job, steps, result):
    join_world(rank, job)
    for step in steps:
        found = {key: torch.zeros_like(value) for key, value in everything(step).items()}
        dcp.load(found, storage_reader=_fsspec()[1](f"{job.root}/step_{step}", **job.options))
        assert digest(found) == digest(everything(step)), step
    (job.directory / f"{result}-{rank}").touch()
    dist.destroy_process_group()


def load_alone(job, steps, **changed):
    options = {**job.options, **changed}
    for step in steps:
        found = {key: torch.zeros_like(value) for key, value in everything(step).items()}
        reader = _fsspec()[1](f"{job.root}/step_{step}", **options)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert digest(found) == digest(everything(step)), step


def flushed(job):
    fs, root = fsspec.url_to_fs(job.root, **job.options)
    fs.wait(root, "object", 120)
    report = fs.status(root)
    assert report["conflicts"] == report["errors"] == []
    assert report["queue_files"] == 0


def in_s3(job, s3, steps):
    direct = {"ack": "object", "ram": "0", "nvme": "0", "s3": s3server.options(s3)}
    load_alone(job._replace(options={}), steps, **direct)
    fs, root = fsspec.url_to_fs(job.root, **direct)
    for step in steps:
        assert sorted(path.rpartition("/")[2] for path in fs.ls(f"{root}/step_{step}", detail=False)) == [
            ".metadata",
            *(f"__{rank}_0.distcp" for rank in range(WORLD)),
        ]
    store, _ = fs._locate(root)
    assert verify(store).damage == []


def test_a_checkpoint_is_read_back_after_a_restart_and_reaches_s3(job, s3):
    assert run(save_all, job, [1, 2], False) == [0, 0]
    assert run(load_all, job, [1, 2], "loaded") == [0, 0]
    flushed(job)
    in_s3(job, s3, [1, 2])


def test_ranks_killed_right_after_the_save_leave_it_loadable_here_at_once_and_in_s3_later(job, s3, proxy):
    outages.begin(proxy, "no-chunks")  # else the flusher may have published all of it before the proxy refuses requests
    assert run(save_all, job, [1], True) == [-signal.SIGKILL] * WORLD
    outages.begin(proxy, "refuse")
    try:
        assert run(load_all, job, [1], "loaded") == [0, 0], "from the local tiers"
    finally:
        proxy.recover()
    flushed(job)
    in_s3(job, s3, [1])


def test_a_checkpoint_saved_while_s3_is_away_is_whole_on_this_host_and_gets_there(job, s3, proxy):
    import threading

    def close():
        while not all((job.directory / f"ready-{rank}").exists() for rank in range(WORLD)):
            time.sleep(0.02)
        outages.begin(proxy, "refuse")
        (job.directory / "go").touch()

    threading.Thread(target=close, daemon=True).start()
    assert run(save_while_s3_is_away, job, 2) == [-signal.SIGKILL] * WORLD
    took = max(float((job.directory / f"took-{rank}").read_text()) for rank in range(WORLD))
    assert took < 60, took
    proxy.recover()
    assert run(load_all, job, [2], "loaded") == [0, 0]
    flushed(job)
    in_s3(job, s3, [1, 2])
