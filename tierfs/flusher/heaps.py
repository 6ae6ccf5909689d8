"""How the C library keeps the memory of a flusher's threads."""

from __future__ import annotations

import contextlib
import ctypes
import os

__all__ = ["share_heaps"]

HEAPS = 2
_M_ARENA_MAX = -8  # malloc.h


def share_heaps() -> None:
    """Have threads that begin from now on share two heaps, unless the environment says how many: else each keeps what it ever needed.

    See mallopt(3). Does nothing with a C library that has no such thing.
    """
    if "MALLOC_ARENA_MAX" not in os.environ and "glibc.malloc.arena_max" not in os.environ.get("GLIBC_TUNABLES", ""):
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, HEAPS)
