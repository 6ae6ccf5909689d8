"""Copy tensors into a shard file; from a GPU in the background, if training may change the tensors meanwhile."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from tierfs.dcp.save.copy import Addresses, address_of
from tierfs.dcp.save.gpu_staging import fall_back_of
from tierfs.dcp.save.plan import TensorPlan, plan_of
from tierfs.dcp.save.shard_file import Place, ShardFile
from tierfs.device.accelerator import Accelerator, MemoryRegion
from tierfs.device.drain import drain_of
from tierfs.device.tier import Spot
from tierfs.device.transfer import CaptureMode, Transfer
from tierfs.gc_pause import detached
from tierfs.store.write.in_place import Run
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
        self._parts: list[tuple[TensorPlan, Sequence[Run]]] = []
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.transfers: Sequence[Transfer] = ()
        self.fill: Callable[[], None] | None = None

    def add(self, plan: TensorPlan, runs: Sequence[Run]) -> None:
        """Note where planned tensors lie."""
        self._parts.append((plan, runs))

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
        while self._parts:
            for number, view in self.file.views(*self._parts.pop()):
                self._views[number] = view
        return [view for view in self._views if view is not None]


_Job: TypeAlias = tuple[Transfer, TensorPlan, list[Run]]
"""A transfer from a GPU, the plan of its tensors, and the runs that it fills, once there are any."""


def _regions(plan: TensorPlan, tensors: Sequence[torch.Tensor], addresses: Addresses) -> list[MemoryRegion]:
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
        for run in plan.runs
    ]


def copy_in(file: ShardFile, tensors: Sequence[tuple[str, torch.Tensor]], *, at_once: bool) -> Later:
    """Copy named tensors into a shard file: see `begin_tensors`."""
    plain = [tensor for _, tensor in tensors]
    addresses = np.fromiter(map(address_of, plain), np.uint64, len(plain))
    return begin_tensors(file, plan_of(tensors), plain, addresses, at_once=at_once)


def begin_tensors(
    file: ShardFile,
    plans: Sequence[TensorPlan],
    tensors: Sequence[torch.Tensor],
    addresses: Addresses,
    *,
    at_once: bool,
) -> Later:
    """Copy tensors into a shard file, bit for bit.

    Those on a GPU may follow in the background: see `Later` and `ShardFile.wait_filled`.

    Args:
        file: Receives the bytes.
        plans: Of the tensors: see `plan_of`.
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
    jobs: list[_Job] = []
    before = len(file.transfers)
    on_gpus = [(plan.accelerator, plan) for plan in plans if plan.accelerator is not None]
    if not at_once and tensors:
        file.gpu.check(file.store, has_gpu=bool(on_gpus))
    try:
        for accelerator, plan in on_gpus:
            transfer = file.gpu.transfer(accelerator, file.store, partial(pin, file, accelerator), at_once=at_once)
            jobs.append((transfer, plan, []))
            # First, so that the GPU copies while this thread does the rest.
            transfer.capture(_regions(plan, tensors, addresses))
            file.transfers.append((transfer, jobs[-1][2]))
        for plan in plans:
            if plan.accelerator is None:
                later.add(plan, file.copy_from_host(plan, tensors, addresses))
        # Nothing stops training from changing these tensors later, so they are copied now. Tensors of the other GPUs
        # may be safe already.
        unsafe = [job for job in jobs if job[0].mode is CaptureMode.RAM]
        if unsafe:
            _fill(file, unsafe, later, is_alone=False)
    except BaseException:
        for transfer, _, _ in jobs:
            if not transfer.is_done:
                transfer.discard()
        del file.transfers[before:]  # the tensors that the file held before are complete
        raise
    rest = [job for job in jobs if job not in unsafe]
    later.transfers = [transfer for transfer, _, _ in rest]
    if rest:
        later.fill = partial(_fill, file, rest, later)
    else:
        later.ready.set()
    return later


def _fill(file: ShardFile, jobs: Sequence[_Job], later: Later, *, is_alone: bool = True) -> None:
    """Reserve memory for captured tensors, and move them there.

    ``is_alone`` says whether this runs in the background, where an error cannot be raised to a caller.

    Raises:
        CapacityError: There is no room, and ``is_alone`` is false.
    """
    try:
        targets = []
        for _, plan, runs in jobs:
            runs.extend(file.make_room(plan))
            targets.append([torch.frombuffer(run.view, dtype=torch.uint8) for run in runs])
            later.add(plan, runs)
        if is_alone:
            later.ready.set()
        for (transfer, _, _), theirs in zip(jobs, targets, strict=True):
            transfer.run(theirs)
    except BaseException as error:
        if not is_alone:
            raise
        if undone := [transfer for transfer, _, _ in jobs if not transfer.is_done]:
            later.error = detached(error)
            for transfer in undone:
                transfer.discard(error)
            file.abort()
        else:  # the file may be saved already
            _logger.warning("a copy from a GPU is complete, but cleaning up after it failed: %s", error)
        later.ready.set()
    _tell(file, jobs)


def _tell(file: ShardFile, jobs: Iterable[_Job]) -> None:
    """Report the state of the device tier.

    A failure is only logged: the tensors are copied, and may be saved already.
    """
    try:
        file.gpu.tell(file.store, sum(transfer.skipped_bytes for transfer, _, _ in jobs))
    except Exception as error:  # noqa: BLE001 - must not fail a save
        _logger.warning("`tierfs status` in other processes may not show the device tier: %s", error)


def pin(file: ShardFile, accelerator: Accelerator) -> None:
    """Register the segments of a file with the GPU. Called during a turn of the GPU's drain."""
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
    transfers: Iterable[tuple[Transfer, Sequence[Run]]], items: Iterable[tuple[Any, torch.Tensor, Place]]
) -> list[tuple[Transfer, dict[Any, Spot]]]:
    """Return, for each snapshot in the device tier, where items lie in it, by the item's key."""
    begins = {
        id(run): (transfer, begin)
        for transfer, runs in transfers
        if transfer.generation is not None
        for run, begin in zip(runs, transfer.offsets, strict=True)
    }
    found: dict[Transfer, dict[Any, Spot]] = {}
    for key, tensor, (run, entry) in items:
        transfer, begin = begins.get(id(run), (None, 0))
        if transfer is not None and transfer.generation is not None and entry.length == tensor.nbytes:
            found.setdefault(transfer, {})[key] = Spot(begin + entry.at, tensor.dtype, tensor.shape)
    return list(found.items())
