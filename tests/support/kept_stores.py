"""The training, the states and the content of kept stores. A kept store was made with them: change nothing here."""

from __future__ import annotations

import hashlib
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tierfs.dcp import TierReader
from tierfs.train import TrainState

STEPS = 7
"""The steps of the kept run. A full save follows the first, and a log has the others."""


class Training:
    """A small run without a rounding that could differ between machines: the rate of learning is a power of two."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.state = TrainState(model=self.model, optimizer=self.optimizer, scheduler=None, dataloader=None)

    def step(self, step: int) -> None:
        """Make one step, with gradients that follow from its number."""
        for parameter in self.model.parameters():
            parameter.grad = torch.from_numpy(_numbers(parameter.numel(), step)).view_as(parameter).clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def content(self) -> str:
        """Return a digest of the parameters."""
        return digest(*(parameter.detach().numpy().tobytes() for parameter in self.model.parameters()))


def _numbers(count: int, seed: int) -> Any:
    import numpy as np

    return (np.random.RandomState(seed).randint(-128, 128, count) / 1024).astype(np.float32)


def state_of(step: int) -> dict[str, Any]:
    """Return the state of a checkpoint: weights, moments, a copy in half the bits, and values that are no tensors."""
    weight = torch.from_numpy(_numbers(1 << 16, 1))
    for later in range(2, step + 1):
        weight[:: 1 << 6] += torch.from_numpy(_numbers(1 << 10, later))
    frozen = torch.from_numpy(_numbers(1 << 14, 99)).view(128, 128)
    return {
        "model": {"weight": weight.view(256, 256), "frozen": frozen, "scalar": torch.tensor(float(step))},
        "moment": weight.square().view(256, 256),
        "half": weight.bfloat16(),
        "step": step,
        "names": ["a", {"b": step}],
    }


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def files(url: str, **options: Any) -> dict[str, str]:
    """Return the digest of each file of a store."""
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    return {path.removeprefix(f"{root}/"): digest(fs.cat_file(path)) for path in sorted(fs.find(root))}


def tensors(url: str, **options: Any) -> dict[str, str]:
    """Load a checkpoint, and return the digest of each tensor and the text of each other value."""
    meta = TierReader(url, **options).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(each.size, dtype=each.properties.dtype) if isinstance(each, TensorStorageMetadata) else None
        for name, each in meta.items()
    }
    dcp.load(state, storage_reader=TierReader(url, **options), no_dist=True)
    return {
        name: digest(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        if isinstance(value, torch.Tensor)
        else repr(value)
        for name, value in sorted(state.items())
    }
