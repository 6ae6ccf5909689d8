"""XXH3-128 digests of many blocks in a GPU's memory at once.

The digests equal those of ``tierfs.digest.hash_bytes``. The host combines them into the digest of a chunk.

Specification: github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Description".
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tierfs.device.kernel_launch import function, launch
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import InvalidInputError

DIGEST_BYTES = DigestKind.XXH3_128.size

Addresses: TypeAlias = npt.NDArray[np.uint64]
Lengths: TypeAlias = npt.NDArray[np.uint32]

# Below this many blocks per multiprocessor, a block gets eight warps instead of one. A warp keeps 4 KiB in flight for
# about 0.8 us, then computes for about 0.4 us, so 16 warps read 55 GB/s. That is more than a multiprocessor's share of
# an H200's 4.8 TB/s, which is 36 GB/s.
_WARPS_ENOUGH = 16
# Blocks shorter than one round of 8 warps (32 KiB) leave some of them idle.
_WIDE_BYTES_MIN = 64 << 10
_NARROW_THREADS = 32
_WIDE_THREADS = 256


def cut_blocks(address: int, length: int) -> tuple[Addresses, Lengths]:
    """Cut a region of memory into blocks.

    Args:
        address: Address of the region.
        length: Length of the region in bytes.

    Returns:
        The addresses of the blocks, and their lengths in bytes: ``BLOCK_BYTES`` each, except that the last may be
        shorter. An empty region has no block.
    """
    starts = np.arange(0, length, BLOCK_BYTES, dtype=np.uint64)
    lengths = np.minimum(np.uint64(length) - starts, np.uint64(BLOCK_BYTES)).astype(np.uint32)
    return starts + np.uint64(address), lengths


def hash_blocks(addresses: Addresses, lengths: Lengths, device: torch.device) -> torch.Tensor:
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
        InvalidInputError: CuPy is not installed, ``device`` is not a CUDA device, or the arrays differ in shape or have
            a wrong dtype.
        StoreError: The GPU's compiler rejects the kernel.
    """
    if device.type != "cuda":
        raise InvalidInputError(f"blocks are hashed on CUDA devices, not on {device}")
    if addresses.shape != lengths.shape or addresses.ndim != 1:
        raise InvalidInputError(
            f"addresses of shape {addresses.shape} do not match lengths of shape {lengths.shape}: pass one of each "
            "per block"
        )
    if addresses.dtype != np.uint64 or lengths.dtype != np.uint32:
        raise InvalidInputError(
            f"addresses must be uint64 and lengths uint32, not {addresses.dtype} and {lengths.dtype}"
        )
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


def _upload(addresses: Addresses, lengths: Lengths, device: torch.device) -> torch.Tensor:
    """Copy both arrays, one behind the other, to ``device`` on its current stream."""
    # torch reuses the memory of a pinned tensor only after the copies from it have ended, so it may be dropped here.
    table = torch.empty(addresses.nbytes + lengths.nbytes, dtype=torch.uint8, pin_memory=True)
    filled = table.numpy()
    filled[: addresses.nbytes].view(np.uint64)[:] = addresses
    filled[addresses.nbytes :].view(np.uint32)[:] = lengths
    return table.to(device, non_blocking=True)
