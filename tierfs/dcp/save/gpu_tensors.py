"""Copy tensors into a shard file; from a GPU in the background, if training may change the tensors meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from tierfs._fork import PerProcess
from tierfs.dcp.save.gpu_staging import pin
from tierfs.dcp.save.plan import TensorPlan, plan_of
from tierfs.dcp.save.saves import Save, StagedState
from tierfs.dcp.save.shard_file import FileRun, ShardFile, say_waves
from tierfs.device.accelerator import Accelerator, accelerator_of
from tierfs.device.transfer import CaptureMode, MemoryRegion, Transfer
from tierfs.errors import CapacityError
from tierfs.gc_pause import detached
from tierfs.threads import start_daemon

_logger = logging.getLogger("tierfs.dcp")


class Later:
    """Views of staged tensors, some of which become available later.

    Args:
        views: In order; ``None`` for a view that is not available yet.

    Attributes:
        views: As given. Complete once `ready` is set, unless there is an error.
        ready: Set when no view is outstanding.
        error: Why views are missing.
        transfers: The transfers that produce the outstanding views.
        fill: Makes the outstanding views.
    """

    def __init__(self, views: Sequence[torch.Tensor | None]) -> None:
        self.views = list(views)
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.transfers: Sequence[Transfer] = ()
        self.fill: Callable[[], None] | None = None
        self.note_progress()

    def note_progress(self) -> None:
        """Set `ready` if all views are available."""
        if all(view is not None for view in self.views):
            self.ready.set()

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
        return [view for view in self.views if view is not None]


class LaterState(StagedState):
    """A staged state some of whose tensors follow: an `Awaited` stands for each of them until the content is read."""

    def __init__(self, content: Mapping[str, Any], save: Save | None, file: ShardFile, later: Later) -> None:
        self.later = later
        self._lock = PerProcess(threading.Lock)
        self._is_whole = later.ready.is_set()
        super().__init__(content, save, file, later.result() if self._is_whole else ())

    def wait(self) -> None:
        """Wait for copies from a GPU.

        If one fails, the save fails when it is planned, so that every rank gets the error.
        """
        try:
            with self._lock():
                if not self._is_whole:
                    self.views = self.later.result()
                    for key, value in dict.items(self):
                        super().__setitem__(key, _replaced(value))
                    self._is_whole = True
            if self.file is not None:
                self.file.wait_filled()
        except Exception as error:
            if self.save is None or self.save.address is not None:
                raise
            self.save.failure = detached(error)

    def values(self) -> Any:
        self.wait()
        return super().values()

    def get(self, key: str, default: Any = None) -> Any:
        self.wait()
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.wait()
        return super().__getitem__(key)

    def pop(self, *arguments: Any) -> Any:
        self.wait()
        return super().pop(*arguments)

    def popitem(self) -> tuple[str, Any]:
        self.wait()
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.wait()
        return super().setdefault(key, default)


ForkingPickler.register(LaterState, LaterState.reduce_for_process)


class Awaited:
    """Stands for a tensor whose memory is not available yet.

    ``make`` returns the tensor once it is available.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def get(self) -> Any:
        """Return the tensor, the same one each time."""
        if self._made is None:
            self._made = self._make()
        return self._made


def _replaced(value: Any) -> Any:
    """Replace stand-ins by their tensors. Dicts and lists are changed in place."""
    if type(value) is Awaited:
        return value.get()
    if isinstance(value, dict):
        for key, inner in value.items():
            value[key] = _replaced(inner)
    elif type(value) is list:
        value[:] = [_replaced(inner) for inner in value]
    elif type(value) is tuple:
        return tuple(_replaced(inner) for inner in value)
    return value


