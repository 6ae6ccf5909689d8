"""nvme.used: when each extent was last read, by any process. A hint for eviction, so it is neither locked nor flushed."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierfs.host.nvme.arena.extent_page import GRANULE

__all__ = ["LastUsed"]

_BYTES = 4


class LastUsed:
    """A file of one 32-bit number for each granule of the arena: seconds of the wall clock.

    Written with ``pwrite``, not through a mapping: where the disk is full, that fails, and does not kill the process.

    Args:
        path: The file.
        create: Whether to make it where it is missing.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            weakref.finalize(
                self, os.close, self._fd
            ).atexit = False  # at exit a thread may still write there, and the number be another file's

    def touch(self, offset: int, now_s: int) -> None:
        """Note that the extent that begins there is used now."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, (now_s & 0xFFFFFFFF).to_bytes(_BYTES, "little"), offset // GRANULE * _BYTES)

    def at(self, offset: int) -> int:
        """When the extent that begins there was used last; 0 where that is not known."""
        found = b""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                found = os.pread(self._fd, _BYTES, offset // GRANULE * _BYTES)
        return int.from_bytes(found, "little")

    def read(self, arena_bytes: int) -> npt.NDArray[np.uint32]:
        """When each granule was used; 0 where that is not known."""
        used = np.zeros(arena_bytes // GRANULE, np.dtype("<u4"))
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                found = os.pread(self._fd, used.nbytes, 0)
                known = np.frombuffer(found[: len(found) // _BYTES * _BYTES], np.dtype("<u4"))
                used[: len(known)] = known
        return used
