"""The small language models that `snapshots.py` trains. The file names contain their parameters' names."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

CONTEXT = 256
HEAD_VOCABULARY = 8192
WIDER = 4


def feed_forward(width: int) -> nn.Sequential:
    """Return two matrices with a GELU between them."""
    return nn.Sequential(
        nn.Linear(width, WIDER * width, bias=False), nn.GELU(), nn.Linear(WIDER * width, width, bias=False)
    )


class Experts(nn.Module):
    """A feed-forward layer in which each token uses the best few experts. The others get no gradient at all.

    Args:
        width: Width of the model.
        count: Number of experts.
        used: Experts that a token uses.
    """

    def __init__(self, width: int, count: int = 16, used: int = 2) -> None:
        super().__init__()
        self.used = used
        self.gate = nn.Linear(width, count, bias=False)
        self.ex = nn.ModuleList(feed_forward(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.used, -1)
        result = torch.zeros_like(x, dtype=torch.float32)
        for number, expert in enumerate(self.ex):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if rows.numel():
                result.index_add_(0, rows, expert(x[rows]).float() * weights[rows, places, None])
        return result.reshape(shape)


class Block(nn.Module):
    """Attention, then a feed-forward layer or experts."""

    def __init__(self, width: int, heads: int, *, experts: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp = Experts(width) if experts else feed_forward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    """A GPT with the norm before each layer.

    Args:
        vocabulary: Rows of the embedding.
        width: Width of the model.
        layers: Number of blocks.
        heads: Heads of each attention.
        experts: Whether the feed-forward layers are experts.
        tied: Whether the embedding is also the head. Otherwise the head is its own matrix, for 8192 tokens.
        sparse: Whether the embedding's gradients are sparse.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        *,
        experts: bool = False,
        tied: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width, sparse=sparse)
        self.pos = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts=experts) for _ in range(layers))
        self.lnf = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, HEAD_VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                narrower = math.sqrt(2 * layers) if name.endswith(("o.weight", "2.weight")) else 1
                nn.init.normal_(parameter, std=0.02 / narrower)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.lnf(x)
        return functional.linear(x, self.emb.weight) if self.head is None else self.head(x)


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter beside it."""

    def __init__(self, linear: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.lin = linear
        self.A = nn.Parameter(torch.randn(rank, linear.in_features) * 0.02)
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> Any:
        return self.lin(x) + 2.0 * functional.linear(functional.linear(x, self.A), self.B)


def adapt(model: Decoder) -> None:
    """Freeze a model, and add an adapter to each linear layer of its blocks."""
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)
        block.o = Adapted(block.o)
        block.mlp[0] = Adapted(block.mlp[0])
        block.mlp[2] = Adapted(block.mlp[2])
