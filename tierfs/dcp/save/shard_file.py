"""The shard file of one rank and one save: tensors are copied into it before it has a name, and found there later.

`TierWriter.stage` fills a file and returns tensors that are views of it. `TierWriter.write_data` finds these tensors by
their memory, adds items that were not staged, and gives the file its name. So the writer keeps no state of the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from tierfs.codec.layout.safetensors import METADATA_NAME, HeaderEntry
from tierfs.dcp.save.copy import Addresses, copy_ranges
from tierfs.dcp.save.gpu_staging import GpuStaging, hide_damaged
from tierfs.dcp.save.plan import PlannedPiece, TensorPlan, described, plan_runs, unique
from tierfs.device.transfer import BESIDE_TRAINING, Transfer
from tierfs.digest import CHUNK_BYTES, DigestKind, digests_of
from tierfs.errors import CorruptionError, StoreError
from tierfs.session.settings import ranks_here
from tierfs.store import Store
from tierfs.store.write.in_place import Run, StagedFile
from tierfs.threads import processors

if TYPE_CHECKING:
    from tierfs.host.slab.segment import Segment


class FileRun:
    """A run, and the tensors or objects in it.

    ``address`` is that of its first byte in this process.
    """

    def __init__(self, memory: Run, address: int, entries: Sequence[HeaderEntry]) -> None:
        self.memory = memory
        self.address = address
        self.entries = entries
        self._begins: list[int] = []

    def find(self, inside: int) -> HeaderEntry:
        """Return the entry of the tensor at an offset in the run, in bytes, or else of the last one before it."""
        if not self._begins:
            self._begins = [entry.at for entry in self.entries]
        return self.entries[bisect_right(self._begins, inside) - 1]


Place: TypeAlias = tuple[FileRun | None, HeaderEntry]
"""Where a tensor or object lies in a shard file: its run, ``None`` if it has no bytes, and its entry there."""


class RunMemory(np.ndarray[Any, Any]):
    """A run's memory as an array.

    While a tensor is a view of it, it keeps the file alive, and so the memory until it is saved.
    """

    file: ShardFile
    run: FileRun


class ShardFile:
    """A shard file. For one thread at a time.

    Args:
        store: The store that it is saved to.
        gpu: Moves tensors from a GPU.
        waits: Whether to wait for room in the ram tier, and to use the disk of the state directory if none comes.

    Attributes:
        is_over: Whether it was saved or discarded, so that its memory may have another owner.
        runs: In order.
        names: The names that the header uses.
        transfers: Transfers from GPUs, each with the runs that it fills.
    """

    def __init__(self, store: Store, gpu: GpuStaging, *, waits: bool = True) -> None:
        self.gpu = gpu
        self._waits = waits
        self.is_over = False
        self.transfers: list[tuple[Transfer, list[FileRun]]] = []
        self.store = store
        self._file = StagedFile(store)
        self._has_arrived = False
        self._share: int | None = None if store.tiers is None else store.tiers.ram.budget_bytes // ranks_here()
        self.runs: list[FileRun] = []
        self.names = {METADATA_NAME}

    def wait_filled(self) -> None:
        """Wait until the file holds the bytes of the tensors that were on a GPU. Nothing may be read from it before.

        Raises:
            StoreError, CorruptionError: The copy failed. The message says why. The file is discarded.
            RuntimeError: torch reported an error of the GPU. The file is discarded.
        """
        try:
            for transfer, _ in self.transfers:
                transfer.wait()
        except Exception:
            self.abort()  # release the memory, even if the caller keeps the state
            raise

    def segments(self) -> set[Segment]:
        """Return the segments that the file lies in; none without local tiers."""
        return self._file.segments()

    def make_room(self, plan: TensorPlan) -> list[tuple[FileRun, RunMemory]]:
        """Reserve memory for planned tensors, and return their runs.

        Raises:
            CapacityError: There is no room: see `begin_runs`.
        """
        is_free = self.names.isdisjoint(plan.names)
        if is_free:
            self.names |= plan.names
        begun = self.begin_runs([run.lengths for run in plan.runs])
        for planned, (run, _) in zip(plan.runs, begun, strict=True):
            run.entries = planned.entries
            if not is_free:
                run.entries = [entry._replace(name=unique(entry.name, self.names)) for entry in planned.entries]
        return begun

    def copy_from_host(
        self, plan: TensorPlan, tensors: Sequence[torch.Tensor], addresses: Addresses
    ) -> list[RunMemory]:
        """Copy tensors in host memory into the file, bit for bit, and return the memory of each run of the plan.

        Args:
            plan: Of the tensors.
            tensors: Strided.
            addresses: uint64: of each tensor's bytes; 0 if only torch can copy it: see `address_of`.

        Raises:
            CapacityError: See `make_room`.
        """
        begun = self.make_room(plan)
        rows = []
        with torch.no_grad():
            for planned, (run, memory) in zip(plan.runs, begun, strict=True):
                rows.append(planned.copies(run.address, addresses))
                if len(rows[-1]) < len(planned.numbers):
                    for number, view in zip(planned.numbers.tolist(), planned.views(memory), strict=True):
                        if not addresses[number]:
                            view.copy_(tensors[number])
            if rows:
                copy_ranges(np.concatenate(rows))
        return [memory for _, memory in begun]

    def views(self, plan: TensorPlan, memories: Sequence[RunMemory]) -> list[tuple[int, torch.Tensor]]:
        """Return planned tensors, with their numbers, as views of their runs' memory. `staged_in` finds them."""
        found = [(number, torch.empty(shape, dtype=dtype, device="cpu")) for number, dtype, shape in plan.empty]
        for run, memory in zip(plan.runs, memories, strict=True):
            views = run.views(memory)
            for view in views:
                view.untyped_storage()._tierfs_memory = memory
            found += zip(run.numbers.tolist(), views, strict=True)
        return found

    def add_objects(self, objects: Sequence[tuple[str, memoryview]]) -> list[Place]:
        """Copy the bytes of serialised objects into the file. Raises as `make_room` does."""
        pieces = [PlannedPiece(name, "bytes", len(data)) for name, data in objects]
        found: dict[int, Place] = {}
        plans = plan_runs(pieces)
        for plan, (run, _) in zip(plans, self.begin_runs([plan.lengths for plan in plans]), strict=True):
            entries: list[HeaderEntry] = []
            at = 0
            for number in plan.pieces:
                name, data = objects[number]
                run.memory.view[at : at + len(data)] = data
                entries.append(HeaderEntry(unique(name, self.names), "U8", (len(data),), at, len(data)))
                found[number] = run, entries[-1]
                at += len(data)
            run.entries = entries
        return [found[number] for number in range(len(objects))]

    def close(self) -> StagedFile:
        """Return the file's memory, to be committed. From now on nothing is added to the file or found in it.

        Raises:
            TierfsError: See `wait_filled`.
        """
        self.wait_filled()
        self.is_over = True
        return self._file

    def check_is_held(self) -> None:
        """Wait for copies from a GPU, and check that views of the file still show the staged bytes.

        Raises:
            StoreError: The file was saved or discarded before.
            TierfsError: See `wait_filled`.
        """
        self.wait_filled()
        if self.is_over:
            raise StoreError(
                "the staged state was saved or discarded before, and its memory may be reused: stage it again"
            )

    def check_arrived(self, only: Collection[FileRun] | None = None) -> None:
        """Compare the digests that a GPU computed before the bytes left it with those of the bytes in memory.

        The file's memory must be filled. Chunks that are not sealed are hashed. Once all are checked, later calls hash
        nothing. ``only`` limits the check to some runs.

        Raises:
            CorruptionError: The bytes changed in transfer.
        """
        if self._has_arrived and only is None:
            return
        alike = self.store.descriptor.digest_kind is DigestKind.XXH3_128
        chosen = None if only is None else {id(run) for run in only}
        chunks = [
            (run, at * CHUNK_BYTES, wanted, sealed)
            for transfer, runs in self.transfers
            for run, digests in zip(runs, transfer.digests, strict=False)
            if chosen is None or id(run) in chosen
            for at, (wanted, sealed) in enumerate(zip_longest(digests, run.memory.digests() if alike else ()))
        ]

        def check(chunk: tuple[FileRun, int, bytes, bytes | None]) -> None:
            run, at, wanted, sealed = chunk
            found = sealed or digests_of(DigestKind.XXH3_128, run.memory.view[at : at + CHUNK_BYTES])[1]
            if found != wanted:
                if self.store.tiers is not None:
                    hide_damaged(self.store.tiers, wanted)
                raise CorruptionError(
                    f"bytes of {run.entries[0].name} changed between the GPU and host memory: this save is discarded, "
                    "and the state on the GPU is intact: save again; if it recurs, look for code that edits the staged "
                    "state, such as a planner (stage='ram' allows that), and for hardware errors (nvidia-smi -q, dmesg)",
                    tier="device",
                )

        fresh = [chunk for chunk in chunks if chunk[-1] or not self._has_arrived]
        processors().share_out(check, fresh, threads_max=BESIDE_TRAINING)
        self._has_arrived = self._has_arrived or chosen is None

    def abort(self) -> None:
        """Release all memory of the file. Views of it show arbitrary bytes from then on."""
        self.is_over = True
        for transfer, _ in self.transfers:
            transfer.cancel()  # otherwise it would write into memory that has another owner by then
        self._file.abort()

    def begin_runs(self, runs: Sequence[Sequence[int]], *, wait: bool = True) -> list[tuple[FileRun, RunMemory]]:
        """Reserve runs of chunks of these lengths, and return them with their memory.

        The memory refers to this file, and only tensors refer to the memory. So the tensors keep the file alive. Runs
        beyond this rank's share of the ram tier, or for which no room became free before the timeout, lie on the disk of
        the state directory, unless the call or the file does not wait.

        Raises:
            CapacityError: There is no room.
        """
        waits = wait and self._waits
        used = sum(run.memory.length for run in self.runs)
        share = None if self._share is None or not waits else max(self._share - used, 0)
        begun = [
            self._begun(memory, np.frombuffer(memory.view, np.uint8))
            for memory in self._file.add_runs(runs, wait=waits, share_bytes=share)
        ]
        self.runs += [run for run, _ in begun]
        return begun

    def _begun(self, memory: Run, array: np.ndarray[Any, Any]) -> tuple[FileRun, RunMemory]:
        run, held = FileRun(memory, array.ctypes.data, ()), array.view(RunMemory)
        held.file, held.run = self, run
        return run, held


def memory_of(tensor: torch.Tensor) -> RunMemory | None:
    """Return the memory that a tensor was staged in; ``None`` if it was not staged.

    A planner may have made another tensor of a staged one. So the storage, which they share, refers to the memory.
    """
    return getattr(tensor.untyped_storage(), "_tierfs_memory", None)


def staged_in(tensor: torch.Tensor) -> tuple[ShardFile, Place] | None:
    """Return the file that a tensor was staged in, and its place: with the run's own entry, if the tensor is as staged.

    ``None`` unless the tensor is contiguous and lies in one staged tensor.
    """
    memory = memory_of(tensor)
    if memory is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    run, length = memory.run, tensor.nbytes
    at = tensor.data_ptr() - run.address
    if not length or not 0 <= at < run.memory.length:
        return None
    entry = run.find(at)
    if at + length > entry.at + entry.length:
        return None
    dtype, shape = described(tensor.dtype, tensor.shape, length)
    if (dtype, shape, length) != (entry.dtype, entry.shape, entry.length):
        entry = HeaderEntry(entry.name, dtype, shape, at, length)
    return memory.file, (run, entry)
