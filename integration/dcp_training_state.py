"""The complete state of a training run with the demo's model, as one DCP ``Stateful``, for an exact resume.

Model and optimizer go through `torch.distributed.checkpoint.state_dict`. Values that differ by rank (random
generators, data position) have one key for each rank, because DCP stores one value per name.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tierfs.demo.model import ByteStream

__all__ = ["TrainingState"]


class TrainingState(Stateful):
    """The complete state of a training run on this rank.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        stream: The data, with its position and generator.
        rank: This rank.

    Attributes:
        step: Number of steps so far.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, stream: ByteStream, *, rank: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.stream = stream
        self.rank = rank
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return views of model and optimizer shards, and copies of the rest. A collective: all ranks call it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        _, words, _ = self.stream.generator.getstate()
        own = {
            "torch_rng": torch.get_rng_state(),
            "python_rng": torch.tensor(words, dtype=torch.int64),
            "position": self.stream.position,
        }
        return {"step": self.step, "model": model, "optimizer": optimizer, f"rank_{self.rank}": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the model, the optimizer, the data and the generators from a loaded state."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        own = state_dict[f"rank_{self.rank}"]
        self.step = int(state_dict["step"])
        self.stream.position = int(own["position"])
        version, _, gauss = self.stream.generator.getstate()
        self.stream.generator.setstate((version, tuple(own["python_rng"].tolist()), gauss))
        torch.set_rng_state(own["torch_rng"])

    def digest(self) -> str:
        """Return one digest of the bytes of model, optimizer and generators of all ranks. A collective."""
        hasher = hashlib.blake2b(digest_size=16)
        for path, tensor in _tensors(self.state_dict()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            hasher.update(path.encode())
            hasher.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        shares: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(shares, hasher.hexdigest())
        return hashlib.blake2b("".join(shares).encode(), digest_size=16).hexdigest()


def _tensors(value: object, path: str = "") -> list[tuple[str, Tensor]]:
    """Return every tensor in a nested state dict with its path, in the order of the dict."""
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in _tensors(item, f"{path}/{key}")]
    return []
