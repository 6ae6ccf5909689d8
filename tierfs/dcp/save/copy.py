"""Copy memory byte for byte, in few calls, and large ranges past the caches, which torch never does.

An ordinary store to uncached memory first reads the line, because the store may write only a part of it. The copy of a
save writes whole lines, and nothing reads them soon. So that read wastes a third of the memory's bandwidth, and evicts
training's data from the caches. The kernels bypass the caches (docs/decisions/0059-one-compiled-file.md). Without the
kernels, ``memcpy`` does so above a length that glibc derives from the sizes of the caches (its tunable
``x86_non_temporal_threshold``).
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import torch

from tierfs import kernels
from tierfs.dcp.tensorbytes import PLAIN_TYPES, lies_nowhere
from tierfs.threads import processors

Addresses: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Copies: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
"""uint64 [copies, 3]: target's address, source's address, and length in bytes."""

LARGE_BYTES = 1 << 20
"""Shorter ranges are copied in groups: each call acquires the interpreter's lock, which others may release late."""
# Short enough that one delayed thread does not delay the others.
_PIECE_BYTES = 16 << 20
# For each thread, with `memcpy`: fewer pieces are longer, and so more likely to bypass the caches.
_PIECES = 2


def copy_ranges(copies: Copies) -> None:
    """Copy ranges of this process's memory, on as many threads as there are processors. None may overlap a target."""
    large = copies[:, 2] >= LARGE_BYTES
    small = copies[~large]
    sums = np.cumsum(small[:, 2])
    cuts = np.searchsorted(sums, np.arange(_PIECE_BYTES, int(sums[-1]) if len(sums) else 0, _PIECE_BYTES))
    tasks: list[Any] = [group for group in np.split(small, cuts) if len(group)]
    total = int(copies[large, 2].sum())
    most = _PIECE_BYTES if kernels.active is not None else max(total // (_PIECES * processors().count), LARGE_BYTES)
    for to, begin, length in copies[large].tolist():
        tasks += [(to + at, begin + at, min(most, length - at)) for at in range(0, length, most)]
    processors().share_out(lambda task: copy_piece(*task) if type(task) is tuple else _copy_group(task), tasks)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's bytes, in host or GPU memory; 0 if they do not lie there one after the other.

    A subclass may not show the content of its memory, and some tensors of zeros and wrappers have no memory.
    """
    if type(tensor) not in PLAIN_TYPES or not (tensor.is_cpu or tensor.is_cuda) or not tensor.is_contiguous():
        return 0
    return 0 if tensor.is_conj() or tensor.is_neg() or lies_nowhere(tensor) else tensor.data_ptr()


def copy_piece(to: int, begin: int, length: int) -> None:
    """Copy bytes from one address to another, without the interpreter's lock."""
    (_memcpy if kernels.active is None else kernels.active.copy)(to, begin, length)


def _copy_group(copies: Copies) -> None:
    if kernels.active is not None:
        kernels.active.copy_each(copies)
        return
    for to, begin, length in copies.tolist():
        ctypes.memmove(to, begin, length)  # keeps the lock: acquiring it again would take longer


_memcpy = ctypes.CDLL(None).memcpy  # releases the interpreter's lock, which ctypes.memmove does not
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p
