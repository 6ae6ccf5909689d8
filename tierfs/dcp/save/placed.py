"""Where tensors and objects lie in a shard file: a run of chunks, and an offset in it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tierfs.codec.layout.safetensors import HeaderEntry
from tierfs.store.write.in_place import Run

if TYPE_CHECKING:
    from tierfs.dcp.save.shard_file import ShardFile

_lock = threading.Lock()


class RunMemory(np.ndarray[Any, Any]):
    """A run's memory as an array.

    While a tensor is a view of it, it keeps the file alive, and so the memory until it is saved.
    """

    file: ShardFile


@dataclass(slots=True, eq=False)
class Placed:
    """A tensor or object in the file.

    Attributes:
        name: In the header; unique in the file.
        dtype: The safetensors name of the dtype.
        shape: Rows first.
        run: The run that it lies in; ``None`` if it has no bytes.
        at: Offset in the run, in bytes.
        length: In bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    run: FileRun | None
    at: int
    length: int


class FileRun:
    """A run, and the tensors or objects in it.

    Args:
        memory: The run.
        address: The address of its first byte in this process.
        entries: The header's entries, in order.
    """

    def __init__(self, memory: Run, address: int, entries: Sequence[HeaderEntry]) -> None:
        self.memory = memory
        self.address = address
        self.entries = entries
        self._begins: list[int] = []
        self._placed: list[Placed] = []

    @property
    def placed(self) -> list[Placed]:
        """The entries as `Placed`. Made at the first use, because `TierWriter.stage` has no time for it."""
        with _lock:
            if not self._placed:
                self._placed = [
                    Placed(name, dtype, shape, self, at, length) for name, dtype, shape, at, length in self.entries
                ]
        return self._placed

    def find(self, inside: int) -> Placed:
        """Return the tensor at an offset in the run, in bytes, or else the last one before it."""
        if not self._begins:
            self._begins = [entry.at for entry in self.entries]
        return self.placed[bisect_right(self._begins, inside) - 1]
