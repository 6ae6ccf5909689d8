"""Copies tensors bit for bit: small ones with torch, large ones with stores that bypass the caches, as torch never does.

An ordinary store to memory that is in no cache reads the line first, in case only a part of it is written. A save's copy writes all
of it, and nothing reads it soon: the read takes a third of the memory's bandwidth, and pushes training's data out of the caches. The
kernels bypass the caches (docs/decisions/0059-one-compiled-file.md). Without them ``memcpy`` does so too, from a length on that
glibc derives from the size of the caches (its tunable ``x86_non_temporal_threshold``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tierfs import kernels
from tierfs.dcp.tensorbytes import lies_nowhere
from tierfs.processors import processors

__all__ = ["LARGE_BYTES", "Batch", "copy_large", "copy_tensors"]

# What torch copies as fast as memory, and bit for bit; it is slow at some of the others, and makes every bool 0 or 1.
_COPIED_AS_THEY_ARE = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
    }
)

LARGE_BYTES = 1 << 20
"""From here on it is `copy_large` that copies. Each piece costs a turn of the interpreter's lock, which others may be slow to give."""
# Short enough that a thread that is held up does not hold up the rest.
_PIECE_BYTES = 16 << 20
# Of `memcpy`, for each thread: the fewer, the longer, and the likelier past the caches.
_PIECES = 2


class Batch(NamedTuple):
    """Tensors to be copied.

    Attributes:
        targets: Contiguous, in memory of this process, all of one dtype.
        sources: One for each, of its dtype and shape. Strided, on any device.
        longest: Bytes of the longest.
    """

    targets: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    longest: int


def copy_tensors(batches: Iterable[Batch]) -> None:
    """Copy tensors bit for bit. None may be empty, or overlap with a target; autograd has to be off."""
    large: list[tuple[torch.Tensor, torch.Tensor]] = []
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for batch in batches:
        is_copied_as_it_is = batch.targets[0].dtype in _COPIED_AS_THEY_ARE
        if is_copied_as_it_is and batch.longest < LARGE_BYTES:  # as nearly all are
            targets += batch.targets
            sources += batch.sources
            continue
        for target, source in zip(batch.targets, batch.sources, strict=True):
            if target.nbytes >= LARGE_BYTES and _is_plain(source) and _is_its_memory(source):
                large.append((target, source))
            elif is_copied_as_it_is:
                targets.append(target)
                sources.append(source)
            elif _is_plain(source):
                targets.append(target.view(-1).view(torch.uint8))
                sources.append(source.detach().view(-1).view(torch.uint8))
            else:
                target.copy_(source)
    if targets:
        torch._foreach_copy_(targets, sources)
    copy_large(large)


def copy_large(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors byte for byte, on as many threads as there are processors.

    Args:
        pairs: Targets, each with its source, of the same length; contiguous, in this process's memory, and without overlaps.
    """
    total = sum(target.nbytes for target, _ in pairs)
    most = _PIECE_BYTES if kernels.active is not None else max(total // (_PIECES * processors().count), LARGE_BYTES)
    pieces = []
    for target, source in pairs:
        to, begin, length = target.data_ptr(), source.data_ptr(), target.nbytes
        pieces += [(to + at, begin + at, min(most, length - at)) for at in range(0, length, most)]
    processors().share_out(lambda piece: _copy(*piece), pieces)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie side by side in this machine's memory, so that any dtype is copied as fast as memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_its_memory(tensor: torch.Tensor) -> bool:
    """Whether it shows what lies there: a subclass may show anything, and some tensors of zeros, and wrappers, lie nowhere."""
    return type(tensor) in {torch.Tensor, torch.nn.Parameter} and not lies_nowhere(tensor)


def _copy(to: int, begin: int, length: int) -> None:
    """Copy bytes from one address to another, without the interpreter's lock."""
    (_memcpy if kernels.active is None else kernels.active.copy)(to, begin, length)


_memcpy = ctypes.CDLL(None).memcpy  # releases the interpreter's lock, which ctypes.memmove does not
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p
