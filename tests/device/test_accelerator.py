"""The devices that this process knows: one object each, whoever asks first."""

import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from tierfs.device import accelerator as accelerators


class SlowToMake:
    """An accelerator that takes long to make, as a first look at a GPU does."""

    def __init__(self, index):
        time.sleep(0.1)
        self.index = index

    def owns(self, tensor):
        return tensor.device.index == self.index


def test_threads_that_ask_first_at_once_get_one_accelerator(monkeypatch):
    monkeypatch.setattr(accelerators, "_known", [])
    monkeypatch.setattr(accelerators, "CudaAccelerator", SlowToMake)
    tensor = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))
    found = []
    threads = [threading.Thread(target=lambda: found.append(accelerators.accelerator_of(tensor))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == len(accelerators._known) == 1
