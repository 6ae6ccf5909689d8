"""The random generators of a process: Python's, NumPy's, and torch's on the CPU and on each GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tierfs.digest import checksum


def generators() -> dict[str, Any]:
    """Return the state of each generator by name, as plain values and tensors."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the one that libraries use
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_generators(states: dict[str, Any]) -> list[str]:
    """Set the states that `generators` returned. Return in words which could not be set; empty if all were."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    saved = states.get("cuda", [])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved and here:
        torch.cuda.set_rng_state_all(saved[:here])
    if len(saved) != here:
        return [f"random generators of {len(saved)} GPUs were saved, but this process sees {here} GPUs"]
    return []


def reseed(*words: object) -> int:
    """Seed all generators from a hash of ``words``, so that equal words give equal seeds. Return the seed."""
    seed = int.from_bytes(checksum(repr(words).encode())[:4], "little")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    return seed
