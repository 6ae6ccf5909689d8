"""Compare two checkpoints tensor by tensor. They are read in pieces, so neither has to fit into memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tierfs.checkpoint.notes import ABOUT
from tierfs.dcp.checkpoint import Checkpoint
from tierfs.dcp.load.boxes import Box, BoxReader, boxes_of
from tierfs.dcp.tensorbytes import bytes_of

ELEMENTS_AT_ONCE = 1 << 20
"""Bounds the memory for elements that are converted to float64."""
_INTEGER = re.compile(r"torch\.(u?)int(8|16|32|64)")


@dataclass(slots=True)
class TensorDifference:
    """The differences between the elements of two tensors of one dtype and shape.

    Attributes:
        elements: The number of elements.
        differing: The number of elements whose bits differ. NaNs with the same bits are equal; 0.0 and -0.0 differ.
        max_abs: The largest finite absolute difference; ``None`` if there is none, or the dtype has no arithmetic.
        not_finite: The number of elements whose difference is not finite: one of the two is NaN or infinite, or the
            difference overflows a float64.
        square_sum: The sum of the squares of the finite differences.
        square_sum_a: The sum of the squares of the finite elements of the first tensor.
    """

    elements: int = 0
    differing: int = 0
    max_abs: float | int | None = None
    not_finite: int = 0
    square_sum: float = 0.0
    square_sum_a: float = 0.0

    @property
    def relative(self) -> float | None:
        """The norm of the difference, divided by that of the first tensor; ``None`` if either is unknown or 0."""
        if self.max_abs is None or not self.square_sum_a:
            return None
        return math.sqrt(self.square_sum / self.square_sum_a)

    @property
    def fraction(self) -> float:
        """The share of elements that differ."""
        return self.differing / self.elements if self.elements else 0.0

    def add(self, other: TensorDifference) -> None:
        """Add the counts of another part of the same tensors."""
        self.elements += other.elements
        self.differing += other.differing
        self.not_finite += other.not_finite
        self.square_sum += other.square_sum
        self.square_sum_a += other.square_sum_a
        if other.max_abs is not None:
            self.max_abs = other.max_abs if self.max_abs is None else max(self.max_abs, other.max_abs)


@dataclass(slots=True)
class CheckpointDifference:
    """The differences between checkpoints A and B. All names are sorted.

    Attributes:
        only_a: Tensors and objects that only A has.
        only_b: Tensors and objects that only B has.
        unlike: Names whose dtype or shape differs, or that are a tensor in one checkpoint and an object in the other.
            Each maps to the descriptions in A and in B.
        tensors: Tensors whose elements differ.
        objects: Objects whose bytes differ.
        equal: The number of equal tensors and objects.
        about: Whether the training manager's own description of the save differs: its step, its run, its costs.
            That is no value of the state, so it counts neither as equal nor as a difference.
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    unlike: dict[str, tuple[str, str]] = field(default_factory=dict)
    tensors: dict[str, TensorDifference] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    equal: int = 0
    about: bool = False

    @property
    def is_none(self) -> bool:
        """Whether there is no difference."""
        return not (self.only_a or self.only_b or self.unlike or self.tensors or self.objects)


def compare(a: Checkpoint, b: Checkpoint, *, progress: Callable[[int], object] | None = None) -> CheckpointDifference:
    """Compare the values of two checkpoints. Their division into shards does not matter.

    Args:
        a: The first checkpoint.
        b: The second one. It may be in another store, or of another format.
        progress: Called with the number of bytes of ``a``'s tensors after each comparison.

    Raises:
        CorruptionError: Stored bytes are wrong or missing, or the shards of a tensor do not cover it.
        TierfsError: A checkpoint could not be read.
    """
    found = CheckpointDifference()
    described_a, described_b = _described(a), _described(b)
    described = described_a.pop(ABOUT, None), described_b.pop(ABOUT, None)
    found.only_a = sorted(described_a.keys() - described_b.keys())
    found.only_b = sorted(described_b.keys() - described_a.keys())
    alike = []
    for fqn in sorted(described_a.keys() & described_b.keys()):
        if described_a[fqn] == described_b[fqn]:
            alike.append(fqn)
        else:
            found.unlike[fqn] = described_a[fqn], described_b[fqn]
    tensors = [fqn for fqn in alike if described_a[fqn] != _OBJECT]
    for checkpoint in (a, b):
        checkpoint.check_whole(tensors)
    readers = BoxReader(a), BoxReader(b)
    differences = {fqn: TensorDifference() for fqn in tensors}
    boxes = list(_boxes(a, b, tensors))
    for (box, one), (_, other) in zip(readers[0].each(boxes, progress), readers[1].each(boxes), strict=True):
        differences[box.fqn].add(compare_tensors(one, other))
    found.tensors = {fqn: difference for fqn, difference in differences.items() if difference.differing}
    found.objects = [
        fqn for fqn in alike if described_a[fqn] == _OBJECT and readers[0].object(fqn) != readers[1].object(fqn)
    ]
    found.about = described[0] != described[1] or (
        described[0] is not None and readers[0].object(ABOUT) != readers[1].object(ABOUT)
    )
    found.equal = len(alike) - len(found.tensors) - len(found.objects)
    return found


