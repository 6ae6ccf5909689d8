"""The devices that this process knows: one object each, even if several threads ask at once."""

import ctypes
import os
import threading
import time
from types import SimpleNamespace

import pytest
from support.forked import in_child
from support.waiting import HANG_S

torch = pytest.importorskip("torch")

from tierfs.device import accelerator as accelerators


class SlowToMake:
    """An accelerator that takes long to create, as the first look at a GPU does."""

    def __init__(self, index):
        time.sleep(0.1)
        self.index = index


@pytest.fixture
def accelerate_by(monkeypatch):
    """Return a function that makes a class the one of all accelerators."""

    def use(kind):
        monkeypatch.setattr(accelerators, "_cuda", {})  # so that none is made yet
        monkeypatch.setattr(accelerators, "Accelerator", kind)

    return use


def test_threads_that_ask_first_at_once_get_one_accelerator(accelerate_by):
    accelerate_by(SlowToMake)
    tensor = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    found = []
    threads = [threading.Thread(target=lambda: found.append(accelerators.accelerator_of(tensor))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_a_child_forked_while_a_thread_asks_waits_for_nobody(accelerate_by):
    parent, going, held = os.getpid(), threading.Event(), threading.Event()

    class HeldInParent(SlowToMake):
        def __init__(self, index):
            going.set()
            if os.getpid() == parent:
                held.wait(HANG_S)
            self.index = index

    accelerate_by(HeldInParent)
    on_gpu = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    thread = threading.Thread(target=accelerators.accelerator_of, args=(on_gpu,))
    thread.start()
    assert going.wait(HANG_S)

    def ask():
        accelerators.accelerator_of(SimpleNamespace(is_cuda=False))
        accelerators.accelerator_of(on_gpu)

    try:
        assert in_child(ask) == 0
    finally:
        held.set()
        thread.join()


@pytest.mark.parametrize("has_kernels", [False, True])
def test_copies_to_conjugated_and_negated_views_keep_the_values(monkeypatch, has_kernels):
    def copy_pieces(copies, _device):
        for target, source, length in copies:
            ctypes.memmove(target, source, length)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: "a GPU")
    monkeypatch.setattr(accelerators, "copy_pieces", copy_pieces)
    accelerator = accelerators.Accelerator(0)
    accelerator.has_kernels = has_kernels
    sources = [torch.randn(4, dtype=torch.complex64), torch.randn(4)]
    targets = [torch.zeros(4, dtype=torch.complex64).conj(), torch._neg_view(torch.zeros(4))]
    with torch.no_grad():
        accelerator.copy(targets, sources)
    assert all(map(torch.equal, targets, sources))
