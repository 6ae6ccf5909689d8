"""The training that `device.py` saves: a decoder of about 300 parameters with torch's AdamW."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from device_card import Card
from torch import nn
from torch.nn import functional

LAYERS = 24
HEAD = 64
VOCABULARY = 8192
LOG_EVERY = 10  # steps between two reads of the loss, as in trainers; frequent reads hide how a save affects run-ahead


class Block(nn.Module):
    """One layer: 12 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*split.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """12 parameters a layer and 5 more."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def width_for(size: int, layers: int) -> int:
    """Return the width at which float32 weights and AdamW's two moments take at most ``size`` bytes."""
    wanted, b = size / 12, 2 * VOCABULARY + 1024
    width = (math.sqrt(b * b + 48 * layers * wanted) - b) / (24 * layers)
    return max(int(width) // HEAD * HEAD, HEAD)


class Trainer:
    """A model trained on random tokens. Equal seeds give equal training, bit for bit, if torch's kernels do.

    Args:
        card: The GPU.
        size: Bytes of weights and moments.
        layers: Number of layers.
        batch: Sequences in a step.
        length: Tokens in a sequence.
        mixed: Whether matrices are multiplied in bfloat16.
    """

    def __init__(
        self, card: Card, size: int, *, layers: int = LAYERS, batch: int = 4, length: int = 1024, mixed: bool = True
    ) -> None:
        self.card, self._mixed = card, mixed
        torch.manual_seed(1)
        self._generator = torch.Generator().manual_seed(2)
        with torch.device(card.device):
            self.model = Decoder(width_for(size, layers), layers, length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=card.is_real)
        self._shape = batch, length + 1
        self.steps = 0
        self.losses: list[float] = []
        self.step()
        for tensor in self.tensors():
            card.own(tensor)

    def state(self) -> dict[str, Any]:
        """Return the state to save. Its tensors are the training's own."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """Return the state's tensors, without the tiny step counters."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]

    @property
    def size(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def step(self, before_optimizer: Callable[[], object] | None = None) -> None:
        """Train one step. ``before_optimizer`` is called before parameters change."""
        tokens = torch.randint(VOCABULARY, self._shape, generator=self._generator)
        if self.card.is_real:
            tokens = tokens.pin_memory().to(self.card.device, non_blocking=True)
        with torch.autocast(self.card.device.type, torch.bfloat16, enabled=self._mixed):
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if before_optimizer is not None:
            before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if not self.steps % LOG_EVERY:
            self.losses.append(loss.item())

    def window(self, steps: int) -> float:
        """Return the wall seconds of this many undisturbed steps."""
        self.steps = 0
        self.card.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.card.synchronize()
        return time.perf_counter() - begin

    def fingerprint(self) -> torch.Tensor:
        """Return a sum of the bits of each tensor, on the host. Equal states have equal sums."""
        sums = [tensor.contiguous().view(torch.int32).sum(dtype=torch.int64) for tensor in self.tensors()]
        return torch.stack([one.cpu() for one in sums])
