"""The shard file of one rank and one save: tensors are copied into it before it has a name, and found there again.

`TierWriter.stage` fills one and hands out tensors that are views of it; `TierWriter.write_data` finds them there by where
they lie, adds what was not staged, and gives the file its name. So nothing of a save is kept on the writer.
"""

from __future__ import annotations

import bisect
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierfs.dcp.shardlayout import Entry, Piece, header, plan_runs
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES
from tierfs.errors import CapacityError
from tierfs.flush.levels import Level
from tierfs.store import Store
from tierfs.store.stagedfile import Run, StagedFile
from tierfs.units import format_bytes

__all__ = ["Placed", "ShardFile", "find_staged"]


class _Memory(np.ndarray[Any, Any]):
    """A run's memory as an array that keeps its file, and so the memory, for as long as a tensor is a view of it."""

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
    run: _Run | None
    at: int
    length: int


@dataclass(slots=True, eq=False)
class _Run:
    """A run, and what lies in it in order."""

    memory: Run
    address: int
    placed: list[Placed]


class ShardFile:
    """See the module. For one thread at a time.

    Args:
        store: Where it is to be saved.
        private: Take memory of this process alone. Such a file is only read from: it has no way to the store.
    """

    def __init__(self, store: Store, *, private: bool = False) -> None:
        self._file = None if private else StagedFile(store)
        self._room = None if private or store.tiers is None else store.tiers.ram.budget_bytes // _ranks_here()
        self._used = 0
        self._runs: list[_Run] = []
        self._names: set[str] = set()
        if not private:
            _live.add(self)

    def add_tensors(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[Placed, torch.Tensor]]:
        """Copy tensors into the file.

        Args:
            tensors: With their names. Strided, on any device; not empty ones are copied bit for bit.

        Returns:
            For each where it lies, and a tensor of the same dtype and shape that is a view of it, on the CPU.

        Raises:
            CapacityError: There is no room for one of them in one piece, and none came in time.
        """
        found: list[tuple[Placed, torch.Tensor] | None] = [None] * len(tensors)
        full = [number for number, (_, tensor) in enumerate(tensors) if tensor.numel()]
        pieces = [
            Piece(name, str(tensor.dtype), tensor.numel() * tensor.element_size())
            for name, tensor in (tensors[number] for number in full)
        ]
        for number, (name, tensor) in enumerate(tensors):
            if not tensor.numel():
                placed = self._place(name, tensor.dtype, tuple(tensor.shape), None, 0, 0)
                found[number] = placed, torch.empty_like(tensor, device="cpu")
        self._reserve(sum(piece.length for piece in pieces))
        with torch.no_grad():
            targets: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for plan in plan_runs(pieces):
                run, memory = self._begin(plan.lengths)
                at = 0
                for piece in plan.pieces:
                    name, tensor = tensors[full[piece]]
                    length = pieces[piece].length
                    # A storage of its own: what is pickled of a tensor is its storage, and a DTensor over a part of one
                    # cannot be at all (torch 2.13 reads from address 0).
                    own = self._tensor(memory[at : at + length])
                    view = own.view(tensor.dtype).view(tensor.shape)
                    placed = self._place(name, tensor.dtype, tuple(tensor.shape), run, at, length)
                    found[full[piece]] = placed, view
                    if _is_plain(tensor):
                        targets.append(own)
                        sources.append(tensor.detach().reshape(-1).view(torch.uint8))
                    else:
                        view.copy_(tensor.detach())
                    at += length
            if targets:
                torch._foreach_copy_(targets, sources)
        return [item for item in found if item is not None]

    def add_objects(self, objects: Sequence[tuple[str, memoryview]]) -> list[Placed]:
        """Copy the bytes of serialised objects into the file. Raises as `add_tensors` does."""
        pieces = [Piece(name, "bytes", len(data)) for name, data in objects]
        self._reserve(sum(piece.length for piece in pieces))
        found: dict[int, Placed] = {}
        for plan in plan_runs(pieces):
            (run, _), at = self._begin(plan.lengths), 0
            for number in plan.pieces:
                name, data = objects[number]
                run.memory.view[at : at + len(data)] = data
                found[number] = self._place(name, torch.uint8, (len(data),), run, at, len(data))
                at += len(data)
        return [found[number] for number in range(len(objects))]

    def find(self, tensor: torch.Tensor) -> Placed | None:
        """Where the bytes of a tensor lie, if it is contiguous and a view of one that was copied here."""
        length = tensor.numel() * tensor.element_size()
        if not length or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        address = tensor.data_ptr()
        for run in self._runs:
            at = address - run.address
            if at >= 0 and at + length <= run.memory.length:
                number = bisect.bisect_right(run.placed, at, key=lambda placed: placed.at) - 1
                placed = run.placed[number]
                if at + length <= placed.at + placed.length:
                    if (at, length) == (placed.at, placed.length):
                        return placed
                    return Placed(placed.name, placed.dtype, tuple(tensor.shape), run, at, length)
        return None

    def seal(self) -> None:
        """Hash what is in it: `Level.STAGED` but for the name."""
        assert self._file is not None
        self._file.seal([run.memory for run in self._runs])

    def commit(
        self, path: str, wanted: Iterable[Placed], *, level: Level | None, note: Mapping[str, str]
    ) -> tuple[int, dict[int, int]]:
        """Give the file its name. What lies in runs in which nothing is wanted is left out.

        Args:
            path: Relative to the store.
            wanted: What the checkpoint refers to.
            level: What is waited for.
            note: Strings for the header.

        Returns:
            The file's length, and for the number (``id``) of each wanted one its offset in the file; both in bytes.

        Raises:
            TimeoutError, StoreError, CapacityError, ConflictError, ReadOnlyError: See `Writer.commit`.
        """
        assert self._file is not None
        needed = {id(placed.run) for placed in wanted if placed.run is not None}
        runs = [run for run in self._runs if id(run) in needed]
        begins: dict[int, int] = {}
        end = 0
        for run in runs:
            begins[id(run)] = end
            end += run.memory.length
        entries = [
            Entry(placed.name, placed.dtype, placed.shape, begins[id(run)] + placed.at, placed.length)
            for run in runs
            for placed in run.placed
        ]
        entries += [
            Entry(placed.name, placed.dtype, placed.shape, end, 0)
            for placed in {id(placed): placed for placed in wanted if placed.run is None}.values()
        ]
        head = header(entries, note)
        first = self._file.add_run(_cut(len(head)))
        first.view[:] = head
        memory = [first, *(run.memory for run in runs)]
        self._file.seal(memory)
        self._file.commit(path, memory, level=level)
        offsets = {
            id(placed): len(head) + (begins[id(placed.run)] + placed.at if placed.run is not None else end)
            for placed in wanted
        }
        return len(head) + end, offsets

    def abort(self) -> None:
        """Give everything back. Tensors that are views of it hold anything from then on."""
        if self._file is not None:
            self._file.abort()

    def _reserve(self, length: int) -> None:
        """See that so many bytes more can be there at all: what this file holds is not freed by waiting.

        Raises:
            CapacityError: They cannot.
        """
        self._used += length
        if self._room is not None and self._used > self._room:
            raise CapacityError(
                f"{format_bytes(self._used)} are more than this rank's share of the ram tier, {format_bytes(self._room)}: "
                "raise ram= (TIERFS_RAM)",
                tier="ram",
            )

    def _begin(self, lengths: Sequence[int]) -> tuple[_Run, np.ndarray[Any, Any]]:
        """A run, and its memory. Only what is handed out refers to that: it refers to us."""
        if self._file is None:
            private = np.empty(sum(lengths), np.uint8)
            return _Run(Run(memoryview(b""), sum(lengths), []), private.ctypes.data, []), private
        memory = self._file.add_run(lengths)
        array = np.frombuffer(memory.view, np.uint8)
        run = _Run(memory, array.ctypes.data, [])
        self._runs.append(run)
        return run, array

    def _tensor(self, memory: np.ndarray[Any, Any]) -> torch.Tensor:
        """Memory of a run as a tensor of bytes that keeps us alive."""
        held = memory.view(_Memory)
        held.file = self
        return torch.from_numpy(held)

    def _place(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], run: _Run | None, at: int, length: int
    ) -> Placed:
        known = SAFETENSORS_NAMES.get(dtype)
        unique, number = name, 1
        while unique in self._names:
            unique, number = f"{name}#{number}", number + 1
        self._names.add(unique)
        placed = Placed(unique, known or "U8", shape if known else (length,), run, at, length)
        if run is not None:
            run.placed.append(placed)
        return placed


def find_staged(tensor: torch.Tensor) -> tuple[ShardFile, Placed] | None:
    """The file that was staged and not saved yet in which a tensor lies, and where."""
    for file in list(_live):
        placed = file.find(tensor)
        if placed is not None:
            return file, placed
    return None


def _ranks_here() -> int:
    """How many processes share the ram tier, as torchrun says."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(said), 1) if said.isdigit() else 1


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie side by side in this machine's memory, so that any dtype is copied as fast as memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _cut(length: int) -> tuple[int, ...]:
    (plan,) = plan_runs([Piece("", "", length)])
    return plan.lengths


_live: weakref.WeakSet[ShardFile] = weakref.WeakSet()
