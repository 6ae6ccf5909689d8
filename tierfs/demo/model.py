"""The model of ``tierfs demo``: a small byte-level GPT whose size follows from a number of parameters.

It stands in for the user's model and is deliberately plain: pre-norm blocks, learned positions and dropout. Dropout
makes the state of torch's random generator matter on resume. Weights are not tied, because sharding would have to undo
that.

The data is the source text of the Python standard library, read in lanes. A checkpoint must hold the reading position
and its random generator: a resumed run without one of them would read other bytes and have other losses.
"""

from __future__ import annotations

import math
import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tierfs.errors import InvalidInputError

VOCABULARY = 256
CONTEXT = 128  # bytes that the model sees at once
_DROPOUT = 0.1  # of the activations after the embedding and each half of a block
_WIDTH_STEP = 32
_WIDTH_PER_LAYER = 64  # width / depth of the well-known GPT sizes: 768 / 12
_LAYERS_MAX = 96
_INIT_STD = 0.02
_CORPUS_SIZE_MAX = 16 * 2**20
_SKIPPED = frozenset({"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})


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
    """Return a shape near a number of trained values, with a usual ratio of width to depth. Sizes come in steps."""

    def distance(shape: ModelShape) -> float:
        size = abs(math.log(shape.parameters / parameters))
        return size + 0.1 * abs(math.log(shape.width / (_WIDTH_PER_LAYER * shape.layers)))

    return min((shape for layers in range(1, _LAYERS_MAX + 1) for shape in _shapes(layers)), key=distance)


def _shapes(layers: int) -> Iterator[ModelShape]:
    for width in range(_WIDTH_STEP, 2 * _WIDTH_PER_LAYER * layers + 1, _WIDTH_STEP):
        yield ModelShape(width=width, layers=layers, heads=width // (64 if width % 64 == 0 else 32), context=CONTEXT)


class ByteGPT(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width,
                shape.heads,
                4 * shape.width,
                dropout=_DROPOUT,
                activation=functional.gelu,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Branches that add to the residual stream start smaller, so that the stream does not grow with depth.
                residual = name.endswith(("out_proj.weight", "linear2.weight"))
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
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library_text() -> bytes:
    """Return the ``*.py`` files of the standard library, joined in the order of their paths; at most 16 MiB.

    Tests and installed packages are left out.

    Raises:
        InvalidInputError: There is no source text, as in an interpreter that keeps it in a zip file.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for directory, names, files in os.walk(root):
        names[:] = sorted(set(names) - _SKIPPED)
        for file in sorted(files):
            if file.endswith(".py") and size < _CORPUS_SIZE_MAX:
                parts.append(Path(directory, file).read_bytes())
                size += len(parts[-1])
    if not size:
        raise InvalidInputError(f"there is no Python source text below {root} to train on", path=str(root))
    return b"".join(parts)[:_CORPUS_SIZE_MAX]


class ByteStream:
    """Batches of consecutive bytes, with one lane of the text per row of a batch.

    Each row continues where it stopped, after a random gap that is drawn once per batch and differs between ranks. All
    ranks share one text, of which ``rank`` selects the lanes.

    Raises:
        InvalidInputError: A lane has fewer than ``2 * context + 2`` bytes.
    """

    def __init__(self, text: bytes, *, batch: int, context: int, rank: int, world_size: int, seed: int) -> None:
        self.position = 0
        self.generator = random.Random(seed + rank)
        self._context = context
        self._lane_size = len(text) // (batch * world_size)
        if self._lane_size < 2 * context + 2:
            raise InvalidInputError(f"{len(text)} bytes of text are too few for {batch * world_size} rows of {context}")
        # A copy, because torch warns about a tensor over read-only bytes.
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._starts = [(rank * batch + row) * self._lane_size for row in range(batch)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])
        self.generator.setstate(state["generator"])

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the next tokens and the bytes that follow them, both int64, (batch, context)."""
        span = self._lane_size - self._context - 1
        self.position = (self.position + self.generator.randrange(self._context)) % span
        begins = [start + self.position for start in self._starts]
        rows = torch.stack([self._text[begin : begin + self._context + 1] for begin in begins]).long()
        self.position = (self.position + self._context) % span
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
