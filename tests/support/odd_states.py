"""States with every kind of value, and a comparison bit for bit."""

from __future__ import annotations

import re

import torch

from tierfs.dcp.tensorbytes import bytes_of, tensor_in

# Excludes dtypes narrower than a byte, and those that need more than their elements (quantized ones).
_ODD = re.compile(r"bits|quint|qint|u?int[1-7]$|fn_x2")
DTYPES = sorted(
    {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and not _ODD.search(str(kind))}, key=str
)


def noise(dtype, shape, seed=0):
    length = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (length,), dtype=torch.uint8, generator=torch.manual_seed(seed))
    return tensor_in(bytearray(bytes_of(raw)), dtype, shape)


def same(one, other):
    """Return whether two values are equal, with tensors compared by their bytes."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and (one.dtype, one.shape, bytes(bytes_of(one))) == (
            other.dtype,
            other.shape,
            bytes(bytes_of(other)),
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def odd_state(seed=0, *, dtypes=DTYPES):
    """Return a state with tensors of every dtype, 0-d, empty and large tensors, lists and objects."""
    return {
        "model": {str(dtype).removeprefix("torch."): noise(dtype, (5, 3), seed) for dtype in dtypes},
        "scalar": torch.tensor(2.5 + seed),
        "empty": torch.empty(0, 7),
        "large": noise(torch.float32, (700, 1000), seed),
        "groups": [{"lr": noise(torch.float32, (2,), seed)}, {"lr": noise(torch.bfloat16, (3,), seed)}],
        "names": ["a", {"b": seed}],
        "step": 12 + seed,
    }
