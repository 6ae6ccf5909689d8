"""Trains with DeepSpeed: ``deepspeed_trainer.py URL STAGE``, under torchrun. Started again, it goes on."""

import sys
import time

import deepspeed
import torch
import torch.distributed as dist

from tierfs.plugs.deepspeed import load_checkpoint, save_checkpoint

deepspeed.init_distributed("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
settings = {
    "train_micro_batch_size_per_gpu": 8 // ranks,
    "zero_optimization": {"stage": int(sys.argv[2])},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
_, client_state = load_checkpoint(engine, sys.argv[1])
for step in range(client_state["step"] + 1 if client_state else 1, 24):
    data = torch.randn(8, 17, generator=torch.Generator().manual_seed(step))[rank::ranks].to(engine.device)
    loss = engine(data[:, 1:]).sub(data[:, :1]).square().mean()
    engine.backward(loss)
    engine.step()
    dist.all_reduce(mean := loss.detach() / ranks)
    print(f"step {step} loss {mean:.7g}\n" * (rank == 0), end="", flush=True)
    if step % 4 == 0:
        save_checkpoint(engine, sys.argv[1], ack="staged", client_state={"step": step})
    time.sleep(0.05)
