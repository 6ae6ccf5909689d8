"""The model of ``tierfs demo``: a small byte-level GPT whose size follows from a number of parameters.

It stands in for the user's model and is deliberately plain: pre-norm blocks, learned positions and dropout. Dropout
makes the state of torch's random generator matter on resume. Weights are not tied, because sharding would have to undo
that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 128  # bytes that the model sees at once
_DROPOUT = 0.1  # of the activations after the embedding and each half of a block
_WIDTH_STEP = 32
_WIDTH_PER_LAYER = 64  # width / depth of the well-known GPT sizes: 768 / 12
_LAYERS_MAX = 96
_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a `ByteGPT`."""

    width: int
    layers: int
    heads: int
    context: int

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (2 * VOCABULARY + self.context + 2) * self.width


def shape_for(parameters: int) -> ModelShape:
    """Return the shape nearest to a number of parameters, with a usual ratio of width to depth.

    Args:
        parameters: Wanted number of trained values. Sizes come in steps, so the result is near this number, not equal.
    """
    best: tuple[float, ModelShape] | None = None
    for layers in range(1, _LAYERS_MAX + 1):
        ideal = math.sqrt(parameters / (12 * layers))
        floor = max(1, int(ideal // _WIDTH_STEP))
        for width in (floor * _WIDTH_STEP, (floor + 1) * _WIDTH_STEP):
            heads = width // (64 if width % 64 == 0 else 32)
            shape = ModelShape(width=width, layers=layers, heads=heads, context=CONTEXT)
            size_error = abs(math.log(shape.parameters / parameters))
            aspect_error = abs(math.log(width / (_WIDTH_PER_LAYER * layers)))
            score = size_error + 0.1 * aspect_error
            if best is None or score < best[0]:
                best = (score, shape)
    assert best is not None
    return best[1]


class _Block(nn.Module):
    """Attention and a feed-forward layer, each with normalised input and a residual connection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.feed_norm = nn.LayerNorm(shape.width)
        self.feed_in = nn.Linear(shape.width, 4 * shape.width)
        self.feed_out = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        mixed: Tensor = self.attention_in(self.attention_norm(x))
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in torch.split(mixed, width, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(attended.transpose(1, 2).reshape(batch, time, width)))
        fed: Tensor = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))
        summed: Tensor = x + self.dropout(fed)
        return summed


class ByteGPT(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Branches that add to the residual stream start smaller, so that the stream does not grow with depth.
                residual = name.endswith(("attention_out.weight", "feed_out.weight"))
                nn.init.normal_(parameter, std=_INIT_STD / math.sqrt(2 * shape.layers) if residual else _INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per byte, of predicting ``targets`` from ``tokens``.

        Args:
            tokens: int64 bytes, (batch, time). The time is at most the context.
            targets: The byte that follows each token, same shape.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
