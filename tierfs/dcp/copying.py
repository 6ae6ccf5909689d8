"""Large tensors are copied by the C library, which goes past the caches where that pays; torch's own copies never do.

Who stores to memory that is in no cache has its lines read first, in case not all of a line is written. Of a copy that nobody
reads soon that is in vain: it takes a third of what memory moves, and pushes out of the caches what others work on. ``memcpy`` avoids
both from a length on that the C library derives from the size of the caches (glibc's tunable ``x86_non_temporal_threshold``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tierfs.processors import processors

__all__ = ["LARGE_BYTES", "copy_large"]

LARGE_BYTES = 1 << 20
"""From here on it is `copy_large` that copies. Each piece costs a turn of the interpreter's lock, which others may be slow to give."""
# For each thread, so that one that is held up does not hold up the rest. The fewer, the longer, and the likelier past the caches.
_PIECES = 2


def copy_large(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors byte for byte, on as many threads as there are processors.

    Args:
        pairs: Targets, each with its source, of the same length; contiguous, in this process's memory, and without overlaps.
    """
    total = sum(target.nbytes for target, _ in pairs)
    most = max(total // (_PIECES * processors().count), LARGE_BYTES)
    pieces = []
    for target, source in pairs:
        to, begin, length = target.data_ptr(), source.data_ptr(), target.nbytes
        pieces += [(to + at, begin + at, min(most, length - at)) for at in range(0, length, most)]
    processors().share_out(_copy, pieces)


def _copy(piece: tuple[int, int, int]) -> None:
    _memcpy(*piece)


_memcpy = ctypes.CDLL(None).memcpy  # releases the interpreter's lock, which ctypes.memmove does not
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p
