"""Run ``torch_checkpointing`` with its storage in a store, on each torchrun rank: ``checkpointing_trainer.py URL``."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig

from tierfs.experimental.torchcheckpointing import TierStorageConfig


def state(mesh, placement, seed):
    torch.manual_seed(seed)
    whole = torch.randn(1001, 37)
    return {
        "model": {"rows": distribute_tensor(whole, mesh, [placement]), "bias": torch.full((5,), float(seed))},
        "step": seed,
    }


def check(found, expected):
    assert torch.equal(found["model"]["rows"].full_tensor(), expected["model"]["rows"].full_tensor())
    assert torch.equal(found["model"]["bias"], expected["model"]["bias"])
    assert found["step"] == expected["step"]


def main(root):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saves = {
        "sync": SyncCheckpointSaverConfig(),
        "async": AsyncCheckpointSaverConfig(
            staging_config=CheckpointStagerConfig(
                use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        ),
    }
    for name, save in saves.items():
        # No resharder: on several ranks, the one of 0.1.1 gathers its metadata only on CUDA devices.
        manager = CheckpointManager.Config(save=save, storage_config=TierStorageConfig()).build()
        for seed in (1, 2):
            live = state(mesh, Shard(0), seed)
            future = manager.save(f"{root}/{name}-{seed}", live)
            if future is not None:
                future.result()
        dist.barrier()
        for seed in (1, 2):
            found = manager.load(f"{root}/{name}-{seed}", into=state(mesh, Shard(0), 0))
            check(found, state(mesh, Shard(0), seed))
        manager.close()
    print("DONE")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
