"""The shard file of one rank and one save: tensors are copied into it before it has a name, and found there again.

`TierWriter.stage` fills one and hands out tensors that are views of it; `TierWriter.write_data` finds them there by where
they lie, adds what was not staged, and gives the file its name. So the writer keeps nothing of it.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tierfs.codec.layout.safetensors import METADATA_NAME, HeaderEntry
from tierfs.dcp.save.copy import Batch, copy_tensors
from tierfs.dcp.save.gpu import GpuStaging, by_accelerator, pin_segments
from tierfs.dcp.save.later import Later
from tierfs.dcp.save.plan import Piece, cut, header, plan_runs
from tierfs.dcp.save.saves import Save
from tierfs.dcp.save.tensor_plan import TensorPlan, TensorRun, described, plan_tensors, unique
from tierfs.device.accelerator import Accelerator
from tierfs.device.tier import Spot
from tierfs.device.transfer import BESIDE_TRAINING, CaptureMode, MemoryRegion, Transfer
from tierfs.errors import CapacityError, CorruptionError, StoreError
from tierfs.session.settings import ranks_here
from tierfs.store import Store
from tierfs.store.commit import part_of
from tierfs.store.write.in_place import Run, StagedFile
from tierfs.units import format_bytes

__all__ = ["Placed", "ShardFile", "check_is_held", "find_staged", "is_private"]


class _Memory(np.ndarray[Any, Any]):
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
    run: _Run | None
    at: int
    length: int


class _Run:
    """A run, and what lies in it.

    Args:
        memory: The run.
        address: Of its first byte in this process.
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
        """What lies at, or else before, an offset in the run, in bytes."""
        if not self._begins:
            self._begins = [entry.at for entry in self.entries]
        return self.placed[bisect_right(self._begins, inside) - 1]


class _GpuPart:
    """What comes from one GPU.

    Args:
        transfer: How.
        plan: How it lies in the file.
        numbers: Of its tensors, among those that were handed in together.
    """

    def __init__(self, transfer: Transfer, plan: TensorPlan, numbers: Sequence[int]) -> None:
        self.transfer = transfer
        self.plan = plan
        self.numbers = numbers
        self.runs: list[_Run] = []
        self.targets: list[torch.Tensor] = []

    def regions(self, tensors: Sequence[torch.Tensor]) -> list[MemoryRegion]:
        """For `Transfer.capture`."""
        return [
            MemoryRegion(
                sum(run.lengths),
                [(entry.at, tensors[number]) for number, entry in zip(run.numbers, run.entries, strict=True)],
            )
            for run in self.plan.runs
        ]


