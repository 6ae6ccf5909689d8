"""Sets of chunk names of any size, as sorted numpy arrays of eight bytes per name; beyond a limit they lie in files.

A name is represented by 64 bits of it. Two names collide in about one of 10^5 stores of ten million chunks. Then an
unreached chunk counts as reached and is kept. The opposite mistake cannot happen, and names are compared in full before
a chunk is deleted.
"""

from __future__ import annotations

import mmap
import tempfile

import numpy as np
import numpy.typing as npt

from tierfs.digest import Buffer

PENDING_MIN = 1 << 18
NAMES_MAX = 8 << 20
_LOW = np.uint64((1 << 56) - 1)
_GENERATION_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_RECIPE_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)


def fingerprints(data: Buffer, width: int) -> npt.NDArray[np.uint64]:
    """Return eight bytes for each name of ``width`` bytes. They sort by the first byte of the digest."""
    table = np.frombuffer(data, np.uint8).reshape(-1, width)
    size = width - 12
    digests = np.ascontiguousarray(table[:, :8]).view(">u8").ravel().astype(np.uint64)
    generations = np.ascontiguousarray(table[:, size : size + 4]).view("<u4").ravel().astype(np.uint64)
    recipes = np.ascontiguousarray(table[:, size + 4 :]).view("<u8").ravel().astype(np.uint64)
    mixed = digests ^ (generations * _GENERATION_FACTOR) ^ (recipes * _RECIPE_FACTOR)
    found: npt.NDArray[np.uint64] = (digests & ~_LOW) | (mixed & _LOW)
    return found


class NameSet:
    """A set that grows by many names at a time. Names over a limit lie in temporary files, and are looked up there.

    Args:
        width: Bytes of an encoded name.
        names_max: Most names in memory, at eight bytes each.
    """

    def __init__(self, width: int, *, names_max: int = NAMES_MAX) -> None:
        self._width = width
        self._names_max = names_max
        self._sorted: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._pending: list[npt.NDArray[np.uint64]] = []
        self._pending_count = 0
        self._runs: list[npt.NDArray[np.uint64]] = []

    def __len__(self) -> int:
        """Return the number of names; an upper bound if some lie in files."""
        return len(self._settled()) + sum(map(len, self._runs))

    def add(self, data: Buffer) -> None:
        """Add names, laid end to end."""
        found = fingerprints(data, self._width)
        self._pending.append(found)
        self._pending_count += len(found)
        if self._pending_count > max(PENDING_MIN, len(self._sorted)):
            self._settled()

    def contains(self, data: Buffer) -> npt.NDArray[np.bool_]:
        """Return which of these names are in the set."""
        wanted = fingerprints(data, self._width)
        found = np.zeros(len(wanted), np.bool_)
        for run in (self._settled(), *self._runs):
            if len(run) and len(wanted):
                places = np.minimum(np.searchsorted(run, wanted), len(run) - 1)
                found |= run[places] == wanted
        return found

    def missing_from(self, first: int, data: Buffer) -> int:
        """Count the names in the set whose digest begins with this byte, and that are not among these names."""
        low, high = np.uint64(first << 56), np.uint64((first << 56) | int(_LOW))
        runs = (self._settled(), *self._runs)
        wanted = [run[np.searchsorted(run, low) : np.searchsorted(run, high, "right")] for run in runs]
        return len(np.setdiff1d(np.concatenate(wanted), fingerprints(data, self._width)))

    def _settled(self) -> npt.NDArray[np.uint64]:
        if self._pending:
            self._sorted = np.unique(np.concatenate([self._sorted, *self._pending]))
            self._pending, self._pending_count = [], 0
        if len(self._sorted) > self._names_max:
            self._spill()
        return self._sorted

    def _spill(self) -> None:
        """Move the names in memory to an unlinked file, which disappears with the process."""
        with tempfile.TemporaryFile(prefix="tierfs-gc-") as file:
            self._sorted.tofile(file)
            file.flush()
            mapped = mmap.mmap(file.fileno(), self._sorted.nbytes, access=mmap.ACCESS_READ)
        self._runs.append(np.frombuffer(mapped, np.uint64))
        self._sorted = np.empty(0, np.uint64)