_OBJECT = "object"


def _described(checkpoint: Checkpoint) -> dict[str, str]:
    tensors = {
        fqn: f"{str(item.properties.dtype).removeprefix('torch.')} {list(item.size)}"
        for fqn, item in checkpoint.tensors.items()
    }
    return {**tensors, **dict.fromkeys(checkpoint.objects, _OBJECT)}


def _boxes(a: Checkpoint, b: Checkpoint, names: list[str]) -> Iterator[Box]:
    for fqn in names:
        # If one of the two can only be read as a whole, read both as a whole.
        yield from min(list(boxes_of(a, fqn)), list(boxes_of(b, fqn)), key=len)


def compare_tensors(one: Any, other: Any) -> TensorDifference:
    """Compare the elements of two CPU tensors of the same dtype and shape. Any dtype is allowed."""
    dtype: torch.dtype = one.dtype
    found = TensorDifference(elements=one.numel())
    raw_a, raw_b = (np.frombuffer(bytes_of(tensor), dtype=np.uint8) for tensor in (one, other))
    step = ELEMENTS_AT_ONCE * dtype.itemsize
    for start in range(0, len(raw_a), step):
        part_a, part_b = raw_a[start : start + step], raw_b[start : start + step]
        rows_a, rows_b = part_a.reshape(-1, dtype.itemsize), part_b.reshape(-1, dtype.itemsize)
        found.square_sum_a += _square_sum(_as_float64(rows_a, dtype))
        if np.array_equal(part_a, part_b):
            continue
        differs = (rows_a != rows_b).any(axis=1)
        found.add(_measure(rows_a[differs], rows_b[differs], dtype))
    return found


def _measure(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: torch.dtype) -> TensorDifference:
    """Measure the differences of elements that all differ. Each element is a row of bytes."""
    found = TensorDifference(differing=len(a))
    integer = _INTEGER.fullmatch(str(dtype))
    if integer is not None or dtype == torch.bool:
        kind = np.dtype(str(dtype).removeprefix("torch.")) if integer is not None else np.dtype(np.uint8)
        whole_a, whole_b = a.copy().view(kind), b.copy().view(kind)
        # The larger minus the smaller one fits into the unsigned type. In the signed type it wraps to the same bits.
        with np.errstate(over="ignore"):
            apart = np.where(whole_a > whole_b, whole_a - whole_b, whole_b - whole_a)
        apart = apart.view(f"u{kind.itemsize}")
        found.max_abs, found.square_sum = int(apart.max()), _square_sum(apart.astype(np.float64))
        return found
    numbers = _as_float64(a, dtype), _as_float64(b, dtype)
    if numbers[0] is None or numbers[1] is None:
        return found
    with np.errstate(over="ignore", invalid="ignore"):
        apart = np.abs(numbers[0] - numbers[1])
        if dtype.is_complex:
            apart = np.hypot(apart[:, 0], apart[:, 1])
        apart = apart.reshape(-1)
    finite = np.isfinite(apart)
    found.not_finite = int(len(apart) - np.count_nonzero(finite))
    if finite.any():
        found.max_abs, found.square_sum = float(apart[finite].max()), _square_sum(apart)
    return found


def _square_sum(numbers: np.ndarray[Any, Any] | None) -> float:
    """Return the sum of the squares of all finite numbers."""
    if numbers is None:
        return 0.0
    flat = numbers.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(flat, flat))
        return total if math.isfinite(total) else float(np.square(flat[np.isfinite(flat)]).sum())


def _as_float64(rows: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any] | None:
    """Convert elements to float64, a complex one to two of them; ``None`` if torch cannot convert the dtype."""
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or _INTEGER.fullmatch(str(dtype))):
        return None
    real = dtype.to_real() if dtype.is_complex else dtype
    flat = torch.from_numpy(rows.copy().reshape(-1)).view(real)
    try:
        converted: np.ndarray[Any, Any] = flat.to(torch.float64).numpy()
    except (RuntimeError, NotImplementedError):
        # A packed dtype, such as float4_e2m1fn_x2, has no single elements to convert.
        return None
    return converted.reshape(len(rows), -1)
