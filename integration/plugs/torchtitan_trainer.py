"""Trains with torchtitan's parts: ``torchtitan_trainer.py URL``, under torchrun. Started again, it goes on."""

import sys
import time

import torch
import torch.distributed as dist
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.tools.logging import init_logger

from tierfs.plugs.torchtitan import TierCheckpointManager

init_logger()
dist.init_process_group("gloo")
rank, ranks, progress = dist.get_rank(), dist.get_world_size(), torch.nn.Module()
progress.register_buffer("step", torch.tensor(0))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
torch.distributed.fsdp.fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,)))
groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})]
options = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
optimizers = OptimizersContainer(options, model_parts=[model])
parts = {"dataloader": None, "model_parts": [model], "optimizers": optimizers, "sd_adapter": None}
parts |= {"lr_schedulers": LRSchedulersContainer(optimizers, lambda step: 1), "states": {"train_state": progress}}
saves = TierCheckpointManager.Config(enable=True, folder=sys.argv[1], interval=4, keep_latest_k=2).build(**parts)
saves.load()
for step in range(int(progress.step) + 1, 24):
    progress.step.fill_(step)
    data = torch.randn(8, 17, generator=torch.Generator().manual_seed(step))[rank::ranks]
    loss = model(data[:, 1:]).sub(data[:, :1]).square().mean()
    loss.backward()
    optimizers.step()
    optimizers.zero_grad()
    dist.all_reduce(mean := loss.detach() / ranks)
    print(f"step {step} loss {mean:.7g}\n" * (rank == 0), end="", flush=True)
    saves.save(step, last_step=step == 23)
    time.sleep(0.1)
saves.close()
