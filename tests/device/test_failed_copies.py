"""When a copy from a GPU fails, or the state does not fit, the room in the ram tier is released."""

import gc
import threading
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
from support.waiting import HANG_S, until

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tierfs.dcp import TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.errors import InvalidInputError, StoreError

MIB = 1 << 20


def filling(writer):
    ram = Address.of(writer.checkpoint_id, {}).open()[0].tiers.ram
    return sum(segment.sums().filling for segment in ram.own_segments())


def wait_for_room(writer):
    until(lambda: not filling(writer))


def wait_until_gone(files):
    # The thread that copied the last one may not have returned yet.
    until(lambda: gc.collect() >= 0 and not any(file() for file in files))


def state_of(fake):
    return {"on.gpu": fake.own(torch.randn(2 * MIB)), "on.host": torch.randn(1000), "note": "an object"}


@pytest.mark.parametrize("stage", ["ram", "lazy", "device"])
def test_failed_copies_take_no_room(fake, url, stage):
    writer = TierWriter(url, stage=stage, device="64MiB", ram="64MiB", timeout=HANG_S)
    fake.fetch_error = RuntimeError("CUDA error: unspecified launch failure")
    files = []
    for number in range(10):  # more than fit side by side
        staged = writer.stage(state_of(fake))
        files.append(weakref.ref(staged.file))
        with pytest.raises(CheckpointException, match="unspecified launch failure"):
            dcp.save(staged, checkpoint_id=f"{url}/{number}", storage_writer=writer)
    wait_for_room(writer)
    del staged
    wait_until_gone(files)
    fake.fetch_error = None
    dcp.save(writer.stage(state_of(fake)), checkpoint_id=f"{url}/a", storage_writer=writer)


@pytest.mark.parametrize("stage", ["ram", "lazy", "device"])
def test_a_failed_copy_that_is_not_saved_takes_no_room(fake, url, stage):
    writer = TierWriter(url, stage=stage, device="64MiB")
    fake.fetch_error = RuntimeError("CUDA error: unspecified launch failure")
    staged = writer.stage(state_of(fake))
    assert staged["note"] == "an object"  # only the save reports the failure
    wait_for_room(writer)
    file = weakref.ref(staged.file)
    del staged
    wait_until_gone([file])


def test_a_failed_copy_goes_to_no_other_process(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    fake.fetch_error = RuntimeError("CUDA error: unspecified launch failure")
    staged = writer.stage(state_of(fake))
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        ForkingPickler.dumps(staged)


def test_a_snapshot_that_cannot_be_hashed_is_saved(fake, url, monkeypatch):
    def refuse(*_):
        raise torch.cuda.OutOfMemoryError("the GPU is full")

    monkeypatch.setattr(fake, "hash", refuse)
    writer = TierWriter(url, stage="device", device="64MiB")
    state = state_of(fake)
    for number in range(2):  # all chunks of the second save are in the ram tier
        dcp.save(writer.stage(state), checkpoint_id=f"{url}/{number}", storage_writer=writer)
    found = {"on.gpu": torch.zeros(2 * MIB)}
    dcp.load(found, checkpoint_id=f"{url}/1", storage_reader=TierReader(url))
    assert torch.equal(found["on.gpu"], state["on.gpu"])
    assert writer.status()["counters"]["process_gpu_hash"] == 2


def test_a_note_that_cannot_be_left_harms_no_save(fake, url, monkeypatch, caplog):
    def fail(*_):
        raise MemoryError("no memory for a note")

    monkeypatch.setattr(GpuStaging, "tell", fail)
    writer = TierWriter(url, stage="device", device="64MiB", timeout=HANG_S)
    state = {"on.gpu": fake.own(torch.randn(2 * MIB)), "on.host": torch.randn(2 * MIB)}
    staged = writer.stage(state)
    for thread in threading.enumerate():
        if thread.name == "tierfs-device-drain":
            thread.join()
    dcp.save(staged, checkpoint_id=f"{url}/a", storage_writer=writer)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(url))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert "no memory for a note" in caplog.text


class Uncopied:
    def __reduce__(self):
        raise ValueError("cannot be copied")


@pytest.mark.parametrize("has_others", [False, True], ids=["alone", "other ranks wait"])
def test_a_state_that_cannot_be_staged_takes_no_room(fake, url, monkeypatch, has_others):
    monkeypatch.setattr("tierfs.dcp.writer.others_wait", lambda: has_others)
    writer = TierWriter(url, stage="ram", ram="64MiB", timeout=HANG_S)
    kept = []
    for number in range(6):
        with pytest.raises((InvalidInputError, CheckpointException), match="'bad' contains an object") as raised:
            staged = writer.stage({**state_of(fake), "bad": Uncopied()})
            assert has_others
            assert filling(writer) == 0
            dcp.save(staged, checkpoint_id=f"{url}/{number}", storage_writer=writer)
        kept.append(raised.value)
        assert filling(writer) == 0


