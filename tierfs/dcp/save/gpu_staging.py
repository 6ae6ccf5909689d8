"""How one writer's tensors leave the GPU: the mode that the user chose, the device tier, the host memory."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierfs._fork import PerProcess
from tierfs.dcp.save.copy import copy_ranges
from tierfs.device.accelerator import Accelerator, has_accelerator
from tierfs.device.drain import Gate, drain_of
from tierfs.device.tier import DeviceTier, Spot
from tierfs.device.transfer import CaptureMode, FillChunks, Transfer
from tierfs.digest import DigestKind, digests_of
from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment, Slot
from tierfs.host.slab.table import DATA_STATES, SlotKind
from tierfs.host.tiers import Tiers
from tierfs.session.settings import size_of
from tierfs.store import Store
from tierfs.store.status import leave_note

if TYPE_CHECKING:
    from tierfs.dcp.save.shard_file import FileRun, Place, ShardFile

STAGES = ("auto", "device", "lazy", "ram", "all")
_logger = logging.getLogger("tierfs.dcp")


class GpuStaging:
    """Stages one writer's tensors from GPUs. Safe for use by many threads.

    Args:
        stage: One of `STAGES`, as for `TierWriter`.
        device: Budget of GPU memory; ``None`` takes the budget of the store's options.

    Raises:
        InvalidInputError: An argument is invalid.
    """

    def __init__(self, stage: str, device: str | int | None) -> None:
        if stage not in STAGES:
            raise InvalidInputError(f"stage must be one of {', '.join(map(repr, STAGES))}, not {stage!r}")
        self._stage = stage
        self._budget = None if device is None else size_of("device", device)
        self._lock = PerProcess(threading.Lock)
        self._tiers: dict[int, DeviceTier] = {}
        self._accelerators: list[Accelerator] = []
        self._transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._skipped_bytes = 0

    def __repr__(self) -> str:
        return f"GpuStaging({self._stage!r}, {list(self._tiers.values())!r})"

    @property
    def gates(self) -> list[Gate]:
        """The gates of the drains in use."""
        return [drain_of(accelerator).gate for accelerator in self._accelerators]

    def check(self, store: Store, *, has_gpu: bool) -> None:
        """Check that the requested mode is possible.

        A state without tensors on a GPU goes to the ram tier, and the log says so once.

        Raises:
            InvalidInputError: ``stage="device"`` without a budget, or ``"device"`` or ``"lazy"`` on a machine without a
                GPU.
        """
        budget = self._budget_of(store)
        if self._stage == "device" and not budget:
            raise InvalidInputError(
                "stage='device' needs a budget of GPU memory: give TierWriter(..., device='8GiB') or set TIERFS_DEVICE"
            )
        if has_gpu:
            return
        if self._stage in {"device", "lazy"} and not has_accelerator():
            raise InvalidInputError(
                f"stage={self._stage!r} needs a GPU, but torch finds none here (torch.cuda.is_available() is False): "
                "use stage='auto', which then copies to host memory"
            )
        if self._stage in {"device", "lazy"} or budget:
            fall_back_of(store)("no_gpu", "no tensor of the state is on a GPU: the state is copied to the ram tier")

    def transfer(self, accelerator: Accelerator, store: Store, pin: Callable[[], None], *, at_once: bool) -> Transfer:
        """Create a transfer for tensors of one GPU that go to one file.

        ``at_once`` says whether the caller waits for the bytes.
        """
        budget = self._budget_of(store)
        mode, tier = CaptureMode.RAM, None
        if not at_once and self._stage == "lazy":
            mode = CaptureMode.LAZY
        elif not at_once and budget and self._stage in {"auto", "all", "device"}:
            mode, tier = CaptureMode.DEVICE, self._tier(accelerator, budget)
        with self._lock():
            if accelerator not in self._accelerators:
                self._accelerators.append(accelerator)
        found = Transfer(
            mode,
            accelerator,
            drain_of(accelerator),
            tier,
            pin=pin,
            fill=_filler(store),
            fall_back=fall_back_of(store),
        )
        self._transfers.add(found)
        return found

    def fence(self) -> None:
        """Call `Transfer.fence` of every transfer in flight."""
        for transfer in list(self._transfers):
            transfer.fence()

    def tell(self, store: Store, skipped_bytes: int) -> None:
        """Leave a note on the device tier for ``tierfs status`` in other processes. It is valid while this one lives.

        ``skipped_bytes`` are those of a save that did not cross the link to the host.
        """
        with self._lock():
            self._skipped_bytes += skipped_bytes
        report = self.status(store)
        if report is not None and self._accelerators and store.tiers is not None:
            leave_note(store, report)

    def status(self, store: Store) -> dict[str, Any] | None:
        """Return the device tier's part of `tierfs status`; ``None`` if no GPU is in use and no budget is given."""
        budget = self._budget_of(store)
        if not budget and not self._accelerators:
            return None
        tiers = [tier.status() for tier in list(self._tiers.values())]
        names = ("budget_bytes", "used_bytes", "generations", "snapshots")
        report: dict[str, Any] = {"gives": "none", **{name: sum(tier[name] for tier in tiers) for name in names}}
        ages = [tier["newest_age_s"] for tier in tiers if tier["newest_age_s"] is not None]
        report["newest_age_s"] = min(ages, default=None)
        if tiers:
            report["device"] = ", ".join(sorted({tier["device"] for tier in tiers}))
        else:
            report["budget_bytes"] = budget
        drains = [drain_of(accelerator) for accelerator in self._accelerators]
        moved_s = sum(drain.moved_s for drain in drains)
        report["drained_bytes"] = sum(drain.moved_bytes for drain in drains)
        report["drain_bytes_per_s"] = round(report["drained_bytes"] / moved_s) if moved_s else 0
        report["skipped_bytes"] = self._skipped_bytes
        report["registered_bytes"] = sum(drain.pins.registered_bytes for drain in drains)
        report["unpinned"] = sum(drain.pins.failed for drain in drains)
        return report

    def _budget_of(self, store: Store) -> int:
        return store.device_bytes if self._budget is None else self._budget

    def _tier(self, accelerator: Accelerator, budget: int) -> DeviceTier:
        with self._lock():
            found = self._tiers.get(id(accelerator))
            if found is None:
                found = self._tiers[id(accelerator)] = DeviceTier(budget, accelerator)
            return found


