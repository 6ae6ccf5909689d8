"""Loads to a GPU: it verifies chunks of the local tiers, and the host reads what the GPU cannot take or finds wrong."""

import os
from pathlib import Path

import fsspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp

import tierfs
from tierfs import digest
from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.dcp.load.gpu_chunks import GpuChunks, Uploads
from tierfs.dcp.load.shards import FileRange
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError, StoreError
from tierfs.format.envelope import by_chunk
from tierfs.host.slab import segment
from tierfs.host.slab.table import DATA_STATES, SlotKind

MIB = 1 << 20


def state_on(gpu):
    """Return tensors whose borders lie inside of chunks, blocks and words."""
    torch.manual_seed(0)
    return {
        "odd": gpu.own(torch.arange(77, dtype=torch.uint8)),
        "large": gpu.own(torch.randn(9 * MIB + 3)),
        "bf16": gpu.own(torch.randn(MIB + 1).bfloat16()),
        "small": gpu.own(torch.randn(1000)),
        "flags": gpu.own(torch.rand(33) > 0.5),
        "scalar": gpu.own(torch.tensor(3.5)),
        "empty": gpu.own(torch.empty(0, 3)),
        "host": torch.randn(70_000),
        "matrix": gpu.own(torch.randn(1 << 10, 257)),
    }


def zeros(gpu, state):
    return {
        name: torch.zeros_like(tensor) if name == "host" else gpu.own(torch.zeros_like(tensor))
        for name, tensor in state.items()
    }


def saved(gpu, url, ack="object", **options):
    """Save a state. Returns it as it is on the host."""
    state = state_on(gpu)
    writer = TierWriter(url, ack=ack, **options)
    dcp.save(writer.stage(state), checkpoint_id=f"{url}/a", storage_writer=writer)
    return {name: tensor.clone().cpu() for name, tensor in state.items()}


def load(gpu, url, found, reader=None):
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=reader or TierReader(url), planner=TierLoadPlanner())
    gpu.synchronize()


def is_same(found, wanted):
    return all(torch.equal(found[name].cpu(), wanted[name]) for name in wanted)


@pytest.fixture
def on_host(monkeypatch):
    """The lengths of the blocks that the host verified."""
    lengths, hashed = [], digest.hash_bytes

    def counted(kind, data):
        lengths.append(len(data))
        return hashed(kind, data)

    monkeypatch.setattr(digest, "hash_bytes", counted)
    return lengths


def damage(pattern):
    """Flip a bit behind a pattern in the ram tier."""
    for path in Path(os.environ["TIERFS_SHM_DIR"]).rglob("*"):
        at = path.read_bytes().find(pattern) if path.is_file() else -1
        if at >= 0:
            with open(path, "r+b") as file:
                file.seek(at + len(pattern))
                (byte,) = file.read(1)
                file.seek(at + len(pattern))
                file.write(bytes([byte ^ 16]))
            return
    pytest.fail("the pattern is not in the ram tier")


def test_a_gpu_verifies_what_it_loads(gpu, url, on_host):
    wanted = saved(gpu, url)
    del on_host[:]
    found = zeros(gpu, wanted)
    load(gpu, url, found)
    assert is_same(found, wanted)
    if gpu.has_kernels:  # the tensor on the host lies in one block, or in two
        assert sum(on_host) <= 2 * MIB


def test_chunks_of_the_nvme_tier_are_verified_on_the_gpu(gpu, url, on_host):
    wanted = saved(gpu, url, ack="local", nvme="256MiB")
    fs, path = fsspec.url_to_fs(url, nvme="256MiB")
    fs.wait(path)  # the flusher, a thread of this process, verifies what it sends
    assert fs.evict(path, tier="ram")
    del on_host[:]
    found = zeros(gpu, wanted)
    load(gpu, url, found, TierReader(url, nvme="256MiB"))
    assert is_same(found, wanted)
    if gpu.has_kernels:
        assert sum(on_host) <= 2 * MIB


def test_a_chunk_damaged_in_ram_is_read_from_the_store(gpu, url):
    wanted = saved(gpu, url)
    damage(wanted["large"][:100].numpy().tobytes())
    found = zeros(gpu, wanted)
    load(gpu, url, found)
    assert is_same(found, wanted)


def test_a_chunk_damaged_on_its_way_is_sent_again(fake, url, monkeypatch, caplog):
    wanted = saved(fake, url)
    send, sent = fake.send, []

    def once_wrong(target, source):
        sent.append(target)
        send(target, source)
        if len(sent) == 1:
            fake.launch(lambda: target[5].bitwise_xor_(8))

    monkeypatch.setattr(fake, "send", once_wrong)
    found = zeros(fake, wanted)
    load(fake, url, found)
    assert is_same(found, wanted)
    assert "wrong digests in the GPU's memory" in caplog.text


