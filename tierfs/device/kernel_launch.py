"""Compile the CUDA kernels of tierfs on first use, and launch them on torch's streams.

CuPy compiles the sources in ``kernels/`` with NVRTC and caches the compiled code on disk. This module imports CuPy only
when a kernel is requested, so a machine without a GPU needs neither CuPy nor CUDA.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from tierfs.errors import InvalidInputError, StoreError

KERNELS = Path(__file__).with_name("kernels")
OPTIONS = ("-std=c++17",)

Argument: TypeAlias = "torch.Tensor | np.generic"
"""A tensor, passed as its address, or a numpy scalar of the parameter's size."""

_lock = threading.Lock()
_functions: dict[tuple[Path, str, int], Any] = {}


def function(name: str, file: str | os.PathLike[str]) -> Any:
    """Return a kernel for the current device, compiled on first use in this process. Thread-safe.

    Args:
        name: Name of the kernel, declared ``extern "C" __global__``.
        file: A file of ``kernels/`` without its suffix, or a path that ends in ``.cu``.

    Returns:
        A ``cupy.RawKernel`` for `launch`.

    Raises:
        InvalidInputError: CuPy is not installed.
        StoreError: The GPU's compiler or driver rejects the kernel.
    """
    cupy = _cupy()
    path = Path(file) if os.fspath(file).endswith(".cu") else KERNELS / f"{os.fspath(file)}.cu"
    key = (path, name, torch.cuda.current_device())
    found = _functions.get(key)
    if found is None:
        with _lock:
            found = _functions.get(key)
            if found is None:
                found = _functions[key] = _compile(cupy, name, path)
    return found


def launch(
    kernel: Any,
    grid: int,
    block: int,
    arguments: Sequence[Argument],
    *,
    device: torch.device,
) -> None:
    """Launch ``kernel`` on torch's current stream of ``device``. Returns before it has run.

    The kernel's memory follows torch's rules. A tensor allocated on the current stream may be released right after the
    launch. A tensor of another stream must stay until the kernel ends (``Tensor.record_stream``).

    Args:
        kernel: The result of `function`, called while ``device`` was the current device.
        grid: Number of thread blocks.
        block: Number of threads in each.
        arguments: One for each of the kernel's parameters. CuPy passes a Python number as 64 bits whatever the
            parameter is, so Python numbers are not accepted. ``numpy.uint32(count)`` fits ``unsigned int``, and
            ``numpy.uint64(address)`` fits a pointer.
        device: A CUDA device. Without an index, the current one.

    Raises:
        InvalidInputError: CuPy is not installed.
    """
    cupy = _cupy()
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index).cuda_stream
    passed = tuple(_passed(argument) for argument in arguments)
    with cupy.cuda.Device(index), cupy.cuda.ExternalStream(stream):
        kernel((grid,), (block,), passed)


def _passed(argument: Argument) -> Any:
    if isinstance(argument, torch.Tensor):
        return np.uint64(argument.data_ptr())
    assert isinstance(argument, np.generic), f"{argument!r} has no size of its own: pass a tensor or a numpy scalar"
    return argument


def _cupy() -> Any:
    try:
        import cupy  # noqa: PLC0415 - only GPU work needs the package
    except ImportError as error:
        raise InvalidInputError(
            "GPU kernels need CuPy, which is missing or does not load: pip install 'tierfs[gpu]'"
        ) from error
    return cupy


def _compile(cupy: Any, name: str, path: Path) -> Any:
    try:
        return cupy.RawModule(code=path.read_text(), options=OPTIONS).get_function(name)
    except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
        # CuPy raises RuntimeErrors for the driver and NVRTC, and OSErrors for its cache on disk.
        raise StoreError(f"the GPU's compiler rejected kernel {name} of {path}: {error}") from error