def _filler(store: Store) -> FillChunks | None:
    """Return a function that fills memory with chunks of this process's part of the ram tier.

    The bytes are checked when they are sealed.
    """
    tiers = store.tiers
    if tiers is None or store.descriptor.digest_kind is not DigestKind.XXH3_128:
        return None
    ram = tiers.ram

    def fill(chunks: Sequence[tuple[bytes, torch.Tensor]]) -> list[bool]:
        wanted = {digest for digest, _ in chunks}
        found: dict[bytes, tuple[Slot, int]] = {}
        memories = []  # stay mapped during the copy
        for segment, slots in _chunks_in(ram, wanted):
            memories.append(np.frombuffer(segment.whole(), np.uint8))
            found.update((slot.name[1:], (slot, memories[-1].ctypes.data + slot.offset)) for slot in slots)
        copies = [
            (there[0], (target.data_ptr(), there[1], there[0].length))
            if (there := found.get(digest)) is not None and there[0].length == len(target)
            else None
            for digest, target in chunks
        ]
        copy_ranges(np.array([copy for _, copy in filter(None, copies)], np.uint64).reshape(-1, 3))
        return [copy is not None and copy[0].segment.is_still(copy[0]) for copy in copies]

    return fill


def _chunks_in(ram: RamTier, wanted: Collection[bytes]) -> Iterator[tuple[Segment, list[Slot]]]:
    """Yield each segment of this process, with its slots of chunks that have these digests."""
    for segment in ram.own_segments():
        with contextlib.suppress(NotFoundError):  # another thread closed it
            slots = segment.slots(kind=SlotKind.CHUNK, states=DATA_STATES)
            yield segment, [slot for slot in slots if not slot.hidden and slot.name[1:] in wanted]


def hide_damaged(tiers: Tiers, digest: bytes) -> None:
    """Let no later save copy a chunk from a damaged slot of this process."""
    for segment, slots in _chunks_in(tiers.ram, {digest}):
        for slot in slots:
            if digests_of(DigestKind.XXH3_128, segment.view(slot))[1] != digest and segment.hide(slot):
                tiers.counters["ram_quarantined"] += 1


def fall_back_of(store: Store) -> Callable[[str, str], None]:
    """Return a function that notes a fallback, by a name and a message."""
    tiers = store.tiers
    if tiers is None:
        return lambda _, text: _logger.warning("%s", text)
    counters = tiers.counters
    return lambda what, text: counters.fall_back(what, "%s", text)


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
    transfers: Iterable[tuple[Transfer, Sequence[FileRun]]], items: Iterable[tuple[Any, torch.Tensor, Place]]
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
