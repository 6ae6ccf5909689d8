"""Trains with Ray Train: ``ray_trainer.py URL WORKERS``. Started again, it goes on."""

import sys
import time

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tierfs.plugs.ray import Notice, run_url, storage
from tierfs.train import Every, Manager, TrainState


def train(config):
    rank, ranks = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    parallel = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = TrainState(model=model, optimizer=optimizer, scheduler=None, dataloader=None)
    with Manager(run_url("steps"), save=[Every(steps=4), Notice()]) as manager:
        restored = manager.restore(state)
        for step in range(restored.step + 1 if restored else 1, 24):
            data = torch.randn(8, 17, generator=torch.Generator().manual_seed(step))[rank::ranks]
            loss = parallel(data[:, 1:]).sub(data[:, :1]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.distributed.all_reduce(mean := loss.detach() / ranks)
            print(f"step {step} loss {mean:.7g}\n" * (rank == 0), end="", flush=True)
            ray.train.report({"loss": mean.item()})
            manager.step(step, state)
            time.sleep(0.1)


ray.init(object_store_memory=100 << 20, include_dashboard=False)
run = RunConfig(name="run", **storage(sys.argv[1], ack="local"))
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=int(sys.argv[2])), run_config=run).fit()