def test_a_chunk_evicted_during_its_copy_is_no_damage(fake, url, monkeypatch, caplog):
    wanted = saved(fake, url, ack="object")
    ram = Address.of(url, {}).open()[0].tiers.ram
    copy, copied = np.copyto, []

    def evict_first(target, source):
        copied.append(len(target))
        if len(copied) == 1:
            for segment in ram.own_segments():
                for slot in segment.slots(kind=SlotKind.CHUNK, states=DATA_STATES):
                    segment.give(slot)
            source = np.zeros_like(source)  # the next owner's bytes
        copy(target, source)

    monkeypatch.setattr(segment.np, "copyto", evict_first)
    found = zeros(fake, wanted)
    load(fake, url, found)
    assert copied
    assert is_same(found, wanted)
    assert "wrong digests" not in caplog.text


def test_several_batches_share_the_buffers(gpu, url, with_processors):
    with_processors(1)
    wanted = saved(gpu, url)
    found = zeros(gpu, wanted)
    load(gpu, url, found)
    assert is_same(found, wanted)


def test_parts_and_other_layouts_are_loaded(gpu, url):
    wanted = saved(gpu, url)
    found = zeros(gpu, wanted)
    found["matrix"] = gpu.own(torch.zeros(257, 1 << 10)).t()
    found["large"] = gpu.own(torch.zeros(9 * MIB + 3, dtype=torch.float64))
    load(gpu, url, found)
    assert found["large"].dtype == torch.float64
    assert is_same(found, {**wanted, "large": wanted["large"].double()})


def warnings_of_devices(caplog):
    return [each.message for each in caplog.records if each.levelname == "WARNING" and each.name != "tierfs.store"]


def test_chunks_of_the_object_tier_take_no_gpu_memory(fake, url, caplog):
    wanted = saved(fake, url)
    fs, path = fsspec.url_to_fs(url)
    assert fs.evict(path, tier="ram")
    fake.left = 0
    found = zeros(fake, wanted)
    load(fake, url, found)
    assert is_same(found, wanted)
    assert not warnings_of_devices(caplog)


def test_a_chunk_of_missed_parts_alone_is_not_copied(fake):
    starts, copied = [0, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES], []

    class Files:
        def cut(self, _name, at, out):
            return ((number, CHUNK_BYTES, pieces) for number, pieces in by_chunk([(at, out)], starts).items())

        def copy_chunk(self, _name, number, _out):
            copied.append(number)

    target = fake.own(torch.zeros(2 * CHUNK_BYTES, dtype=torch.uint8))
    chunks = GpuChunks(Files(), Uploads(fake, CHUNK_BYTES))
    at = CHUNK_BYTES * 5 // 8  # less than half of the first chunk is wanted
    assert chunks.load([FileRange("a", at, target[:CHUNK_BYTES], "a")]) == {0}
    assert not copied
    # The second chunk is not in a local tier, so the rest of the part is not copied either.
    assert chunks.load([FileRange("a", CHUNK_BYTES, target, "a")]) == {0}
    assert copied == [1]


@pytest.mark.parametrize(
    "error",
    [
        CapacityError("the GPU is full", tier="device"),
        StoreError("no compiler"),
        torch.cuda.OutOfMemoryError("the GPU is full"),
    ],
)
def test_the_host_verifies_what_the_gpu_cannot(fake, url, monkeypatch, caplog, error):
    wanted = saved(fake, url)

    def fail(*_args):
        raise error

    monkeypatch.setattr(fake, "allocate" if isinstance(error, CapacityError) else "hash", fail)
    found = zeros(fake, wanted)
    load(fake, url, found)
    assert is_same(found, wanted)
    assert warnings_of_devices(caplog) == [f"chunks are verified on the host instead of the GPU: {error}"]


def test_a_store_with_other_digests_is_verified_on_the_host(fake, tmp_path, url, on_host):
    pytest.importorskip("blake3")
    tierfs.init(f"file://{tmp_path}/other", digest="blake3")
    other = f"tierfs::file://{tmp_path}/other"
    wanted = saved(fake, other)
    del on_host[:]
    found = zeros(fake, wanted)
    load(fake, other, found)
    assert is_same(found, wanted)
    assert sum(on_host) > 30 * MIB


@pytest.mark.parametrize("stage", ["ram", "device"])
def test_autograd_sees_that_a_tensor_was_loaded(gpu, url, stage):
    wanted = saved(gpu, url, stage=stage, device="256MiB")
    found = zeros(gpu, wanted)
    before = {name: tensor._version for name, tensor in found.items()}
    load(gpu, url, found)
    assert all(found[name]._version > before[name] for name in found if found[name].numel())