def large_state(fake):
    """Return a state of 112 MiB, 88 of them on the host. A ram tier of 96 MiB has no room for the rest beside them."""
    host = {f"on.host.{number}": torch.randn(2 * MIB) for number in range(11)}
    return {**host, "on.gpu": fake.own(torch.randn(6 * MIB)), "step": torch.ones(())}


@pytest.mark.parametrize("stage", ["ram", "device"])
def test_a_large_state_on_host_and_gpu_is_staged_on_the_disk(fake, url, stage):
    writer = TierWriter(url, stage=stage, device="64MiB", ram="96MiB", timeout=HANG_S)
    state = large_state(fake)
    before = {name: tensor.clone() for name, tensor in state.items()}
    staged = writer.stage(state)
    for tensor in state.values():
        tensor.fill_(2)
    dcp.save(staged, checkpoint_id=f"{url}/a", storage_writer=writer)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(url))
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    wait_for_room(writer)


def test_a_large_state_that_was_not_staged_goes_to_the_disk(fake, url):
    writer = TierWriter(url, stage="ram", ram="96MiB", timeout=HANG_S)
    state = large_state(fake)
    dcp.save(state, checkpoint_id=f"{url}/a", storage_writer=writer)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(url))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    wait_for_room(writer)


def mixed_state(fake, writer, *, host, on_gpu):
    """Return a state of staged host tensors, 8 MiB each, and an unstaged GPU tensor; and the same state, unstaged."""
    state = {f"on.host.{number}": torch.randn(2 * MIB) for number in range(host)}
    extra = fake.own(torch.randn(on_gpu * MIB // 4))
    return {**writer.stage(state), "on.gpu": extra}, {**state, "on.gpu": extra}


def test_a_large_gpu_tensor_beside_a_staged_state_goes_to_the_disk(fake, url):
    writer = TierWriter(url, stage="ram", ram="96MiB", timeout=HANG_S)
    mixed, state = mixed_state(fake, writer, host=5, on_gpu=64)
    dcp.save(mixed, checkpoint_id=f"{url}/a", storage_writer=writer)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(url))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    with pytest.raises(CheckpointException, match="stage it again"):  # as after any save of a staged state
        dcp.save(mixed, checkpoint_id=f"{url}/b", storage_writer=writer)
    wait_for_room(writer)


def test_objects_that_do_not_fit_go_to_the_disk(fake, url):
    writer = TierWriter(url, stage="ram", ram="96MiB", timeout=HANG_S)
    state = {f"on.host.{number}": torch.randn(2 * MIB) for number in range(10)}
    state |= {"on.gpu": fake.own(torch.randn(1000)), "object": bytes(12 * MIB)}
    staged = writer.stage(state)
    transposed = {**staged, "on.host.0": staged["on.host.0"].view(1024, -1).t()}  # no range of the staged file
    dcp.save(transposed, checkpoint_id=f"{url}/a", storage_writer=writer)
    found = {name: torch.zeros_like(value) if name != "object" else b"" for name, value in state.items()}
    found["on.host.0"] = torch.zeros(2048, 1024)
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(url))
    assert found.pop("object") == state["object"]
    assert torch.equal(found.pop("on.host.0"), state["on.host.0"].view(1024, -1).t())
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    wait_for_room(writer)


def test_states_on_the_disk_leave_no_room_taken(fake, url):
    writer = TierWriter(url, stage="ram", ram="24MiB", timeout=HANG_S)
    for number in range(5):
        state = {"on.gpu": fake.own(torch.randn(8 * MIB)), "step": torch.ones(()), "on.host": torch.randn(MIB)}
        dcp.save(writer.stage(state), checkpoint_id=f"{url}/{number}", storage_writer=writer)
    wait_for_room(writer)


@pytest.mark.parametrize("stage", ["device", "lazy", "ram"])
@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("the GPU is full"), StoreError("no compiler")], ids=["memory", "compiler"]
)
def test_tensors_that_the_gpu_cannot_gather_are_saved(fake, url, monkeypatch, stage, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(fake, "gather", refuse)
    writer = TierWriter(url, stage=stage, device="64MiB")
    state = {"large": fake.own(torch.randn(2 * MIB)), "small": fake.own(torch.randn(100))}
    dcp.save(writer.stage(state), checkpoint_id=f"{url}/a", storage_writer=writer)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(url))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert not writer.status()["tiers"]["device"]["snapshots"]
