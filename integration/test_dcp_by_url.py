"""``TIERFS_DCP=1 torchrun train.py``: a script that knows tierfs only by the URL works from its first save on."""

from __future__ import annotations

import json
import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fsspec
import torch.distributed as dist
from torchrun import require_entry_point, torchrun

import tierfs
from tierfs.dcp import TierReader

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

TRAINER = """
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

if __name__ == "__main__":
    root = sys.argv[1]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    full = torch.randn(1001, 37)

    def state(placement, seed):
        return {
            "sharded": distribute_tensor(full + seed, mesh, [placement]),
            "replica": distribute_tensor(full[:10] - seed, mesh, [Replicate()]),
            "plain": torch.full((5,), float(seed)),
            "step": seed,
        }

    dcp.save(state(Shard(0), 1), checkpoint_id=f"{root}/1")
    dcp.async_save(state(Shard(0), 2), checkpoint_id=f"{root}/2").result()
    process = AsyncCheckpointerType.PROCESS
    for seed in (3, 4):
        dcp.async_save(state(Shard(0), seed), checkpoint_id=f"{root}/{seed}", async_checkpointer_type=process).result()
    dcp.save(state(Shard(0), 5), checkpoint_id=f"{root}/5", use_collectives=False)
    for seed in (1, 2, 3, 4):
        found = state(Shard(1), 0)
        dcp.load(found, checkpoint_id=f"{root}/{seed}")
        expected = state(Shard(1), seed)
        assert torch.equal(found["sharded"].to_local(), expected["sharded"].to_local()), seed
        assert torch.equal(found["replica"].to_local(), expected["replica"].to_local()), seed
        assert torch.equal(found["plain"], expected["plain"]) and found["step"] == seed, seed
    found = state(Shard(0), 0)
    dcp.load(found, checkpoint_id=f"{root}/5")
    assert torch.equal(found["sharded"].to_local(), state(Shard(0), 5)["sharded"].to_local())
    print("DONE")
    dist.destroy_process_group()
"""


@pytest.fixture
def store(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    (tmp_path / "train.py").write_text(TRAINER)
    return tmp_path / "store"


def first_byte(url):
    with fsspec.open(url) as file:
        return file.read(1)


@pytest.mark.parametrize("form", ["tierfs::file://{}/run", "tierfs::store/run"])
def test_every_save_of_a_training_that_was_not_changed_is_tierfs_own(store, form):
    require_entry_point()
    torchrun(store.parent, "train.py", form.format(store), TIERFS_DCP="1")
    root = f"tierfs::file://{store}/run"
    for step in (1, 2, 3, 4):
        assert first_byte(f"{root}/{step}/.metadata") == b"{"
        metadata = TierReader(f"{root}/{step}").read_metadata()
        assert len(metadata.state_dict_metadata["sharded"].chunks) == 2
    for rank in (0, 1):
        assert json.loads(fsspec.open(f"{root}/5/__{rank}.metadata").open().read())["format"] == "tierfs-checkpoint"
    assert sorted(os.listdir(store.parent)) == ["store", "train.py"]


def test_without_the_variable_they_are_torchs_own(store):
    torchrun(store.parent, "train.py", f"tierfs::file://{store}/run", TIERFS_DCP="0")
    for step in (1, 2, 3, 4):
        assert first_byte(f"tierfs::file://{store}/run/{step}/.metadata") == b"\x80"
