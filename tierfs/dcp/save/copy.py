"""Copy tensors bit for bit: small ones with torch, large ones past the caches, which torch never does.

An ordinary store to uncached memory first reads the line, because the store may write only a part of it. The copy of a
save writes whole lines, and nothing reads them soon. So that read wastes a third of the memory's bandwidth, and evicts
training's data from the caches. The kernels bypass the caches (docs/decisions/0059-one-compiled-file.md). Without the
kernels, ``memcpy`` does so above a length that glibc derives from the sizes of the caches (its tunable
``x86_non_temporal_threshold``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from tierfs import kernels
from tierfs.dcp.tensorbytes import lies_nowhere
from tierfs.device.accelerator import as_bytes
from tierfs.threads import processors

# torch copies these as fast as memory allows, and bit for bit. It is slow at some others, and turns every bool into 0
# or 1.
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_COPIED_AS_THEY_ARE = _INTEGERS | {torch.bfloat16, torch.float16, torch.float32, torch.float64}

LARGE_BYTES = 1 << 20
"""The minimum for `copy_large`. Each piece acquires the interpreter's lock, which other threads may release late."""
# Short enough that one delayed thread does not delay the others.
_PIECE_BYTES = 16 << 20
# For each thread, with `memcpy`: fewer pieces are longer, and so more likely to bypass the caches.
_PIECES = 2


def copy_tensors(batches: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], int]]) -> None:
    """Copy tensors bit for bit. None may be empty or overlap with a target, and autograd has to be off.

    Args:
        batches: Targets, contiguous, in memory of this process and all of one dtype; a source for each of its dtype and
            shape, strided, on any device; and the bytes of the longest of them.
    """
    large: list[tuple[torch.Tensor, torch.Tensor]] = []
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for copies, originals, longest in batches:
        is_copied_as_it_is = copies[0].dtype in _COPIED_AS_THEY_ARE
        if is_copied_as_it_is and longest < LARGE_BYTES:  # nearly all batches
            targets += copies
            sources += originals
            continue
        for target, source in zip(copies, originals, strict=True):
            if target.nbytes >= LARGE_BYTES and _is_plain(source) and _is_its_memory(source):
                large.append((target, source))
            elif is_copied_as_it_is:
                targets.append(target)
                sources.append(source)
            elif _is_plain(source):
                targets.append(as_bytes(target))
                sources.append(as_bytes(source))
            else:
                target.copy_(source)
    if targets:
        torch._foreach_copy_(targets, sources)
    copy_large(large)


def copy_large(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors byte for byte, on as many threads as there are processors.

    Args:
        pairs: Targets, each with its source of the same length. All are contiguous, in this process's memory, and do
            not overlap.
    """
    total = sum(target.nbytes for target, _ in pairs)
    most = _PIECE_BYTES if kernels.active is not None else max(total // (_PIECES * processors().count), LARGE_BYTES)
    pieces = []
    for target, source in pairs:
        to, begin, length = target.data_ptr(), source.data_ptr(), target.nbytes
        pieces += [(to + at, begin + at, min(most, length - at)) for at in range(0, length, most)]
    processors().share_out(lambda piece: copy_piece(*piece), pieces)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are contiguous in host memory, so that any dtype is copied as fast as memory allows."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_its_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows the content of its memory.

    A subclass may not, and some tensors of zeros and wrappers have no memory.
    """
    return type(tensor) in {torch.Tensor, torch.nn.Parameter} and not lies_nowhere(tensor)


def copy_piece(to: int, begin: int, length: int) -> None:
    """Copy bytes from one address to another, without the interpreter's lock."""
    (_memcpy if kernels.active is None else kernels.active.copy)(to, begin, length)


_memcpy = ctypes.CDLL(None).memcpy  # releases the interpreter's lock, which ctypes.memmove does not
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p
