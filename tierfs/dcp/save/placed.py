"""Where tensors and objects lie in a shard file: in runs of chunks, by their offsets."""

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

__all__ = ["FileRun", "Placed", "RunMemory"]

_lock = threading.Lock()


class RunMemory(np.ndarray[Any, Any]):
    """A run's memory as an array that keeps its file, and so the memory until that is saved, for as long as a tensor is a view of it."""

    file: ShardFile


@dataclass(slots=True, eq=False)
class Placed:
    """A tensor or object in the file.

    Attributes:
        name: In the header; unique in the file.
        dtype: The format's name for it.
        shape: Rows first.
        run: In which run; ``None`` for nothing to store.
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
    """A run, and what lies in it.

    Args:
        memory: The run.
        address: Its first byte's in this process.
        entries: In order.
    """

    def __init__(self, memory: Run, address: int, entries: Sequence[HeaderEntry]) -> None:
        self.memory = memory
        self.address = address
        self.entries = entries
        self._begins: list[int] = []
        self._placed: list[Placed] = []

    @property
    def placed(self) -> list[Placed]:
        """The same, as what is referred to. Made when it is asked for, which `TierWriter.stage` has no time for."""
        with _lock:
            if not self._placed:
                self._placed = [
                    Placed(name, dtype, shape, self, at, length) for name, dtype, shape, at, length in self.entries
                ]
        return self._placed

    def find(self, inside: int) -> Placed:
        """The tensor at, or else before, an offset in the run, in bytes."""
        if not self._begins:
            self._begins = [entry.at for entry in self.entries]
        return self.placed[bisect_right(self._begins, inside) - 1]
