"""The states that `dcp.py` saves, with new content for each save, and readers of the memory that a save takes."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import SEED

BLOCK_TENSORS = 64
LAYERS = 24
HEAD = 64
SMALL_TENSORS = 900
SMALL_ELEMENTS = 1024
SHARD_ELEMENTS = 128 << 10


def blocks(
    size: int, count: int = BLOCK_TENSORS, make: Callable[[int, int], torch.Tensor] = torch.randn
) -> dict[str, Any]:
    """Return ``count`` float32 matrices of ``size`` bytes in all."""
    rows = 8
    columns = size // (count * rows * 4)
    return {"model": {f"tensor.{number:04d}": make(rows, columns) for number in range(count)}}


def transformer(size: int) -> dict[str, Any]:
    """Return about 300 parameters of a decoder with AdamW's state, at most ``size`` bytes; four in five are small."""
    width = max(int(math.sqrt(size / (3 * 4 * (12 * LAYERS + 12)))) // HEAD * HEAD, HEAD)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (8 * width, width), "position.weight": (1024, width)}
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attention.qkv", 3 * width, width),
            ("attention.out", width, width),
            ("mlp.up", 4 * width, width),
            ("mlp.down", width, 4 * width),
        ):
            shapes[f"layers.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"layers.{layer}.{name}.bias"] = (rows,)
        for norm in ("norm1", "norm2"):
            shapes[f"layers.{layer}.{norm}.weight"] = shapes[f"layers.{layer}.{norm}.bias"] = (width,)
    shapes["norm.weight"] = shapes["norm.bias"] = (width,)
    moments = {
        name: {"step": torch.tensor(1.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        for name, shape in shapes.items()
    }
    return {
        "model": {name: torch.randn(shape) for name, shape in shapes.items()},
        "optimizer": {"state": moments, "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95), "params": list(shapes)}]},
        "step": 1,
    }


def shards(size: int, number: int = 0) -> dict[str, Any]:
    """Return one of many ranks' shards of a bfloat16 model: pieces of 1 to 8 MiB, float32 copies, AdamW's moments.

    Args:
        size: Most bytes.
        number: Selects the content.
    """
    generator = torch.Generator().manual_seed(SEED + number)
    elements = {"qkv": 3, "out": 1, "up": 4, "down": 4}  # in units of 128 Ki; 14 bytes an element
    state: dict[str, Any] = {"model": {}, "master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for layer in range(max(size // (14 * sum(elements.values()) * SHARD_ELEMENTS), 1)):
        for name, count in elements.items():
            fqn, shape = f"layers.{layer}.{name}.weight", (count * 128, SHARD_ELEMENTS // 128)
            weight = torch.randn(shape, generator=generator) * 0.02
            state["model"][fqn], state["master"][fqn] = weight.bfloat16(), weight
            state["exp_avg"][fqn] = torch.randn(shape, generator=generator) * 1e-3
            state["exp_avg_sq"][fqn] = torch.rand(shape, generator=generator) * 1e-6
    return state


def small(count: int = SMALL_TENSORS) -> dict[str, Any]:
    """Return tensors of 4 KiB."""
    return {"model": {f"tensor.{number:04d}": torch.randn(SMALL_ELEMENTS) for number in range(count)}}


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for value in inner for tensor in tensors_of(value)]


def bytes_in(state: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state))


def renew(state: Any, number: int) -> None:
    """Change every element in place, so that no chunk was stored before."""
    for tensor in tensors_of(state):
        tensor.view(torch.int32).bitwise_xor_(0x5DEECE66 ^ (number * 0x9E37 & 0x7FFFFFFF))


def empty_like(state: Any) -> Any:
    """Return the same structure with tensors of zeros in warm memory."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: empty_like(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(empty_like(value) for value in state)
    return state


def same(one: Any, other: Any) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(left.view(torch.int32), right.view(torch.int32)) for left, right in pairs)


def copy_into(targets: list[torch.Tensor], state: Any) -> None:
    """Copy tensor by tensor. On one thread, no staging can be faster."""
    for target, tensor in zip(targets, tensors_of(state), strict=True):
        target.copy_(tensor)


def descriptors(*, segments: bool) -> list[str]:
    """Return the targets of this process's descriptors: those of the ram tier's segments, or all others."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(str(link.readlink()))
    return [target for target in found if ((".slab" in target) or ("/memfd:" in target)) == segments]


def back(size: int) -> None:
    """Touch `size` bytes, so that the host of a virtual machine backs the machine's free memory.

    A host takes free memory back within seconds, and provides it again at 1 GB/s.
    """
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1


def drop_page_cache(directory: Path) -> None:
    """Flush the files below a directory and drop them from the page cache."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)