class ShardFile:
    """See the module. For one thread at a time.

    Args:
        store: Where it is to be saved.
        private: Take memory of this process alone. Such a file is only read from: it has no way to the store.
        save: For which it is staged; it is kept until that begins.
        gpu: How tensors leave a GPU; by default they are copied while the caller waits.
    """

    def __init__(
        self, store: Store, *, private: bool = False, save: Save | None = None, gpu: GpuStaging | None = None
    ) -> None:
        self.save = save
        self._gpu = gpu or GpuStaging("ram", None)
        self._is_private = private
        self._transfers: list[tuple[Transfer, list[_Run]]] = []
        self._store = store
        self._file: StagedFile | None = None
        self._room: int | None = None
        self._used = 0
        self._runs: list[_Run] = []
        self._staged: dict[int, _Run] = {}  # by what torch calls the storages of tensors that lie there
        self._names = {METADATA_NAME}
        self._is_over = False
        if not private:
            self._file = StagedFile(store)
            self._room = None if store.tiers is None else store.tiers.ram.budget_bytes // ranks_here()
        with _lock:
            (_private if private else _live).add(self)

    # -- what lies in it -------------------------------------------------------------------------------------------------

    def wait_filled(self) -> None:
        """Wait until the file holds what was on a GPU when it was staged. Nothing may be read from it before.

        Raises:
            StoreError, CorruptionError: The copy failed; says why.
        """
        for transfer, _ in self._transfers:
            transfer.wait()

    @property
    def transfers(self) -> list[Transfer]:
        """What came, or comes, from a GPU."""
        return [transfer for transfer, _ in self._transfers]

    def add_tensors(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Copy tensors into the file.

        Args:
            tensors: With their names. Strided, on any device; not empty ones are copied bit for bit.

        Returns:
            For each a tensor of the same dtype and shape that is a view of the file, on the CPU, with a storage of its own:
            what is pickled of a tensor is its storage, all of it, and a DTensor over a part of one cannot be at all
            (torch 2.13 reads from address 0).

        Raises:
            CapacityError: There is no room for one of them in one piece, and none came in time.
            InvalidInputError: A CUDA graph is being captured.
        """
        views = self._add(tensors, at_once=True).result()
        self.wait_filled()
        return views

    def begin_tensors(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> Later:
        """As `add_tensors`; those on a GPU may follow in the background: see `Later` and `wait_filled`.

        Raises:
            InvalidInputError: The mode that was asked for cannot be had.
        """
        return self._add(tensors, at_once=False)

    def _add(self, tensors: Sequence[tuple[str, torch.Tensor]], *, at_once: bool) -> Later:
        host, devices = by_accelerator([tensor for _, tensor in tensors])
        if not at_once and tensors:
            self._gpu.check(self._store, has_gpu=bool(devices))
        if not devices:
            return Later(self._add_from_host(tensors))
        jobs: list[_GpuPart] = []
        later = Later([None] * len(tensors))
        try:
            for accelerator, numbers in devices.values():
                plan = _plan_of([tensors[number] for number in numbers])
                transfer = self._gpu.transfer(
                    accelerator, self._store, partial(self._pin, accelerator), at_once=at_once
                )
                job = _GpuPart(transfer, plan, numbers)
                jobs.append(job)
                # First, so that the GPU copies while the rest is done.
                transfer.capture(job.regions([tensors[number][1] for number in numbers]))
                self._transfers.append((transfer, job.runs))
            views = self._add_from_host([tensors[number] for number in host])
        except BaseException:
            for job in jobs:
                job.transfer.discard()
            raise
        for number, view in zip(host, views, strict=True):
            later.views[number] = view
        later.transfers = [job.transfer for job in jobs]
        if all(transfer.mode is CaptureMode.RAM for transfer in later.transfers):
            self._fill(jobs, later, is_alone=False)
        else:
            later.fill = partial(self._fill, jobs, later)
        return later

    def _fill(self, jobs: Sequence[_GpuPart], later: Later, *, is_alone: bool = True) -> None:
        """Make room for what was captured, and have it moved there.

        Args:
            jobs: One for each GPU.
            later: Told of the views.
            is_alone: Whether nobody is there to whom an error could be raised.

        Raises:
            CapacityError: There is no room, and somebody is there.
        """
        try:
            for job in jobs:
                try:
                    begun = self._make_room(job.plan)
                except CapacityError as error:
                    if not is_alone:
                        raise
                    self._become_private(error)
                    begun = self._make_room(job.plan)
                for run, (placed, memory) in zip(job.plan.runs, begun, strict=True):
                    for number, view in zip(run.numbers, self._views(run, placed, memory), strict=True):
                        later.views[job.numbers[number]] = view
                job.runs += [placed for placed, _ in begun]
                job.targets = [torch.frombuffer(memory, dtype=torch.uint8) for _, memory in begun]
            later.ready.set()
            for job in jobs:
                job.transfer.run(job.targets)
                self._gpu.note_skipped(job.transfer.skipped_bytes)
            self._gpu.tell(self._store)
        except BaseException as error:
            for job in jobs:
                if not job.transfer.is_done:
                    job.transfer.discard(error)
            if not is_alone:
                raise
            later.error = error
        finally:
            for job in jobs:
                job.targets = []
            later.ready.set()

    def _become_private(self, error: CapacityError) -> None:
        """Go on in memory of this process alone: the file is only read from, in waves."""
        if self._store.tiers is not None:
            self._store.tiers.counters.fall_back(
                "waves",
                "a checkpoint's part does not fit into the ram tier, and goes through it in waves: %s",
                str(error),
            )
        self._is_private = True
        self._room = None
        with _lock:
            _live.discard(self)
            _private.add(self)

    def _pin(self, accelerator: Accelerator) -> None:
        if self._file is not None:
            pin_segments(accelerator, self._file.segments(), self._store)

    def _make_room(self, plan: TensorPlan) -> list[tuple[_Run, _Memory]]:
        self._reserve(plan.length)
        is_free = self._names.isdisjoint(plan.names)
        if is_free:
            self._names |= plan.names
        begun = self._begin([run.lengths for run in plan.runs])
        for run, (placed, _) in zip(plan.runs, begun, strict=True):
            entries = run.entries
            if not is_free:
                entries = tuple([entry._replace(name=unique(entry.name, self._names)) for entry in entries])
            placed.entries = entries
        return begun

    def _add_from_host(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        plan = _plan_of(tensors)
        views: list[torch.Tensor | None] = [None] * len(tensors)
        with torch.no_grad():
            batches: list[Batch] = []
            for run, (placed, memory) in zip(plan.runs, self._make_room(plan), strict=True):
                found = self._views(run, placed, memory)
                for number, view in zip(run.numbers, found, strict=True):
                    views[number] = view
                originals = [tensors[number][1] for number in run.numbers]
                batches.append(Batch(found, originals, max(run.counts) * run.dtype.itemsize))
            copy_tensors(batches)
            return [
                torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if view is None else view
                for view, (_, tensor) in zip(views, tensors, strict=True)
            ]

    def add_placed(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[Placed]:
        """The same; returns where each lies."""
        return [
            self.find(view)
            or Placed(unique(name, self._names), *described(tensor.dtype, tensor.shape, 0), run=None, at=0, length=0)
            for view, (name, tensor) in zip(self.add_tensors(tensors), tensors, strict=True)
        ]

    def _views(self, run: TensorRun, placed: _Run, memory: _Memory) -> list[torch.Tensor]:
        views = [
            torch.frombuffer(memory, dtype=run.dtype, count=count, offset=entry.at)
            for count, entry in zip(run.counts, run.entries, strict=True)
        ]
        if run.shapes is not None:
            for view, shape in zip(views, run.shapes, strict=True):
                view.resize_(shape)
        for view in views:
            self._staged[view.untyped_storage()._cdata] = placed
        return views

    def add_objects(self, objects: Sequence[tuple[str, memoryview]]) -> list[Placed]:
        """Copy the bytes of serialised objects into the file. Raises as `add_tensors` does."""
        pieces = [Piece(name, "bytes", len(data)) for name, data in objects]
        self._reserve(sum(piece.length for piece in pieces))
        found: dict[int, Placed] = {}
        plans = plan_runs(pieces)
        for plan, (run, _) in zip(plans, self._begin([plan.lengths for plan in plans]), strict=True):
            entries: list[HeaderEntry] = []
            at = 0
            for number in plan.pieces:
                name, data = objects[number]
                run.memory.view[at : at + len(data)] = data
                entries.append(HeaderEntry(unique(name, self._names), "U8", (len(data),), at, len(data)))
                at += len(data)
            run.entries = entries
            found.update(zip(plan.pieces, run.placed, strict=True))
        return [found[number] for number in range(len(objects))]

    def find(self, tensor: torch.Tensor) -> Placed | None:
        """Where the bytes of a tensor lie, if it is contiguous and a view of one that was copied here."""
        # By the storage: memory that another file had may be ours now, and its tensors be there still.
        run = self._staged.get(tensor.untyped_storage()._cdata)
        if run is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        length, at = tensor.nbytes, tensor.data_ptr() - run.address
        if not length or not 0 <= at < run.memory.length:
            return None
        placed = run.find(at)
        if at + length > placed.at + placed.length:
            return None
        dtype, shape = described(tensor.dtype, tensor.shape, length)
        if (dtype, shape, length) == (placed.dtype, placed.shape, placed.length):
            return placed
        return Placed(placed.name, dtype, shape, run, at, length)

    def commit(self, path: str, wanted: Iterable[Placed], *, note: Mapping[str, str]) -> tuple[int, dict[int, int]]:
        """Give the file its name. What lies in runs in which nothing is wanted is left out.

        Args:
            path: Relative to the store; drawn at random.
            wanted: What the checkpoint refers to.
            note: Strings for the header.

        Returns:
            The file's length, and for the number (``id``) of each wanted one its offset in the file; both in bytes.

        Raises:
            TimeoutError, StoreError, CapacityError, ConflictError, ReadOnlyError: See `Writer.commit`.
        """
        assert self._file is not None
        self.wait_filled()
        self._is_over = True
        wanted = list(wanted)
        lies = self._without_the_rest(wanted)
        needed = {id(placed.run) for placed in lies.values() if placed.run is not None}
        runs = [run for run in self._runs if id(run) in needed]
        # First, for the flusher to begin: a header takes a while.
        # Training goes on meanwhile where a GPU is in use: it needs a processor, and the interpreter's lock.
        self._file.seal([run.memory for run in runs], threads_max=BESIDE_TRAINING if self._transfers else None)
        self._check_arrived()
        begins: dict[int, int] = {}
        end = 0
        for run in runs:
            begins[id(run)] = end
            end += run.memory.length
        other = _seen_otherwise(placed for placed in lies.values() if placed.run is not None)
        entries = [
            HeaderEntry(
                placed.name,
                *other.get(id(placed), (placed.dtype, placed.shape)),
                begins[id(run)] + placed.at,
                placed.length,
            )
            for run in runs
            for placed in run.placed
        ]
        entries += [
            HeaderEntry(placed.name, placed.dtype, placed.shape, end, 0)
            for placed in lies.values()
            if placed.run is None
        ]
        head = header(entries, note)
        (first,) = self._file.add_runs([cut(len(head))])
        first.view[:] = head
        self._file.seal([first])
        memory = [first, *(run.memory for run in runs)]
        self._file.commit(path, memory, metadata=part_of(self._store), is_new=True)
        offsets = {
            number: len(head) + (begins[id(placed.run)] + placed.at if placed.run is not None else end)
            for number, placed in lies.items()
        }
        return len(head) + end, offsets

    def snapshots(self, items: Iterable[tuple[Any, torch.Tensor, Placed]]) -> list[tuple[Transfer, dict[Any, Spot]]]:
        """Where items lie in the device tier: for each snapshot, by the item's key."""
        begins = {
            id(run): (transfer, begin)
            for transfer, runs in self._transfers
            if transfer.generation is not None
            for run, begin in zip(runs, transfer.offsets, strict=True)
        }
        found: dict[Transfer, dict[Any, Spot]] = {}
        for key, tensor, placed in items:
            transfer, begin = begins.get(id(placed.run), (None, 0))
            if transfer is not None and transfer.generation is not None and placed.length == tensor.nbytes:
                found.setdefault(transfer, {})[key] = Spot(begin + placed.at, tensor.dtype, tensor.shape)
        return list(found.items())

    def _check_arrived(self) -> None:
        """See that the bytes that were hashed on a GPU are those that were sealed here.

        Raises:
            CorruptionError: They changed on their way.
        """
        for transfer, runs in self._transfers:
            for run, digests in zip(runs, transfer.digests, strict=False):
                sealed = run.memory.digests()
                if any(there not in {b"", here} for here, there in zip(digests, sealed, strict=True)):
                    raise CorruptionError(
                        f"bytes of {run.entries[0].name} changed between the GPU and host memory: this save is void, and training "
                        "holds the right ones still: save again, and look for hardware errors (nvidia-smi -q, dmesg) if it recurs",
                        tier="device",
                    )

    def _without_the_rest(self, wanted: Sequence[Placed]) -> dict[int, Placed]:
        """Where each wanted one (by its ``id``) lies, when packs have been packed anew without what is not wanted.

        What is not wanted is what another rank saves: replicas. They stay in where there is no room for it.
        """
        lies = {id(placed): placed for placed in wanted}
        places = {(id(placed.run), placed.at) for placed in wanted}
        mixed = {id(run) for run in self._runs if any((id(run), placed.at) not in places for placed in run.placed)}
        sources = [placed for placed in lies.values() if id(placed.run) in mixed]
        plans = plan_runs([Piece(source.name, source.dtype, source.length) for source in sources])
        try:
            packed = self._begin([plan.lengths for plan in plans], wait=False)
        except CapacityError as error:
            if self._store.tiers is not None:
                self._store.tiers.counters.fall_back(
                    "kept_replicas",
                    "what another rank saves is stored once more, beside what this one saves: %s",
                    error,
                )
            return lies
        names: set[str] = set()
        for plan, (run, _) in zip(plans, packed, strict=True):
            entries: list[HeaderEntry] = []
            at = 0
            for source in map(sources.__getitem__, plan.pieces):
                assert source.run is not None
                run.memory.view[at : at + source.length] = source.run.memory.view[source.at : source.at + source.length]
                name = source.name if source.name not in names else unique(source.name, self._names)
                names.add(name)
                entries.append(HeaderEntry(name, source.dtype, source.shape, at, source.length))
                at += source.length
            run.entries = entries
            lies.update((id(sources[number]), placed) for number, placed in zip(plan.pieces, run.placed, strict=True))
        return lies

    def check_is_held(self) -> None:
        """See that tensors that are views of it still hold what was staged.

        Raises:
            StoreError: It was saved or given up, so that its memory may be another's by now.
        """
        if self._is_over:
            raise StoreError(
                "what was staged was saved or given up before, and may hold anything by now: stage it again"
            )

    def abort(self) -> None:
        """Give everything back. Tensors that are views of it hold anything from then on."""
        self._is_over = True
        for transfer, _ in self._transfers:
            transfer.cancel()  # or it would write into what is somebody else's by then
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

    def _begin(self, runs: Sequence[Sequence[int]], *, wait: bool = True) -> list[tuple[_Run, _Memory]]:
        """Runs, and their memory. Only tensors refer to that, and so keep us alive: it refers to us."""
        if self._file is None or self._is_private:
            arrays = [np.empty(sum(lengths), np.uint8) for lengths in runs]
            return [
                (_Run(Run(memoryview(b""), len(array), []), array.ctypes.data, ()), self._held(array))
                for array in arrays
            ]
        begun = []
        for memory in self._file.add_runs(runs, wait=wait):
            array = np.frombuffer(memory.view, np.uint8)
            run = _Run(memory, array.ctypes.data, ())
            self._runs.append(run)
            begun.append((run, self._held(array)))
        return begun

    def _held(self, memory: np.ndarray[Any, Any]) -> _Memory:
        held = memory.view(_Memory)
        held.file = self
        return held


def _plan_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> TensorPlan:
    return plan_tensors(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in tensors]))


