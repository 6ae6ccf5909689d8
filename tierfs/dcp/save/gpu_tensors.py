"""How tensors come into a shard file, those on a GPU in the background where training may change them meanwhile."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tierfs.dcp.save.gpu_staging import fall_back_of
from tierfs.dcp.save.placed import FileRun, Placed
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.save.streaming import say_waves
from tierfs.dcp.save.tensor_plan import TensorPlan, plan_of
from tierfs.device.accelerator import Accelerator, accelerator_of
from tierfs.device.detached import detached
from tierfs.device.drain import drain_of
from tierfs.device.tier import Spot
from tierfs.device.transfer import CaptureMode, MemoryRegion, Transfer
from tierfs.errors import CapacityError
from tierfs.threads import start_daemon

__all__ = ["Later", "begin_tensors", "snapshots_of"]

_logger = logging.getLogger("tierfs.dcp")


class Later:
    """Views of what is staged, some of which follow.

    Args:
        views: In order; ``None`` for those that follow.

    Attributes:
        views: As given; complete once `ready` is set, unless there is an error.
        ready: Set when nothing follows any more.
        error: Why some are missing.
        transfers: The transfers that follow.
        fill: Makes what follows.
    """

    def __init__(self, views: Sequence[torch.Tensor | None]) -> None:
        self.views = list(views)
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.transfers: Sequence[Transfer] = ()
        self.fill: Callable[[], None] | None = None
        self.note_progress()

    def note_progress(self) -> None:
        """Set `ready` if all views are there."""
        if all(view is not None for view in self.views):
            self.ready.set()

    def begin(self) -> None:
        """Have made in the background what follows. Last, since Python on two threads is slower than on one."""
        fill, self.fill = self.fill, None
        if fill is not None and start_daemon(fill, name="device-drain") is None:
            fill()

    def discard(self) -> None:
        """Give up what follows and was not begun."""
        if self.fill is not None:
            self.fill = None
            for transfer in self.transfers:
                transfer.discard()

    def result(self) -> list[torch.Tensor]:
        """All views, waiting for those that follow. Their bytes are another matter: see `ShardFile.wait_filled`.

        Raises:
            TierfsError: They could not be made.
        """
        self.ready.wait()
        if self.error is not None:
            raise detached(self.error)
        return [view for view in self.views if view is not None]


class _GpuPart:
    """The tensors of one GPU.

    Args:
        transfer: How.
        plan: How it lies in the file.
        numbers: Its tensors' numbers, among those that were handed in together.
    """

    def __init__(self, transfer: Transfer, plan: TensorPlan, numbers: Sequence[int]) -> None:
        self.transfer = transfer
        self.plan = plan
        self.numbers = numbers
        self.runs: list[FileRun] = []
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


def begin_tensors(file: ShardFile, tensors: Sequence[tuple[str, torch.Tensor]], *, at_once: bool) -> Later:
    """Copy tensors into a shard file; those on a GPU may follow in the background: see `Later` and `ShardFile.wait_filled`.

    Args:
        file: Takes the bytes.
        tensors: With their names. Strided, on any device; not empty ones are copied bit for bit.
        at_once: Whether all views are to be there on return.

    Returns:
        For each a tensor of the same dtype and shape that is a view of the file, on the CPU, with a storage of its own:
        what is pickled of a tensor is its storage, all of it, and a DTensor over a part of one cannot be at all
        (torch 2.13 reads from address 0).

    Raises:
        CapacityError: There is no room for one of them in one piece, and none came in time.
        InvalidInputError: A CUDA graph is being captured, or the mode that was asked for cannot be had.
    """
    host, devices = _by_accelerator([tensor for _, tensor in tensors])
    if not at_once and tensors:
        file.gpu.check(file.store, has_gpu=bool(devices))
    if not devices:
        return Later(file.add_from_host(tensors))
    jobs: list[_GpuPart] = []
    before = len(file.transfers)
    later = Later([None] * len(tensors))
    try:
        for accelerator, numbers in devices.values():
            plan = plan_of([tensors[number] for number in numbers])
            transfer = file.gpu.transfer(accelerator, file.store, partial(_pin, file, accelerator), at_once=at_once)
            job = _GpuPart(transfer, plan, numbers)
            jobs.append(job)
            # First, so that the GPU copies while the rest is done.
            transfer.capture(job.regions([tensors[number][1] for number in numbers]))
            file.transfers.append((transfer, job.runs))
        views = file.add_from_host([tensors[number] for number in host])
        for number, view in zip(host, views, strict=True):
            later.views[number] = view
        # Nothing keeps training from changing these. The other GPUs' may be safe already.
        unsafe = [job for job in jobs if job.transfer.mode is CaptureMode.RAM]
        if unsafe:
            _fill(file, unsafe, later, is_alone=False)
    except BaseException:
        for job in jobs:
            if not job.transfer.is_done:
                job.transfer.discard()
        del file.transfers[before:]  # what the file held before is whole
        raise
    rest = [job for job in jobs if job not in unsafe]
    later.transfers = [job.transfer for job in rest]
    if rest:
        later.fill = partial(_fill, file, rest, later)
    return later


def _fill(file: ShardFile, jobs: Sequence[_GpuPart], later: Later, *, is_alone: bool = True) -> None:
    """Make room for what was captured, and have it moved there.

    Args:
        file: Takes the bytes.
        jobs: One for each of some GPUs; the others' come later.
        later: Told of the views.
        is_alone: Whether nobody is there to whom an error could be raised.

    Raises:
        CapacityError: There is no room, and somebody is there.
    """
    try:
        try:
            rooms = [file.make_room(job.plan) for job in jobs]
        except CapacityError as error:
            if not is_alone:
                raise
            _go_in_waves(file, error, later)
            rooms = [file.make_room(job.plan) for job in jobs]
        for job, begun in zip(jobs, rooms, strict=True):
            for run, (placed, memory) in zip(job.plan.runs, begun, strict=True):
                for number, view in zip(run.numbers, file.views(run, placed, memory), strict=True):
                    later.views[job.numbers[number]] = view
            job.runs += [placed for placed, _ in begun]
            job.targets = [torch.frombuffer(memory, dtype=torch.uint8) for _, memory in begun]
        later.note_progress()
        for job in jobs:
            job.transfer.run(job.targets)
    except BaseException as error:
        if not is_alone:
            raise
        if undone := [job for job in jobs if not job.transfer.is_done]:
            later.error = detached(error)
            for job in undone:
                job.transfer.discard(error)
            file.abort()
        else:  # it may be saved by now
            _logger.warning("a copy from a GPU is complete, but was not tidied up after: %s", error)
        later.ready.set()
    finally:
        for job in jobs:
            job.targets = []
    _tell(file, jobs)


def _tell(file: ShardFile, jobs: Iterable[_GpuPart]) -> None:
    """Say how far the device tier is. A failure harms nobody: what was copied may be saved by now."""
    try:
        for job in jobs:
            file.gpu.note_skipped(job.transfer.skipped_bytes)
        file.gpu.tell(file.store)
    except Exception as error:  # noqa: BLE001 - not worth a save
        _logger.warning("`tierfs status` in other processes may not show the device tier: %s", error)


def _go_in_waves(file: ShardFile, error: CapacityError, later: Later) -> None:
    """Have a file that is too large go on in memory of this process alone: it is read in waves, which need the room that it has."""
    say_waves(file.store, error)
    # Nobody has seen these: a staged state gives nothing out before all views are there.
    held = [(number, view) for number, view in enumerate(later.views) if view is not None]
    copies = file.private_copies([view for _, view in held])
    for (number, _), copied in zip(held, copies, strict=True):
        later.views[number] = copied
    file.become_private()


def _by_accelerator(tensors: Sequence[torch.Tensor]) -> tuple[list[int], Mapping[int, tuple[Accelerator, list[int]]]]:
    """Which tensors (their numbers) lie in host memory, and which on which GPU."""
    host: list[int] = []
    devices: dict[int, tuple[Accelerator, list[int]]] = {}
    for number, tensor in enumerate(tensors):
        accelerator = accelerator_of(tensor) if tensor.numel() else None
        if accelerator is None:
            host.append(number)
        else:
            devices.setdefault(id(accelerator), (accelerator, []))[1].append(number)
    return host, devices


def _pin(file: ShardFile, accelerator: Accelerator) -> None:
    """Register the segments in which a file lies. Within a turn of the GPU's drain."""
    pins = drain_of(accelerator).pins
    for segment in file.segments():
        pins.add(segment.id, segment.whole, _use_of(segment), fall_back_of(file.store))


def _use_of(segment: Any) -> Callable[[], bool]:
    reference = weakref.ref(segment)

    def is_used() -> bool:
        found = reference()
        return found is not None and found.owned and not found.retired

    return is_used


def snapshots_of(
    transfers: Iterable[tuple[Transfer, Sequence[FileRun]]], items: Iterable[tuple[Any, torch.Tensor, Placed]]
) -> list[tuple[Transfer, dict[Any, Spot]]]:
    """Where items lie in the device tier: for each snapshot, by the item's key.

    Args:
        transfers: See `ShardFile`.
        items: Key, tensor and place in the file of each.
    """
    begins = {
        id(run): (transfer, begin)
        for transfer, runs in transfers
        if transfer.generation is not None
        for run, begin in zip(runs, transfer.offsets, strict=True)
    }
    found: dict[Transfer, dict[Any, Spot]] = {}
    for key, tensor, placed in items:
        transfer, begin = begins.get(id(placed.run), (None, 0))
        if transfer is not None and transfer.generation is not None and placed.length == tensor.nbytes:
            found.setdefault(transfer, {})[key] = Spot(begin + placed.at, tensor.dtype, tensor.shape)
    return list(found.items())
