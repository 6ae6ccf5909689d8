"""The lower bound of a save to a disk: copy each tensor into warm memory, then write it past the page cache."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from dcp_peers import Peer
from dcp_states import tensors_of

WRITERS = 6
PIECE_BYTES, CALL_BYTES, PAGE_BYTES = 16 << 20, 1 << 20, 4096  # bytes of a thread's task, of a write, and of a page
ALIGNMENT = 64
LIMIT = "copy_, then direct writes"


def limit(root: Path, state: Any) -> Peer:
    """Return the peer at the limit: one preallocated file, without names, checksums or a way to load it.

    Args:
        root: A directory on the disk.
        state: Has the tensors of the states to save; its content does not matter.
    """
    tensors = tensors_of(state)
    starts = list(itertools.accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0))
    memory = mmap.mmap(-1, -(-starts[-1] // PAGE_BYTES) * PAGE_BYTES)
    copies = [
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=False)
    ]
    fd = os.open(root / "limit", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, len(memory))
    pool = ThreadPoolExecutor(WRITERS)

    def write(start: int) -> None:
        for at in range(start, min(start + PIECE_BYTES, len(memory)), CALL_BYTES):
            with memoryview(memory)[at : at + CALL_BYTES] as piece:
                assert os.pwrite(fd, piece, at) == len(piece)

    def finish() -> None:
        list(pool.map(write, range(0, len(memory), PIECE_BYTES)))
        os.fdatasync(fd)

    def begin(state: Any, _: Path) -> Callable[[], object]:
        torch._foreach_copy_(copies, tensors_of(state))
        return finish

    return Peer(LIMIT, begin, is_async=True)
