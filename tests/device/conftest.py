"""A GPU of host memory, under both of its schedules; and the real one, where there is one."""

import pytest

torch = pytest.importorskip("torch")

from support import forked_flusher
from support.fake_device import DRAIN_FIRST, TRAINER_FIRST, FakeDevice

import tierfs
from tierfs.device import accelerator as accelerators
from tierfs.device.drain import _drains
from tierfs.device.tier import _live
from tierfs.session import tiers as localtiers


class Cuda:
    """The real GPU, with what tests ask of `FakeDevice`."""

    def __init__(self):
        self.accelerator = accelerators.accelerator_of(torch.zeros(1, device="cuda"))
        self.has_kernels = self.accelerator.has_kernels

    def own(self, tensor):
        return tensor.cuda()

    def launch(self, task):
        task()

    def synchronize(self):
        torch.cuda.synchronize()


def forget():
    """Leave no memory registered that is unmapped later, nor a tier that another test would find."""
    for drain in _drains.values():
        pins = drain.pins
        pins._regions = {key: region._replace(is_used=bool) for key, region in pins._regions.items()}
        pins.sweep()
    _drains.clear()
    _live.clear()


@pytest.fixture(params=[TRAINER_FIRST, DRAIN_FIRST, "gpu"])
def gpu(request, monkeypatch):
    """A device under test."""
    monkeypatch.setattr(accelerators, "_known", [])
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
def fake(monkeypatch):
    """The fake device alone."""
    monkeypatch.setattr(accelerators, "_known", [])
    forget()
    device = FakeDevice()
    accelerators.register_accelerator(device)
    yield device
    forget()


@pytest.fixture
def url(tmp_path, monkeypatch):
    """Of a store in a directory, with local tiers of its own."""
    monkeypatch.setattr(localtiers, "spawn", forked_flusher.spawn)
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store"
