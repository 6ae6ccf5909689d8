"""Train with torchtitan's checkpoint manager, optimizers and schedulers. Only the folder's URL refers to tierfs.

torchrun runs it as ``titan_trainer.py FOLDER ASYNC_MODE``. Of two trainings, one resumes from its saves; both must
end the same.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

STEPS = 6
HALF = 3
KEPT = 2


class Progress:
    """The part of the state that torchtitan's trainer saves of itself."""

    step = 0
    tokens = 0

    def state_dict(self):
        return {"step": self.step, "tokens": torch.tensor(self.tokens)}

    def load_state_dict(self, state):
        self.step, self.tokens = state["step"], int(state["tokens"])


class Training:
    def __init__(self, folder, mode, mesh, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.Linear(65, 33))
        fully_shard(self.model, mesh=mesh)
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
        self.optimizers = OptimizersContainer(
            OptimizersContainer.Config(param_groups=[group], implementation="for-loop"), model_parts=[self.model]
        )
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (step + 1))
        self.progress = Progress()
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                enable=True, folder=folder, interval=1, keep_latest_k=KEPT, async_mode=mode, last_save_model_only=False
            ),
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=None,
        )

    def run(self, end):
        """Train to a step with a save at each, and end as torchtitan's trainer does."""
        while self.progress.step < end:
            self.progress.step += 1
            self.progress.tokens += 100
            torch.manual_seed(1000 * self.progress.step + dist.get_rank())
            self.manager.maybe_wait_for_staging()
            self.model(torch.randn(4, 33)).square().mean().backward()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.manager.save(self.progress.step, last_step=self.progress.step == STEPS)
        self.manager.maybe_wait_for_staging()
        self.manager.maybe_wait_for_saving()
        self.manager.close()

    def fingerprint(self):
        found = hashlib.sha256(repr((self.progress.state_dict(), self.schedulers.state_dict())).encode())
        state = {**self.model.state_dict(), **self.optimizers.state_dict()}
        for name in sorted(state):
            value = state[name]
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(name.encode())
            found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
        return found.hexdigest()


def main(folder, mode):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = Training(f"{folder}/whole", mode, mesh, seed=1)
    assert not whole.manager.load(), "nothing is there yet"
    whole.run(STEPS)
    first = Training(f"{folder}/parts", mode, mesh, seed=1)
    first.run(HALF)
    dist.barrier()
    second = Training(f"{folder}/parts", mode, mesh, seed=2)
    assert second.manager.load()
    assert second.progress.step == HALF
    assert second.fingerprint() == first.fingerprint()
    second.run(STEPS)
    assert second.fingerprint() == whole.fingerprint()
    dist.barrier()
    for step in (STEPS - 1, STEPS):
        other = Training(f"{folder}/parts", mode, mesh, seed=3)
        assert other.manager.load(step)
        assert other.progress.step == step
        other.manager.close()
    assert other.fingerprint() == whole.fingerprint()
    print("DONE")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
