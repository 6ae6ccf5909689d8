"""Fixtures: a fake GPU in host memory, under both of its schedules, and the real GPU if there is one."""

import pytest

torch = pytest.importorskip("torch")

from support.fake_device import DRAIN_FIRST, TRAINER_FIRST, FakeDevice

import tierfs
from tierfs.device import accelerator as accelerators
from tierfs.device.drain import _drains
from tierfs.device.tier import _live


class Cuda:
    """The real GPU, with the part of `FakeDevice`'s interface that tests use."""

    @property
    def has_kernels(self):
        return accelerators.accelerator_of(torch.zeros(1, device="cuda")).has_kernels

    def own(self, tensor):
        return tensor.cuda()

    def launch(self, task):
        task()

    def synchronize(self):
        torch.cuda.synchronize()


def forget():
    """Unregister memory before it is unmapped, and drop the drains and device tiers that another test would find."""
    for drain in _drains.values():
        pins = drain.pins
        pins._regions = {key: (memory, bool) for key, (memory, _) in pins._regions.items()}
        pins.sweep()
    _drains.clear()
    _live.clear()
    accelerators.accelerators.clear()
    accelerators._cuda.clear()  # the first save of a process meets a GPU that it does not know


@pytest.fixture(params=[TRAINER_FIRST, DRAIN_FIRST, pytest.param("gpu", marks=pytest.mark.cuda)])
def gpu(request):
    """Each device under test: the fake GPU under both schedules, and the real one."""
    forget()
    if request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("no GPU is here")
        yield Cuda()
    else:
        device = FakeDevice(request.param)
        accelerators.register_accelerator(device)
        yield device
    forget()


@pytest.fixture
def fake():
    forget()
    device = FakeDevice()
    accelerators.register_accelerator(device)
    yield device
    forget()


@pytest.fixture
def url(tmp_path, monkeypatch):
    """The URL of a store in memory, whose flusher is a thread, on a host with its own state directory."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TIERFS_RAM", "1GiB")
    tierfs.init(f"memory://{tmp_path}/store")
    return f"tierfs::memory://{tmp_path}/store"
