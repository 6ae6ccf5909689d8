"""Copy tensors into a shard file; from a GPU in the background, if training may change the tensors meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tierfs.dcp.save.copy import Addresses, address_of
from tierfs.dcp.save.gpu_staging import pin
from tierfs.dcp.save.plan import TensorPlan, plan_of
from tierfs.dcp.save.shard_file import FileRun, RunMemory, ShardFile
from tierfs.device.accelerator import Accelerator, accelerator_of
from tierfs.device.transfer import CaptureMode, MemoryRegion, Transfer
from tierfs.gc_pause import detached
from tierfs.threads import start_daemon

_logger = logging.getLogger("tierfs.dcp")


class Later:
    """Views of tensors that are copied into a shard file. Some are available later, and all are made when needed.

    Args:
        file: Receives the tensors.
        count: The number of views.

    Attributes:
        file: As given.
        ready: Set when all views can be made.
        error: Why they cannot.
        transfers: The transfers that produce outstanding views.
        fill: Reserves the memory of outstanding views, and fills it.
    """

    def __init__(self, file: ShardFile, count: int) -> None:
        self.file = file
        self._views: list[torch.Tensor | None] = [None] * count
        self._parts: list[tuple[np.ndarray[Any, Any], TensorPlan, Sequence[RunMemory]]] = []
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.transfers: Sequence[Transfer] = ()
        self.fill: Callable[[], None] | None = None

    def add(self, numbers: np.ndarray[Any, Any], plan: TensorPlan, memories: Sequence[RunMemory]) -> None:
        """Note where planned tensors lie. ``numbers`` are those of their views."""
        self._parts.append((numbers, plan, memories))

    def made(self) -> list[tuple[int, torch.Tensor]]:
        """Make the views of all tensors that have memory so far, and return them with their numbers."""
        while self._parts:
            numbers, plan, memories = self._parts.pop()
            theirs = numbers.tolist()
            for number, view in self.file.views(plan, memories):
                self._views[theirs[number]] = view
        return [(number, view) for number, view in enumerate(self._views) if view is not None]

    def begin(self) -> None:
        """Start a thread that makes the outstanding views.

        Call it last: Python on two threads is slower than on one.
        """
        fill, self.fill = self.fill, None
        if fill is not None and start_daemon(fill, name="device-drain") is None:
            fill()

    def discard(self) -> None:
        """Discard outstanding views that `begin` was not called for."""
        if self.fill is not None:
            self.fill = None
            for transfer in self.transfers:
                transfer.discard()

    def result(self) -> list[torch.Tensor]:
        """Wait for all views, and return them. For their bytes wait with `ShardFile.wait_filled`.

        Raises:
            TierfsError: The outstanding views could not be made.
        """
        self.ready.wait()
        if self.error is not None:
            raise detached(self.error)
        return [view for _, view in self.made()]


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """Where the tensors of a call lie, and how they will lie in a shard file.

    Attributes:
        host: The numbers of the tensors in host memory, and their plan.
        devices: The same for each GPU.
    """

    host: tuple[np.ndarray[Any, Any], TensorPlan]
    devices: Sequence[tuple[Accelerator, np.ndarray[Any, Any], TensorPlan]]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, torch.Tensor]]) -> TensorLayout:
        """Lay out named tensors."""
        host: list[int] = []
        devices: dict[int, tuple[Accelerator, list[int]]] = {}
        for number, (_, tensor) in enumerate(tensors):
            accelerator = accelerator_of(tensor) if tensor.numel() else None
            if accelerator is None:
                host.append(number)
            else:
                devices.setdefault(id(accelerator), (accelerator, []))[1].append(number)

        def planned(numbers: Sequence[int]) -> tuple[np.ndarray[Any, Any], TensorPlan]:
            return np.array(numbers, np.int64), plan_of([tensors[number] for number in numbers])

        return cls(planned(host), [(one, *planned(numbers)) for one, numbers in devices.values()])


class _GpuPart:
    """The tensors of one GPU. ``numbers`` are those of the tensors among all tensors of the call."""

    def __init__(self, transfer: Transfer, plan: TensorPlan, numbers: np.ndarray[Any, Any]) -> None:
        self.transfer = transfer
        self.plan = plan
        self.numbers = numbers
        self.runs: list[FileRun] = []
        self.targets: list[torch.Tensor] = []

    def regions(self, tensors: Sequence[torch.Tensor], addresses: Addresses) -> list[MemoryRegion]:
        """Return the regions for `Transfer.capture`."""
        return [
            MemoryRegion(
                sum(run.lengths),
                run.longest,
                [tensors[number] for number in run.numbers.tolist()],
                run.offsets,
                run.sizes,
                addresses[run.numbers],
            )
            for run in self.plan.runs
        ]


def copy_in(file: ShardFile, tensors: Sequence[tuple[str, torch.Tensor]], *, at_once: bool) -> Later:
    """Copy named tensors into a shard file: see `begin_tensors`."""
    plain = [tensor for _, tensor in tensors]
    addresses = np.fromiter(map(address_of, plain), np.uint64, len(plain))
    return begin_tensors(file, TensorLayout.of(tensors), plain, addresses, at_once=at_once)


def begin_tensors(
    file: ShardFile, layout: TensorLayout, tensors: Sequence[torch.Tensor], addresses: Addresses, *, at_once: bool
) -> Later:
    """Copy tensors into a shard file, bit for bit.

    Those on a GPU may follow in the background: see `Later` and `ShardFile.wait_filled`.

    Args:
        file: Receives the bytes.
        layout: Of the tensors.
        tensors: Strided, on any device.
        addresses: uint64: see `address_of`.
        at_once: Whether all bytes have to be in the file on return.

    Returns:
        For each tensor, a view of the file with the same dtype and shape, on the CPU.

    Raises:
        CapacityError: There is no room: see `ShardFile.begin_runs`.
        InvalidInputError: A CUDA graph is being captured, or the requested mode is not possible.
    """
    later = Later(file, len(tensors))
    numbers, plan = layout.host
    jobs: list[_GpuPart] = []
    before = len(file.transfers)
    if not at_once and tensors:
        file.gpu.check(file.store, has_gpu=bool(layout.devices))
    try:
        for accelerator, places, device_plan in layout.devices:
            transfer = file.gpu.transfer(accelerator, file.store, partial(pin, file, accelerator), at_once=at_once)
            job = _GpuPart(transfer, device_plan, places)
            jobs.append(job)
            # First, so that the GPU copies while this thread does the rest.
            transfer.capture(job.regions([tensors[number] for number in places.tolist()], addresses[places]))
            file.transfers.append((transfer, job.runs))
        if len(numbers):
            theirs = [tensors[number] for number in numbers.tolist()]
            later.add(numbers, plan, file.copy_from_host(plan, theirs, addresses[numbers]))
        # Nothing stops training from changing these tensors later, so they are copied now. Tensors of the other GPUs
        # may be safe already.
        unsafe = [job for job in jobs if job.transfer.mode is CaptureMode.RAM]
        if unsafe:
            _fill(file, unsafe, later, is_alone=False)
    except BaseException:
        for job in jobs:
            if not job.transfer.is_done:
                job.transfer.discard()
        del file.transfers[before:]  # the tensors that the file held before are complete
        raise
    rest = [job for job in jobs if job not in unsafe]
    later.transfers = [job.transfer for job in rest]
    if rest:
        later.fill = partial(_fill, file, rest, later)
    else:
        later.ready.set()
    return later


def _fill(file: ShardFile, jobs: Sequence[_GpuPart], later: Later, *, is_alone: bool = True) -> None:
    """Reserve memory for captured tensors, and move them there.

    ``is_alone`` says whether this runs in the background, where an error cannot be raised to a caller.

    Raises:
        CapacityError: There is no room, and ``is_alone`` is false.
    """
    try:
        rooms = [file.make_room(job.plan) for job in jobs]
        for job, begun in zip(jobs, rooms, strict=True):
            later.add(job.numbers, job.plan, [memory for _, memory in begun])
            job.runs += [run for run, _ in begun]
            job.targets = [torch.frombuffer(memory, dtype=torch.uint8) for _, memory in begun]
        if is_alone:
            later.ready.set()
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
        else:  # the file may be saved already
            _logger.warning("a copy from a GPU is complete, but cleaning up after it failed: %s", error)
        later.ready.set()
    finally:
        for job in jobs:
            job.targets = []
    _tell(file, jobs)


def _tell(file: ShardFile, jobs: Iterable[_GpuPart]) -> None:
    """Report the state of the device tier.

    A failure is only logged: the tensors are copied, and may be saved already.
    """
    try:
        file.gpu.tell(file.store, sum(job.transfer.skipped_bytes for job in jobs))
    except Exception as error:  # noqa: BLE001 - must not fail a save
        _logger.warning("`tierfs status` in other processes may not show the device tier: %s", error)