def find_staged(tensor: torch.Tensor, store: Store) -> tuple[ShardFile, Placed] | None:
    """The file in which a tensor was staged for a store, and where. One that was saved or given up only if no other.

    Raises:
        StoreError: See `check_is_held`, of one that was staged for another store.
    """
    with _lock:
        files = [file for file in _live if file._store is store]
    for file in sorted(files, key=lambda file: file._is_over):
        placed = file.find(tensor)
        if placed is not None:
            return file, placed
    check_is_held(tensor)
    return None


def check_is_held(tensor: torch.Tensor) -> None:
    """See that a tensor that was staged still holds what it did.

    Raises:
        StoreError: Its file was saved or given up, so that its memory may be another's by now.
    """
    with _lock:
        files = list(_live)
    found = [file for file in files if file.find(tensor) is not None]
    if found and all(file._is_over for file in found):
        found[0].check_is_held()


def is_private(tensor: torch.Tensor) -> bool:
    """Whether it was staged in memory of this process alone."""
    with _lock:
        files = list(_private)
    return any(file.find(tensor) is not None for file in files)


def _seen_otherwise(wanted: Iterable[Placed]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """What is saved with another dtype or shape than it was staged with: by the number of what was staged, what it is now.

    A planner may reshape a tensor, or take its bits for another dtype. Where some of them take them for one and some for
    another, they are bytes.
    """
    seen: dict[int, tuple[Placed, list[Placed]]] = {}
    for placed in wanted:
        assert placed.run is not None
        staged = placed.run.find(placed.at)
        seen.setdefault(id(staged), (staged, []))[1].append(placed)
    found = {}
    for number, (staged, takes) in seen.items():
        if all(take is staged for take in takes):
            continue
        dtypes = {take.dtype for take in takes}
        shapes = {take.shape for take in takes if take.length == staged.length}
        if len(dtypes) == 1 and len(shapes) == 1:
            found[number] = dtypes.pop(), shapes.pop()
        elif dtypes != {staged.dtype} or shapes:
            found[number] = "U8", (staged.length,)
    return found


_live: weakref.WeakSet[ShardFile] = weakref.WeakSet()
_private: weakref.WeakSet[ShardFile] = weakref.WeakSet()
_lock = threading.Lock()
