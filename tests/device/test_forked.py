"""A process that is forked during a save from a GPU waits for none of its parent's threads."""

import threading

import pytest
from support.forked import in_child

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp

from tierfs.dcp import TierReader, TierWriter
from tierfs.device.drain import drain_of

MIB = 1 << 20


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

    reading = threading.Thread(target=staged.get, args=("weight",))  # holds the state's lock
    reading.start()
    try:
        assert in_child(work) == 0
    finally:
        gate.open()
        reading.join()
    dcp.save(staged, checkpoint_id=f"{url}/a", storage_writer=writer)
    found = {"weight": torch.zeros(2 * MIB)}
    dcp.load(found, checkpoint_id=f"{url}/a", storage_reader=TierReader(f"{url}/a"))
    assert torch.equal(found["weight"], weight)
