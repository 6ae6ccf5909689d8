"""The memory that a GPU copies into is registered with it, a segment at a time."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import tierfs
from tierfs.dcp.address import Address
from tierfs.dcp.save import fill
from tierfs.dcp.save.fill import copy_in
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.dcp.save.shard_file import ShardFile


def test_the_segments_of_a_file_are_registered_whole(tmp_path, monkeypatch):
    tierfs.init(f"file://{tmp_path}/store")
    options = {"ram": "64MiB", "nvme": "0"}
    store, _ = Address.of(f"tierfs::file://{tmp_path}/store/ck", options).open(write=True)
    file = ShardFile(store, GpuStaging("ram", None))
    copy_in(file, [("a", torch.ones(1 << 18))], at_once=True)
    registered = {}

    class Pins:
        def add(self, key, memory, is_used, _fall_back):
            registered[key] = memory(), is_used()

    monkeypatch.setattr(fill, "drain_of", lambda _accelerator: SimpleNamespace(pins=Pins()))
    fill.pin(file, None)
    (segment,) = file.segments()
    memory, is_used = registered.pop(segment.id)
    assert (len(memory), memory.readonly, is_used) == (segment.size, False, True)
    assert not registered
    del memory
    file.abort()
