"""A process that is forked during a save from a GPU waits for none of its parent's threads."""

import os
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp

from tierfs.dcp import TierReader, TierWriter
from tierfs.device.drain import drain_of

MIB = 1 << 20


def in_a_child(work):
    """Run a function in a forked process. Returns whether it ended in time without an error."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(1)
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


def test_a_forked_process_steps_during_a_copy_of_its_parent(fake, url):
    writer = TierWriter(url, stage="lazy")
    weight = fake.own(torch.randn(2 * MIB))
    gate = drain_of(fake).gate
    gate.close()
    staged = writer.stage({"weight": weight})

    def work():
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        torch.optim.SGD([parameter], lr=1).step()
        os._exit(0)

    reading = threading.Thread(target=staged.get, args=("weight",))  # holds the state's lock
    reading.start()
    try:
        assert in_a_child(work)
    finally:
        gate.open()
        reading.join()
    dcp.save(staged, checkpoint_id=f"{url}/a", storage_writer=writer)
    found = {"weight": torch.zeros(2 * MIB)}
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(f"{url}/a"))
    assert torch.equal(found["weight"], weight)
