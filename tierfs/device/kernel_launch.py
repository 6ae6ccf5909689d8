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
import numpy.typing as npt
import torch

from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import InvalidInputError, StoreError

KERNELS = Path(__file__).with_name("kernels")
OPTIONS = ("-std=c++17",)
PIECE_BYTES = 1 << 20
"""Most bytes that one thread block copies. 20 GB take 20,000 thread blocks, far more than run at once."""
COPY_THREADS = 512

Argument: TypeAlias = "torch.Tensor | np.generic"
"""A tensor, passed as its address, or a numpy scalar of the parameter's size."""

_lock = threading.Lock()
_functions: dict[tuple[Path, str, int], Any] = {}


def function(name: str, file: str | os.PathLike[str]) -> Any:
    """Return a kernel for the current device, compiled on first use in this process. Thread-safe.

    The name is that of an ``extern "C" __global__`` function in a file of ``kernels/``, or in a path that ends in
    ``.cu``.

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


def launch(kernel: Any, grid: int, block: int, arguments: Sequence[Argument], *, device: torch.device) -> None:
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
    passed = tuple(_passed(argument) for argument in arguments)
    with cupy.cuda.Device(index), cupy.cuda.Stream.from_external(torch.cuda.current_stream(index)):
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


def piece_table(copies: Sequence[tuple[int, int, int]] | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Cut copies, each a target's address, a source's address and a length, into pieces of at most `PIECE_BYTES`.

    Returns:
        uint64 [pieces, 3]: target, source and length of each piece.
    """
    whole = np.array(copies, np.uint64).reshape(-1, 3)
    counts = -(-whole[:, 2].astype(np.int64) // PIECE_BYTES)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = ((np.arange(len(firsts)) - firsts) * PIECE_BYTES).astype(np.uint64)
    table = np.repeat(whole, counts, axis=0)
    table[:, :2] += offsets[:, None]
    table[:, 2] = np.minimum(table[:, 2] - offsets, np.uint64(PIECE_BYTES))
    return table


def copy_pieces(copies: Sequence[tuple[int, int, int]] | npt.NDArray[np.uint64], device: torch.device) -> None:
    """Queue copies on torch's current stream of ``device``. Returns before the kernel has run.

    Each copy is a target's and a source's address in the device's memory, and a length in bytes. Nothing overlaps.

    Raises:
        InvalidInputError: CuPy is not installed.
        StoreError: The GPU's compiler rejects the kernel.
    """
    table = piece_table(copies)
    if not len(table):
        return
    with torch.cuda.device(device):
        pinned = torch.empty(table.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned.numpy().view(np.uint64)[:] = table.reshape(-1)
        kernel, moved = function("copy_pieces", "copy"), pinned.to(device, non_blocking=True)
        launch(kernel, len(table), COPY_THREADS, (moved,), device=device)


DIGEST_BYTES = DigestKind.XXH3_128.size

DeviceAddresses: TypeAlias = npt.NDArray[np.uint64]
Lengths: TypeAlias = npt.NDArray[np.uint32]

# Below this many blocks per multiprocessor, a block gets eight warps instead of one. A warp keeps 4 KiB in flight for
# about 0.8 us, then computes for about 0.4 us, so 16 warps read 55 GB/s. That is more than a multiprocessor's share of
# an H200's 4.8 TB/s, which is 36 GB/s.
_WARPS_ENOUGH = 16
# Blocks shorter than one round of 8 warps (32 KiB) leave some of them idle.
_WIDE_BYTES_MIN = 64 << 10
_NARROW_THREADS = 32
_WIDE_THREADS = 256


def cut_blocks(address: int, length: int) -> tuple[DeviceAddresses, Lengths]:
    """Cut a region of memory into blocks.

    Returns:
        The addresses of the blocks, and their lengths in bytes: ``BLOCK_BYTES`` each, except that the last may be
        shorter. An empty region has no block.
    """
    starts = np.arange(0, length, BLOCK_BYTES, dtype=np.uint64)
    lengths = np.minimum(np.uint64(length) - starts, np.uint64(BLOCK_BYTES)).astype(np.uint32)
    return starts + np.uint64(address), lengths


def hash_blocks(addresses: DeviceAddresses, lengths: Lengths, device: torch.device) -> torch.Tensor:
    """Hash blocks of a GPU's memory on torch's current stream of ``device``. Returns before the kernel has run.

    A block may have any address. Blocks at multiples of 16 bytes are read fastest.

    Args:
        addresses: uint64 [count]: device addresses. The caller keeps the memory of the blocks allocated and unchanged
            until the digests are complete.
        lengths: uint32 [count]: lengths in bytes. The caller may change both arrays once the call returns.
        device: A CUDA device.

    Returns:
        uint8 [count, 16] on ``device``: the canonical (big-endian) digests.

    Raises:
        InvalidInputError: CuPy is not installed.
        StoreError: The GPU's compiler rejects the kernel.
    """
    assert addresses.shape == lengths.shape, "each block has a length"
    count = len(addresses)
    with torch.cuda.device(device):
        digests = torch.empty((count, DIGEST_BYTES), dtype=torch.uint8, device=device)
        if not count:
            return digests
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        wide = count < processors * _WARPS_ENOUGH and int(lengths.max()) >= _WIDE_BYTES_MIN
        kernel = function("xxh3_128_blocks_wide" if wide else "xxh3_128_blocks", "xxh3")
        table = _upload(addresses, lengths, device)
        launch(
            kernel,
            count,
            _WIDE_THREADS if wide else _NARROW_THREADS,
            (table, table[addresses.nbytes :], np.uint32(count), digests),
            device=device,
        )
    return digests


def _upload(addresses: DeviceAddresses, lengths: Lengths, device: torch.device) -> torch.Tensor:
    """Copy both arrays, one behind the other, to ``device`` on its current stream."""
    # torch reuses the memory of a pinned tensor only after the copies from it have ended, so it may be dropped here.
    table = torch.empty(addresses.nbytes + lengths.nbytes, dtype=torch.uint8, pin_memory=True)
    filled = table.numpy()
    filled[: addresses.nbytes].view(np.uint64)[:] = addresses
    filled[addresses.nbytes :].view(np.uint32)[:] = lengths
    return table.to(device, non_blocking=True)
