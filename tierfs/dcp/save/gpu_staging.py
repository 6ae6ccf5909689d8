"""How one writer's tensors leave the GPU: the mode that the user chose, the device tier, the host memory."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tierfs._fork import PerProcess
from tierfs.dcp.save.same_chunks import filler
from tierfs.device.accelerator import Accelerator, has_accelerator
from tierfs.device.drain import Gate, drain_of
from tierfs.device.tier import DeviceTier
from tierfs.device.transfer import CaptureMode, Transfer
from tierfs.errors import InvalidInputError
from tierfs.session.settings import size_of
from tierfs.store import Store
from tierfs.store.status import leave_note

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
            fill=filler(store),
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


def fall_back_of(store: Store) -> Callable[[str, str], None]:
    """Return a function that notes a fallback, by a name and a message."""
    tiers = store.tiers
    if tiers is None:
        return lambda _, text: _logger.warning("%s", text)
    counters = tiers.counters
    return lambda what, text: counters.fall_back(what, "%s", text)
