"""Room in the ram tier is given back when a copy from a GPU fails, or the state does not fit."""

import gc
import time
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tierfs.dcp import TierWriter

MIB = 1 << 20


def filling(writer):
    ram = writer._address.open()[0].tiers.ram
    return sum(segment.sums().filling for segment in ram.own_segments())


def wait_for_room(writer):
    ends = time.monotonic() + 20
    while count := filling(writer):
        assert time.monotonic() < ends, f"{count} are held"
        time.sleep(0.02)


def state_of(fake):
    return {"on.gpu": fake.own(torch.randn(2 * MIB)), "on.host": torch.randn(1000), "note": "an object"}


@pytest.mark.parametrize("stage", ["ram", "lazy", "device"])
def test_failed_copies_take_no_room(fake, url, stage):
    writer = TierWriter(url, stage=stage, device="64MiB", ram="64MiB", timeout=5)
    fake.fetch_error = RuntimeError("CUDA error: unspecified launch failure")
    files = []
    for number in range(10):  # more than fit side by side
        staged = writer.stage(state_of(fake))
        files.append(weakref.ref(staged._file))
        with pytest.raises(CheckpointException, match="unspecified launch failure"):
            dcp.save(staged, checkpoint_id=f"{url}/{number}", storage_writer=writer)
    wait_for_room(writer)
    del staged
    gc.collect()
    assert not any(file() for file in files)
    fake.fetch_error = None
    dcp.save(writer.stage(state_of(fake)), checkpoint_id=f"{url}/a", storage_writer=writer)


@pytest.mark.parametrize("stage", ["ram", "lazy", "device"])
def test_a_failed_copy_that_is_not_saved_takes_no_room(fake, url, stage):
    writer = TierWriter(url, stage=stage, device="64MiB")
    fake.fetch_error = RuntimeError("CUDA error: unspecified launch failure")
    staged = writer.stage(state_of(fake))
    assert staged["note"] == "an object"  # the save says it
    wait_for_room(writer)
    file = weakref.ref(staged._file)
    del staged
    gc.collect()
    assert file() is None


def test_a_failed_copy_goes_to_no_other_process(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    fake.fetch_error = RuntimeError("CUDA error: unspecified launch failure")
    staged = writer.stage(state_of(fake))
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        ForkingPickler.dumps(staged)
