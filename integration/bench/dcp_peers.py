"""The peers of `dcp.py`, behind one interface.

`begin` returns when training may go on. The function that it returns waits until the checkpoint is durable on the
disk. Stock DCP flushes with its own ``sync_files``; the other peers fsync each file after they have written it.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from dcp_states import copy_into, tensors_of
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tierfs.dcp import TierSavePlanner, TierWriter

COPY = "copy_ into warm memory"
KEPT = "stock async_save, kept stager, 2 threads"
LIMIT = "copy_, then direct writes"
MIB = 1 << 20
WRITERS = 6
PIECE_BYTES, CALL_BYTES, PAGE_BYTES = 16 << 20, 1 << 20, 4096  # bytes of a thread's task, of a write, and of a page
ALIGNMENT = 64
RAM_GENERATIONS = 2.5
NVME_GENERATIONS = 2.5
SPARE_BYTES = 256 * MIB


@dataclass
class Peer:
    """One way to save.

    Attributes:
        name: Its name in the report.
        begin: Starts to save a state into a directory.
        is_async: Whether training goes on before the save is complete.
    """

    name: str
    begin: Callable[[Any, Path], Callable[[], object]]
    is_async: bool


class Tierfs:
    """tierfs with both local tiers in front of a directory on the same disk.

    Args:
        url: The store.
        size: Bytes of a state.
    """

    def __init__(self, url: str, size: int, **options: Any) -> None:
        self.options = {
            "ram": int(size * RAM_GENERATIONS) + SPARE_BYTES,
            "nvme": int(size * NVME_GENERATIONS) + SPARE_BYTES,
        }
        self.url = url
        self.writer = TierWriter(url, ack="staged", **self.options, **options)

    def checkpoint(self, directory: Path) -> str:
        return f"{self.url}/{directory.name}"

    def begin(self, state: Any, directory: Path) -> Callable[[], object]:
        future = dcp.async_save(
            state, storage_writer=self.writer, checkpoint_id=self.checkpoint(directory), planner=TierSavePlanner()
        )

        def wait() -> None:
            future.result()
            self.writer.wait("local")

        return wait


def copy(state: Any) -> Peer:
    """Return the peer that saves nothing: it copies each tensor, one after the other, into warm memory."""
    warm = [torch.zeros_like(tensor) for tensor in tensors_of(state)]

    def begin(state: Any, _: Path) -> Callable[[], object]:
        copy_into(warm, state)
        return nothing

    return Peer(COPY, begin, is_async=True)


def limit(root: Path, state: Any) -> Peer:
    """Return the lower bound of a save to a disk: a copy of each tensor, then writes past the page cache.

    It has one preallocated file, without names, checksums or a way to load it.

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


def kept_stager() -> DefaultStager:
    """Return torch's stager. All saves reuse it, so its memory is warm. It does not pin, which needs CUDA."""
    return DefaultStager(StagingOptions(False, False, False, False))


def stock(threads: int) -> Peer:
    def begin(state: Any, directory: Path) -> Callable[[], object]:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, thread_count=threads))
        return nothing

    return Peer(f"stock save, {threads} thread{'s' * (threads > 1)}", begin, is_async=False)


def stock_async() -> Peer:
    def begin(state: Any, directory: Path) -> Callable[[], object]:
        return dcp.async_save(state, checkpoint_id=str(directory)).result

    return Peer("stock async_save", begin, is_async=True)


def stock_async_kept() -> Peer:
    stager = kept_stager()

    def begin(state: Any, directory: Path) -> Callable[[], object]:
        writer = dcp.FileSystemWriter(directory, thread_count=2)
        return dcp.async_save(state, storage_writer=writer, async_stager=stager).result

    return Peer(KEPT, begin, is_async=True)


def torch_save() -> Peer:
    def begin(state: Any, directory: Path) -> Callable[[], object]:
        directory.mkdir()
        with open(directory / "state.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return nothing

    return Peer("torch.save", begin, is_async=False)


def safetensors() -> Peer:
    """Return the peer that saves tensors alone, because safetensors holds nothing else."""
    from safetensors.torch import save_file

    def begin(state: Any, directory: Path) -> Callable[[], object]:
        directory.mkdir()
        save_file(
            {str(number): tensor for number, tensor in enumerate(tensors_of(state))}, directory / "state.safetensors"
        )
        flush(directory)
        return nothing

    return Peer("safetensors", begin, is_async=False)


def flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def nothing() -> None:
    """Do nothing: the remaining work of a peer that is done when `begin` returns."""


@contextlib.contextmanager
def one_rank(directory: Path):
    """Run in a gloo group of this process alone, which async_save requires."""
    directory.mkdir(exist_ok=True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
