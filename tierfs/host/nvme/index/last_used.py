"""nvme.used: when any process last read each extent. Only eviction uses it, so it is neither locked nor flushed."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierfs.host.nvme.arena.extent_page import GRANULE

_BYTES = 4


class LastUsed:
    """A file with a 32-bit number for each granule of the arena: seconds of the wall clock.

    It is written with ``pwrite`` instead of a mapping: on a full disk ``pwrite`` fails, and a mapping would kill the
    process. All errors are ignored.

    Args:
        path: The file.
        create: Whether to create the file if it is missing.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            weakref.finalize(
                self, os.close, self._fd
            ).atexit = False  # at exit a thread may still write here, and the descriptor may be reused meanwhile

    def touch(self, offset: int, now_s: int) -> None:
        """Record that the extent at ``offset`` is used now."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, (now_s & 0xFFFFFFFF).to_bytes(_BYTES, "little"), offset // GRANULE * _BYTES)

    def at(self, offset: int) -> int:
        """Return when the extent at ``offset`` was last used; 0 if unknown."""
        found = b""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                found = os.pread(self._fd, _BYTES, offset // GRANULE * _BYTES)
        return int.from_bytes(found, "little")

    def read(self, arena_bytes: int) -> npt.NDArray[np.uint32]:
        """Return when each granule was last used; 0 where unknown."""
        used = np.zeros(arena_bytes // GRANULE, np.dtype("<u4"))
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                found = os.pread(self._fd, used.nbytes, 0)
                known = np.frombuffer(found[: len(found) // _BYTES * _BYTES], np.dtype("<u4"))
                used[: len(known)] = known
        return used
