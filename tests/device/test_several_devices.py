"""Saves of a state that spans two GPUs of one process."""

import pytest
from support.waiting import HANG_S

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from support.fake_device import FakeDevice

from tierfs.dcp import TierReader, TierWriter
from tierfs.device import accelerator as accelerators
from tierfs.device.drain import drain_of

MIB = 1 << 20


@pytest.fixture
def other(fake):
    """A second device, with too little memory for a device tier."""
    device = FakeDevice(memory=1000)
    accelerators.register_accelerator(device)
    return device


@pytest.mark.parametrize("is_full_first", [False, True], ids=["full last", "full first"])
@pytest.mark.parametrize("ram", ["256MiB", "8MiB"], ids=["in ram", "on the disk"])
def test_a_gpu_without_room_is_copied_before_the_step(fake, other, url, is_full_first, ram):
    devices = [other, fake] if is_full_first else [fake, other]
    state = {f"on.{number}": device.own(torch.randn(2 * MIB)) for number, device in enumerate(devices)}
    state["host"] = torch.randn(1000)
    before = {name: tensor.clone() for name, tensor in state.items()}
    writer = TierWriter(url, stage="device", device="64MiB", ram=ram, timeout=HANG_S)
    gate = drain_of(fake).gate
    gate.close()
    staged = writer.stage(state)
    for tensor in state.values():
        tensor.fill_(1)  # the training step
    gate.open()
    dcp.save(staged, checkpoint_id=f"{url}/a", storage_writer=writer)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(url))
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert writer.status()["counters"]["process_device_tier"] >= 1
