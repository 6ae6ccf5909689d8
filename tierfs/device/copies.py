"""Copy many tensors within device memory in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tierfs.device.kernel_launch import function, launch

PIECE_BYTES = 1 << 20
"""Most bytes that one thread block copies. 20 GB take 20,000 thread blocks, far more than run at once."""
THREADS = 512


def piece_table(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Cut copies into pieces of at most `PIECE_BYTES`.

    Args:
        targets: Addresses.
        sources: Addresses, one for each target. Nothing overlaps.
        lengths: Length of each copy in bytes.

    Returns:
        uint64 [pieces, 3]: target, source and length of each piece.
    """
    sizes = np.array(lengths, np.uint64)
    counts = ((sizes + np.uint64(PIECE_BYTES - 1)) // np.uint64(PIECE_BYTES)).astype(np.int64)
    total = int(counts.sum())
    firsts = np.cumsum(counts) - counts
    offsets = ((np.arange(total) - np.repeat(firsts, counts)) * PIECE_BYTES).astype(np.uint64)
    table = np.empty((total, 3), np.uint64)
    table[:, 0] = np.repeat(np.array(targets, np.uint64), counts) + offsets
    table[:, 1] = np.repeat(np.array(sources, np.uint64), counts) + offsets
    table[:, 2] = np.minimum(np.repeat(sizes, counts) - offsets, np.uint64(PIECE_BYTES))
    return table


def copy_pieces(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
    """Queue copies on torch's current stream of ``device``. Returns before the kernel has run.

    Args:
        targets: Addresses in the device's memory.
        sources: Addresses, one for each target. Nothing overlaps.
        lengths: Length of each copy in bytes.
        device: A CUDA device.

    Raises:
        InvalidInputError: CuPy is not installed.
        StoreError: The GPU's compiler rejects the kernel.
    """
    table = piece_table(targets, sources, lengths)
    if not len(table):
        return
    with torch.cuda.device(device):
        pinned = torch.empty(table.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned.numpy().view(np.uint64)[:] = table.reshape(-1)
        launch(
            function("copy_pieces", "copy"), len(table), THREADS, (pinned.to(device, non_blocking=True),), device=device
        )