class _GpuPart:
    """The tensors of one GPU.

    ``numbers`` are those of the tensors among all tensors of the call.
    """

    def __init__(self, transfer: Transfer, plan: TensorPlan, numbers: Sequence[int]) -> None:
        self.transfer = transfer
        self.plan = plan
        self.numbers = numbers
        self.runs: list[FileRun] = []
        self.targets: list[torch.Tensor] = []

    def regions(self, tensors: Sequence[torch.Tensor]) -> list[MemoryRegion]:
        """Return the regions for `Transfer.capture`."""
        return [
            MemoryRegion(
                sum(run.lengths),
                [(entry.at, tensors[number]) for number, entry in zip(run.numbers, run.entries, strict=True)],
            )
            for run in self.plan.runs
        ]


def begin_tensors(file: ShardFile, tensors: Sequence[tuple[str, torch.Tensor]], *, at_once: bool) -> Later:
    """Copy tensors into a shard file.

    Those on a GPU may follow in the background: see `Later` and `ShardFile.wait_filled`.

    Args:
        file: Receives the bytes.
        tensors: With their names. Strided, on any device. Tensors with elements are copied bit for bit.
        at_once: Whether all views have to be available on return.

    Returns:
        For each tensor, a view of the file with the same dtype and shape, on the CPU. Each view has a storage of its
        own, because pickling a tensor pickles its whole storage. A DTensor over a part of a storage cannot be pickled
        at all (torch 2.13 reads from address 0).

    Raises:
        CapacityError: A tensor found no contiguous room before the timeout.
        InvalidInputError: A CUDA graph is being captured, or the requested mode is not possible.
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
            transfer = file.gpu.transfer(accelerator, file.store, partial(pin, file, accelerator), at_once=at_once)
            job = _GpuPart(transfer, plan, numbers)
            jobs.append(job)
            # First, so that the GPU copies while this thread does the rest.
            transfer.capture(job.regions([tensors[number][1] for number in numbers]))
            file.transfers.append((transfer, job.runs))
        views = file.add_from_host([tensors[number] for number in host])
        for number, view in zip(host, views, strict=True):
            later.views[number] = view
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
    return later


def _fill(file: ShardFile, jobs: Sequence[_GpuPart], later: Later, *, is_alone: bool = True) -> None:
    """Reserve memory for captured tensors, and move them there.

    ``is_alone`` says whether this runs in the background, where an error cannot be raised to a caller.

    Raises:
        CapacityError: There is no room, and ``is_alone`` is false.
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
            for run, (_, memory) in zip(job.plan.runs, begun, strict=True):
                for number, view in zip(run.numbers, file.views(run, memory), strict=True):
                    later.views[job.numbers[number]] = view
            job.runs += [run for run, _ in begun]
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
        for job in jobs:
            file.gpu.note_skipped(job.transfer.skipped_bytes)
        file.gpu.tell(file.store)
    except Exception as error:  # noqa: BLE001 - must not fail a save
        _logger.warning("`tierfs status` in other processes may not show the device tier: %s", error)


def _go_in_waves(file: ShardFile, error: CapacityError, later: Later) -> None:
    """Move a file that is too large into private memory.

    It is then read in waves, which need the room that it occupies.
    """
    say_waves(file.store, error)
    # No caller has these views yet: a staged state gives out nothing before all views are available.
    held = [(number, view) for number, view in enumerate(later.views) if view is not None]
    copies = file.private_copies([view for _, view in held])
    for (number, _), copied in zip(held, copies, strict=True):
        later.views[number] = copied
    file.become_private()


def _by_accelerator(tensors: Sequence[torch.Tensor]) -> tuple[list[int], Mapping[int, tuple[Accelerator, list[int]]]]:
    """Return the numbers of the tensors in host memory, and of those on each GPU."""
    host: list[int] = []
    devices: dict[int, tuple[Accelerator, list[int]]] = {}
    for number, tensor in enumerate(tensors):
        accelerator = accelerator_of(tensor) if tensor.numel() else None
        if accelerator is None:
            host.append(number)
        else:
            devices.setdefault(id(accelerator), (accelerator, []))[1].append(number)
    return host, devices
