"""Bytes that change between a GPU and host memory are published by no save, whichever way it goes."""

from multiprocessing.reduction import ForkingPickler

import pytest
from support.waiting import HANG_S, until

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tierfs
from tierfs.dcp import TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.errors import CorruptionError
from tierfs.host.slab.table import DATA_STATES, SlotKind

MIB = 1 << 20


def state_on(fake):
    return {name: fake.own(torch.randn(count)) for name, count in (("large", 2 * MIB), ("a", 100), ("b", 100))}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["large", "a", "b"]),
        ({}, ["a"]),
        ({"ram": "8MiB"}, ["large", "a", "b"]),
        ({"ram": 0}, ["large", "a", "b"]),
    ],
    ids=["whole", "a part", "on the disk", "no local tiers"],
)
def test_bytes_that_change_on_the_link_are_not_saved(fake, url, options, names):
    writer = TierWriter(url, stage="device", device="64MiB", timeout=HANG_S, **options)
    fake.corrupt = True
    staged = writer.stage(state_on(fake))
    with pytest.raises(CheckpointException, match="changed between the GPU and host memory"):
        dcp.save({name: staged[name] for name in names}, checkpoint_id=f"{url}/a", storage_writer=writer)


def test_bytes_that_change_on_the_link_are_not_copied_to_another_file(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    first = dict(writer.stage({"first": fake.own(torch.randn(100))}))
    fake.corrupt = True
    second = writer.stage({"second": fake.own(torch.randn(100))})
    with pytest.raises(CheckpointException, match="bytes of second changed between the GPU and host memory"):
        dcp.save({**first, **second}, checkpoint_id=f"{url}/a", storage_writer=writer)


def test_bytes_that_change_on_the_link_go_to_no_process(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    fake.corrupt = True
    staged = writer.stage(state_on(fake))
    with pytest.raises(CorruptionError, match="changed between the GPU and host memory"):
        ForkingPickler.dumps(staged)


def test_a_damaged_slot_fails_one_save_at_most_and_takes_no_room(fake, url):
    options = {"ram": "256MiB", "nvme": "0", "bandwidth": 1}
    writer = TierWriter(url, stage="device", device="64MiB", **options)
    state = state_on(fake)
    dcp.save(writer.stage(state), checkpoint_id=f"{url}/0", storage_writer=writer)
    # The flusher has read the slot and waits for its bandwidth: it is not the one that finds the damage.
    until(lambda: writer.status().get("codecs", {}).get("raw_bytes", 0) >= state["large"].nbytes)
    store, _ = Address.of(url, {"ack": "staged", **options}).open()
    (slot,) = [
        slot
        for segment in store.tiers.ram.own_segments()
        for slot in segment.slots(kind=SlotKind.CHUNK, states=DATA_STATES)
        if slot.length == state["large"].nbytes
    ]
    slot.segment.whole()[slot.offset + 5] ^= 1
    before = writer.status()["tiers"]["ram"]["dirty_bytes"]
    with pytest.raises(CheckpointException, match="bytes of large changed") as raised:
        dcp.save(writer.stage(state), checkpoint_id=f"{url}/1", storage_writer=writer)
    assert writer.status()["tiers"]["ram"]["dirty_bytes"] == before, raised
    dcp.save(writer.stage(state), checkpoint_id=f"{url}/2", storage_writer=writer)
    for number in (0, 2):  # the later copy heals the earlier save
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(found, storage_reader=TierReader(f"{url}/{number}", **options))
        torch.testing.assert_close(found, state, rtol=0, atol=0)


def test_a_store_with_other_digests_takes_snapshots(fake, tmp_path, url):
    pytest.importorskip("blake3")
    tierfs.init(f"file://{tmp_path}/other", digest="blake3")
    other = f"tierfs::file://{tmp_path}/other"
    writer = TierWriter(other, stage="device", device="64MiB")
    state = state_on(fake)
    dcp.save(writer.stage(state), checkpoint_id=f"{other}/a", storage_writer=writer)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=f"{other}/a", storage_reader=TierReader(f"{other}/a"))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    fake.corrupt = True
    with pytest.raises(CheckpointException, match="changed between the GPU and host memory"):
        dcp.save(writer.stage(state_on(fake)), checkpoint_id=f"{other}/b", storage_writer=writer)


def test_an_edited_staged_state_is_not_blamed_on_hardware_alone(fake, url):
    writer = TierWriter(url, stage="device", device="64MiB")
    staged = writer.stage(state_on(fake))
    staged["large"].mul_(2)
    with pytest.raises(CheckpointException, match="code that edits the staged state"):
        dcp.save(staged, checkpoint_id=f"{url}/a", storage_writer=writer)
