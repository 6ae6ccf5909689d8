"""Trains with Lightning: ``lightning_trainer.py URL DEVICES ddp|sharded|fsdp``. Started again, it goes on."""

import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tierfs.plugs.lightning import TierCheckpoint, TierFSDPStrategy, TierModelParallelStrategy

URL, DEVICES, KIND = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Net(LightningModule):
    def configure_model(self):
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        if KIND == "sharded":
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        elif KIND == "fsdp":  # Lightning would wrap it, but not on a CPU
            self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"), use_orig_params=True)

    def training_step(self, batch, index):
        data = torch.randn(8, 17, generator=torch.Generator().manual_seed(self.global_step))
        mine = data[self.global_rank :: DEVICES]
        loss = self.net(mine[:, 1:]).sub(mine[:, :1]).square().mean()
        time.sleep(0.1)
        self.print(f"step {self.global_step} loss {self.all_gather(loss.detach()).mean():.7g}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if KIND == "fsdp":
    strategy = TierFSDPStrategy(state_dict_type="sharded", process_group_backend="gloo")
else:
    strategy = TierModelParallelStrategy(DEVICES, 1) if KIND == "sharded" else "ddp"
saves = TierCheckpoint(URL, save_last=True, every_n_train_steps=4)
trainer = Trainer("cpu", strategy, DEVICES, max_epochs=2, logger=False, enable_progress_bar=False, callbacks=[saves])
trainer.fit(Net(), range(12), ckpt_path="last")
