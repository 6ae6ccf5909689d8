"""The shard file of one rank and one save: tensors are copied into it before it has a name, and found there later.

`TierWriter.stage` fills a file and returns tensors that are views of it. `TierWriter.write_data` finds these tensors by
their memory, adds items that were not staged, and gives the file its name. So the writer keeps no state of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from tierfs.codec.layout.safetensors import METADATA_NAME, HeaderEntry
from tierfs.dcp.save.copy import Addresses, copy_ranges
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.dcp.save.plan import TensorPlan, described, plan_runs, unique
from tierfs.dcp.save.same_chunks import hide_damaged
from tierfs.device.transfer import BESIDE_TRAINING, Transfer
from tierfs.digest import CHUNK_BYTES, DigestKind, digests_of
from tierfs.errors import CorruptionError, StoreError
from tierfs.session.settings import ranks_here
from tierfs.store import Store
from tierfs.store.write.in_place import Run, StagedFile
from tierfs.threads import processors

if TYPE_CHECKING:
    from tierfs.host.slab.segment import Segment


Place: TypeAlias = tuple[Run | None, HeaderEntry]
"""Where a tensor or object lies in a shard file: its run, ``None`` if it has no bytes, and its entry there."""


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
        self.waits = waits
        self.is_over = False
        self.transfers: list[tuple[Transfer, list[Run]]] = []
        self.store = store
        self._file = StagedFile(store)
        self._has_arrived = False
        self._share: int | None = None if store.tiers is None else store.tiers.ram.budget_bytes // ranks_here()
        self.runs: list[Run] = []
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

    def make_room(self, plan: TensorPlan) -> list[Run]:
        """Reserve memory for planned tensors, and return their runs.

        Raises:
            CapacityError: There is no room: see `begin_runs`.
        """
        is_free = self.names.isdisjoint(plan.names)
        if is_free:
            self.names |= plan.names
        begun = self.begin_runs([run.lengths for run in plan.runs])
        for planned, run in zip(plan.runs, begun, strict=True):
            run.entries = planned.entries
            if not is_free:
                run.entries = [entry._replace(name=unique(entry.name, self.names)) for entry in planned.entries]
        return begun

    def copy_from_host(self, plan: TensorPlan, tensors: Sequence[torch.Tensor], addresses: Addresses) -> list[Run]:
        """Copy tensors in host memory into the file, bit for bit, and return the runs of the plan.

        Args:
            plan: Its numbers are those of ``tensors``.
            tensors: Strided.
            addresses: uint64: of each tensor's bytes; 0 if only torch can copy it: see `address_of`.

        Raises:
            CapacityError: See `make_room`.
        """
        begun = self.make_room(plan)
        rows = []
        with torch.no_grad():
            for planned, run in zip(plan.runs, begun, strict=True):
                rows.append(planned.copies(run.address, addresses))
                if len(rows[-1]) < len(planned.numbers):
                    for number, view in zip(planned.numbers.tolist(), planned.views(run.view), strict=True):
                        if not addresses[number]:
                            view.copy_(tensors[number])
            if rows:
                copy_ranges(np.concatenate(rows))
        return begun

    def views(self, plan: TensorPlan, runs: Sequence[Run]) -> list[tuple[int, torch.Tensor]]:
        """Return planned tensors, with their numbers, as views of their runs' memory. `staged_in` finds them.

        Each has a storage of its own, because pickling a tensor pickles its whole storage. The storage refers to this
        file, and runs do not. So the tensors keep the file alive, and with it the memory until that is saved.
        """
        found = [(number, torch.empty(shape, dtype=dtype, device="cpu")) for number, dtype, shape in plan.empty]
        for planned, run in zip(plan.runs, runs, strict=True):
            views, here = planned.views(run.view), (self, run)
            for view in views:
                view.untyped_storage()._tierfs_memory = here
            found += zip(planned.numbers.tolist(), views, strict=True)
        return found

    def add_objects(self, objects: Sequence[tuple[str, memoryview]]) -> list[Place]:
        """Copy the bytes of serialised objects into the file. Raises as `make_room` does."""
        found: dict[int, Place] = {}
        plans = plan_runs([(name, "bytes", len(data)) for name, data in objects])
        for (numbers, _), run in zip(plans, self.begin_runs([lengths for _, lengths in plans]), strict=True):
            entries: list[HeaderEntry] = []
            at = 0
            for number in numbers:
                name, data = objects[number]
                run.view[at : at + len(data)] = data
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

    def check_arrived(self, only: Collection[Run] | None = None) -> None:
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
            for at, (wanted, sealed) in enumerate(zip_longest(digests, run.digests() if alike else ()))
        ]

        def check(chunk: tuple[Run, int, bytes, bytes | None]) -> None:
            run, at, wanted, sealed = chunk
            found = sealed or digests_of(DigestKind.XXH3_128, run.view[at : at + CHUNK_BYTES])[1]
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

    def begin_runs(self, runs: Sequence[Sequence[int]], *, wait: bool = True) -> list[Run]:
        """Reserve runs of chunks of these lengths.

        Runs beyond this rank's share of the ram tier, or for which no room became free before the timeout, lie on the
        disk of the state directory, unless the call or the file does not wait.

        Raises:
            CapacityError: There is no room.
        """
        waits = wait and self.waits
        used = sum(len(run.view) for run in self.runs)
        share = None if self._share is None or not waits else max(self._share - used, 0)
        begun = self._file.add_runs(runs, wait=waits, share_bytes=share)
        self.runs += begun
        return begun


def staged_in(tensor: torch.Tensor) -> tuple[ShardFile, Place] | None:
    """Return the file that a tensor was staged in, and its place: with the run's own entry, if the tensor is as staged.

    ``None`` unless the tensor is contiguous and lies in one staged tensor.
    """
    # A planner may have made another tensor of a staged one. They share the storage.
    memory: tuple[ShardFile, Run] | None = getattr(tensor.untyped_storage(), "_tierfs_memory", None)
    if memory is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    (file, run), length = memory, tensor.nbytes
    at = tensor.data_ptr() - run.address
    if not length or not 0 <= at < len(run.view):
        return None
    entry = run.find(at)
    if at + length > entry.at + entry.length:
        return None
    dtype, shape = described(tensor.dtype, tensor.shape, length)
    if (dtype, shape, length) != (entry.dtype, entry.shape, entry.length):
        entry = HeaderEntry(entry.name, dtype, shape, at, length)
    return file, (run, entry)
