"""Small models, a GPU that has all tensors, and a meter of its memory, for the tests of activations."""

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.fake_device import FakeDevice


class WholeGpu(FakeDevice):
    """A fake GPU in whose memory all tensors of torch lie. Its copies run as late as CUDA allows."""

    def owns(self, tensor):
        return tensor.device.type == "cpu"

    def allocate(self, length):
        return torch.full((length,), 0xAB, dtype=torch.uint8)

    def host_memory(self, length):
        return torch.from_numpy(np.full(length, 0xCD, np.uint8))  # the meter does not see it


class Meter(TorchDispatchMode):
    """Measures the most bytes of tensors that were alive at once, of those made in it."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                reference = StorageWeakRef(tensor.untyped_storage())
                self._alive[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return found


class Attention(nn.Module):
    """Queries, keys and values are views of one tensor."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, *, scale=None):
        query, key, value = self.project(self.norm(x)).chunk(3, dim=-1)
        scores = torch.softmax(query @ key.transpose(1, 2) / 8, dim=-1)
        found = x + self.out(scores @ value)
        return found if scale is None else found * scale


class Feed(nn.Module):
    """Has an operation that changes its input in place, and one that draws random numbers."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + torch.dropout(self.down(torch.relu_(self.up(x))), 0.1, train=True)


class Picture(nn.Module):
    """Convolutions of tensors whose channels come last."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)])

    def forward(self, x):
        batch, length, width = x.shape
        picture = x.reshape(batch, 4, length // 4, width).to(memory_format=torch.channels_last)
        for layer in self.layers:
            picture = torch.tanh(layer(picture))
        return picture.contiguous().reshape(batch, length, width)


WIDTH = 64


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList([kind(WIDTH) for _ in range(layers) for kind in (Attention, Feed, Picture)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def new_model(layers=3):
    torch.manual_seed(1)
    return Model(layers)


def batch(seed=2):
    return torch.randn(8, 128, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
