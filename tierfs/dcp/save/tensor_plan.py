"""Lay out a rank's tensors in the runs of its shard file. The layout is the same for each save, so it is cached."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierfs.codec.layout.safetensors import METADATA_NAME, HeaderEntry
from tierfs.dcp.save.plan import PlannedPiece, plan_runs
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES


@dataclass(frozen=True, slots=True)
class TensorRun:
    """A run of tensors of one dtype.

    Attributes:
        dtype: Of all its tensors.
        numbers: The numbers of its tensors, in order.
        shapes: The shape of each tensor; ``None`` if all have one dimension.
        counts: The number of elements of each tensor.
        entries: The header's entry of each tensor.
        lengths: The lengths of the run's chunks, in bytes.
    """

    dtype: torch.dtype
    numbers: tuple[int, ...]
    shapes: tuple[torch.Size, ...] | None
    counts: tuple[int, ...]
    entries: tuple[HeaderEntry, ...]
    lengths: tuple[int, ...]

    def views(self, memory: Any) -> list[torch.Tensor]:
        """Return the tensors as views of the run's memory, each with a storage of its own."""
        views = [
            torch.frombuffer(memory, dtype=self.dtype, count=count, offset=entry.at)
            for count, entry in zip(self.counts, self.entries, strict=True)
        ]
        if self.shapes is not None:
            for view, shape in zip(views, self.shapes, strict=True):
                view.resize_(shape)
        return views


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The layout of all tensors.

    Attributes:
        runs: For the tensors that have elements.
        names: The names of these tensors; no two are the same.
        length: Of all runs, in bytes.
    """

    runs: tuple[TensorRun, ...]
    names: frozenset[str]
    length: int


def plan_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> TensorPlan:
    """Lay out named tensors: see `plan_tensors`."""
    return plan_tensors(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in tensors]))


@functools.lru_cache(maxsize=4)
def plan_tensors(tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> TensorPlan:
    """Lay out tensors.

    Args:
        tensors: Name, dtype and shape of each. Names that repeat get a number at their end in the header.
    """
    full = [number for number, (_, _, shape) in enumerate(tensors) if shape.numel()]
    sizes = [(shape.numel(), dtype.itemsize) for _, dtype, shape in map(tensors.__getitem__, full)]
    pieces = [
        PlannedPiece(tensors[number][0], str(tensors[number][1]), count * width)
        for number, (count, width) in zip(full, sizes, strict=True)
    ]
    names = {METADATA_NAME}
    runs = []
    for plan in plan_runs(pieces):
        numbers = tuple(full[piece] for piece in plan.pieces)
        entries: list[HeaderEntry] = []
        at = 0
        for piece, number in zip(plan.pieces, numbers, strict=True):
            name, dtype, shape = tensors[number]
            length = pieces[piece].length
            entries.append(HeaderEntry(unique(name, names), *described(dtype, shape, length), at, length))
            at += length
        shapes = tuple(tensors[number][2] for number in numbers)
        runs.append(
            TensorRun(
                tensors[numbers[0]][1],
                numbers,
                None if all(len(shape) == 1 for shape in shapes) else shapes,
                tuple(sizes[piece][0] for piece in plan.pieces),
                tuple(entries),
                plan.lengths,
            )
        )
    return TensorPlan(tuple(runs), frozenset(names - {METADATA_NAME}), sum(piece.length for piece in pieces))


def described(dtype: torch.dtype, shape: Iterable[int], length: int) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of a tensor for the header.

    A dtype that the format does not have is described as bytes.
    """
    known = SAFETENSORS_NAMES.get(dtype)
    return (known, tuple(shape)) if known else ("U8", (length,))


def unique(name: str, names: set[str]) -> str:
    """Return ``name``, with a number at its end if it is in ``names`` already, and add the result to ``names``."""
    found, number = name, 1
    while found in names:
        found, number = f"{name}#{number}", number + 1
    names.add(found)
    return found
