"""The data of ``tierfs demo``: the source text of the Python standard library, read in lanes.

This module owns the reading position and its random generator. A checkpoint must hold both: a resumed run without one
of them would read other bytes and have other losses.
"""

from __future__ import annotations

import os
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierfs.errors import InvalidInputError

_CORPUS_SIZE_MAX = 16 * 2**20
_SKIPPED = frozenset({"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})


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

    Each row continues where it stopped, after a random gap that is drawn once per batch.

    Args:
        text: The whole text, the same on all ranks.
        batch: Rows of a batch.
        context: Bytes of a row.
        rank: Selects this rank's lanes.
        world_size: Number of ranks that share the text.
        seed: Seed of the random gaps, which differ between ranks.

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
        """Return the position and the state of the generator."""
        return {"position": self.position, "generator": self.generator.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position and the state of the generator."""
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
