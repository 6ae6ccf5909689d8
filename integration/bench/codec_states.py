"""The states of `snapshots.py` under the names that a user gives their tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

# The names that users give the classes of `snapshots.py`.
NAMES = {"w16": "model", "w32": "master", "m": "exp_avg", "v": "exp_avg_sq"}


def steps_of(run: Path) -> list[Path]:
    """Return the states of a run in order.

    Raises:
        FileNotFoundError: The run has no states.
    """
    found = sorted(path for path in run.glob("*") if path.is_dir() and any(path.iterdir()))
    if not found:
        raise FileNotFoundError(f"{run} has no states: python integration/bench/snapshots.py {run.parent} {run.name}")
    return found


def load(step: Path, classes: tuple[str, ...] = tuple(NAMES)) -> dict[str, torch.Tensor]:
    """Load the tensors of these classes by name. uint16 arrays become bfloat16."""
    state = {}
    for path in sorted(step.glob("*.npy")):
        kind, _, tensor = path.stem.partition(".")
        if kind in classes:
            array = torch.from_numpy(np.load(path))
            state[f"{NAMES[kind]}.{tensor}"] = array.view(torch.bfloat16) if array.dtype == torch.uint16 else array
    return state


def bytes_of(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def changed(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if not same(tensor, before[name])}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether shape, dtype and all bits are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
