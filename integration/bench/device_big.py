"""Rows of `device.py` that need the whole state: how long saves block, their cost to training, loads, rollbacks."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from device_card import Card, limits
from device_phases import phases_of_load
from device_saving import Ours, Stock, Store, cycle, medians
from device_training import Trainer

from tierfs.dcp import TierLoadPlanner, TierReader
from tierfs.device.tier import device_tiers

UNCHANGED = 0.9
RAM_STATES = 2.25
SPARE_BYTES = 256 << 20


class Big:
    """The rows of this module.

    Args:
        card: The GPU.
        root: A directory on the disk to use.
        options: The parsed command line.
        budget: Rounds after the first are skipped if it is short.
    """

    def __init__(self, card: Card, root: Path, options: Any, budget: Any) -> None:
        self._card, self._root, self._options, self._budget = card, root, options, budget
        self._base_s: list[float] = []
        self._store: Store | None = None
        self._device: Ours | None = None
        self._trainer: Trainer | None = None
        self.limits: dict[str, Any] = {}
        self._cycle_s = 0.0
        self._warm_ups: list[dict[str, Any]] = []

    # -- shared by the rows --------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            self.train()
        assert self._trainer is not None
        return self._trainer

    @property
    def store(self) -> Store:
        if self._store is None:
            ram = int(self.trainer.size * RAM_STATES) + SPARE_BYTES
            (self._root / "big").mkdir()
            self._store = Store(self._root / "big", ram)
        return self._store

    @property
    def device(self) -> Ours:
        if self._device is None:
            size = self.trainer.size + (64 << 20)
            # Two generations if the card has room for them beside weights, moments, gradients and activations.
            total = self._card.describe()["device_bytes"]
            self._generations = 2 if total > 4.6 * size + (16 << 30) else 1
            self._device = Ours(self._card, self.store, "device", self._generations * size)
        return self._device

    def find_limits(self) -> dict[str, Any]:
        self.limits = limits(self._card, min(self._options.size // 4, 5_000_000_000))
        return dict(self.limits)

    def train(self) -> dict[str, Any]:
        """Build the model and time undisturbed steps."""
        dry, size = self._options.dry, self._options.size
        layers = 2 if dry else 24
        batch, length = (1, 16) if dry else (4, 1024)
        begin = time.perf_counter()
        self._trainer = trainer = Trainer(self._card, size, layers=layers, batch=batch, length=length)
        trainer.window(5)
        built_s = time.perf_counter() - begin
        steps = self._options.steps
        self._base_s = [trainer.window(steps + 1) for _ in range(2)]
        return {
            "built_s": built_s,
            "step_s": self._base_s[-1] / (steps + 1),
            "windows_s": self._base_s,
            "bytes": trainer.size,
            "parameters": sum(1 for _ in trainer.model.parameters()),
            "tensors": len(trainer.tensors()),
            "loss": trainer.losses[-1:],
            **self._card.memory(),
        }

    def _cycles(self, peer: Ours | Stock, rounds: int) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        for _ in range(rounds):
            begin = time.perf_counter()
            if found and not self._budget.allows(2 * self._cycle_s):
                break
            found.append(cycle(self.trainer, peer, self._options.steps, self._base_s))
            self._cycle_s = time.perf_counter() - begin
        return {**medians(found), "rounds": len(found)}

    def _full(self, peer: Ours) -> dict[str, Any]:
        """Save a new state while the GPU is idle."""
        self.trainer.step()
        self._card.synchronize()
        before, begin = peer.report(), time.perf_counter()
        pending = peer.begin(self.trainer.state())
        blocked_s = self._card.between(*pending.stamps)
        pending.wait()
        saved_s = time.perf_counter() - begin
        after = peer.report()
        settle_s = peer.settle()
        return {
            "blocked_s": max(blocked_s, pending.call_s),
            "stage_s": pending.stage_s,
            "queued_s": pending.queued_s,
            "saved_s": saved_s,
            "settle_s": settle_s,
            "d2h_bytes": after.get("drained_bytes", 0) - before.get("drained_bytes", 0),
            "skipped_bytes": after.get("skipped_bytes", 0) - before.get("skipped_bytes", 0),
            "drain_s": after["moved_s"] - before["moved_s"],
            "device": after,
        }

    def _warm_up(self, peer: Ours, saves: int = 2) -> None:
        """Save twice: the ram tier has room for two states, and the second save allocates new memory, too."""
        while len(self._warm_ups) < saves:
            self._warm_ups.append(self._full(peer))

    # -- rows ----------------------------------------------------------------------------------------------------------

    def first_save(self) -> dict[str, Any]:
        """Measure the first save of the process: it allocates and registers memory, and plans. CuPy is imported."""
        self._warm_up(self.device, saves=1)
        return dict(self._warm_ups[0])

    def to_device(self) -> dict[str, Any]:
        """Measure how long a snapshot blocks, and the cost of the snapshot and its drain to the next steps."""
        self._warm_up(self.device)
        found = self._cycles(self.device, self._options.rounds)
        idle = [self._full(self.device) for _ in range(self._options.rounds)]
        d2h = sum(one["d2h_bytes"] for one in idle) / max(sum(one["drain_s"] for one in idle), 1e-9)
        idle_s = statistics.median(one["blocked_s"] for one in idle)
        size = self.trainer.size
        copied_s = size * self.limits["d2d_s_per_byte"]
        return {
            **found,
            "generations": self._generations,
            "warm_ups": self._warm_ups,
            "idle": idle,
            "idle_s": idle_s,
            "d2d_s": copied_s,
            "of_d2d_idle": copied_s / idle_s,
            "d2h_of_pinned": d2h / self.limits["d2h"],
            "value": copied_s / found["blocked_stream_s"],
        }

    def second_save(self) -> dict[str, Any]:
        """Compare a save after a tenth of the bytes changed with a save of a new state."""
        self._warm_up(self.device)
        first = self._full(self.device)
        left = (1 - UNCHANGED) * self.trainer.size
        changed = 0
        with torch.no_grad():
            for tensor in sorted(self.trainer.tensors(), key=lambda one: -one.numel()):
                length = tensor.numel() * tensor.element_size()
                if length <= left:
                    tensor.add_(1e-3)
                    left, changed = left - length, changed + length
        self._card.synchronize()
        peer, before, begin = self.device, self.device.report(), time.perf_counter()
        pending = peer.begin(self.trainer.state())
        pending.wait()
        saved_s, after = time.perf_counter() - begin, peer.report()
        peer.settle()
        d2h_bytes, drain_s = (after[key] - before[key] for key in ("drained_bytes", "moved_s"))
        return {
            "changed_bytes": changed,
            "first": first,
            "d2h_bytes": d2h_bytes,
            "skipped_bytes": after.get("skipped_bytes", 0) - before.get("skipped_bytes", 0),
            "drain_s": drain_s,
            "saved_s": saved_s,
            "bytes_of_first": d2h_bytes / max(first["d2h_bytes"], 1),
            "time_of_first": drain_s / max(first["drain_s"], 1e-9),
            "saved_of_first": saved_s / first["saved_s"],
            "value": max(d2h_bytes / max(first["d2h_bytes"], 1), drain_s / max(first["drain_s"], 1e-9)),
        }

    def _load(self, url: str) -> dict[str, Any]:
        """Load in place, after a step that changed everything."""
        self.trainer.step()
        self._card.synchronize()
        state, reader = self.trainer.state(), TierReader(url, **self.store.options)
        gc.collect()
        begin = time.perf_counter()
        with phases_of_load(self._card.accelerator) as phases:
            dcp.load(state, storage_reader=reader, planner=TierLoadPlanner())
            self._card.synchronize()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "phases": phases, "device_bytes": reader.device_bytes}

    def _loads(self, url: str, wanted: torch.Tensor) -> dict[str, Any]:
        loads = []
        for _ in range(1 + self._options.rounds):
            loads.append(self._load(url))
            loads[-1]["same"] = torch.equal(self.trainer.fingerprint(), wanted)
        return {
            "loads": loads,
            "first_s": loads[0]["seconds"],
            "seconds": statistics.median(one["seconds"] for one in loads[1:]),
            "same": all(one["same"] for one in loads),
            "device_bytes": loads[-1]["device_bytes"],
            "phases": loads[-1]["phases"],
        }

    def rollback(self) -> dict[str, Any]:
        """Time a rollback to the newest save, which is in the device tier."""
        if self.device._number == 0 or not device_tiers():
            self._full(self.device)
        else:
            self.device.begin(self.trainer.state()).wait()
            self.device.settle()
        wanted = self.trainer.fingerprint()
        found = self._loads(self.device.url(), wanted)
        copied_s = self.trainer.size * self.limits["d2d_s_per_byte"]
        return {**found, "d2d_s": copied_s, "value": copied_s / found["seconds"]}

    def load(self) -> dict[str, Any]:
        """Time a load from the ram tier to the GPU, after the device tier was closed."""
        ours, self._device = self.device, None
        if ours._number == 0:
            self._full(ours)
        else:
            ours.begin(self.trainer.state()).wait()
            ours.settle()
        wanted, url = self.trainer.fingerprint(), ours.url()
        ours.close()
        del ours
        gc.collect()
        found = self._loads(url, wanted)
        moved_s = self.trainer.size / self.limits["h2d"]
        return {**found, "tiers_left": len(device_tiers()), "h2d_s": moved_s, "value": moved_s / found["seconds"]}

    def _drop_device(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None
            gc.collect()
            self._card.release()

    def to_ram(self) -> dict[str, Any]:
        """Measure how long a synchronous copy into a warm slab blocks."""
        self._drop_device()
        ours = Ours(self._card, self.store, "ram")
        try:
            self._warm_up(ours)
            saves = [self._full(ours) for _ in range(self._options.rounds)]
        finally:
            ours.close()
        blocked = statistics.median(one["blocked_s"] for one in saves)
        staged = statistics.median(one["stage_s"] for one in saves)
        copied_s = self.trainer.size / self.limits["d2h"]
        return {
            "blocked_s": blocked,
            "stage_s": staged,
            "d2h_s": copied_s,
            "saves": saves,
            "of_d2h_stage": copied_s / staged,
            "value": copied_s / blocked,
        }

    def lazily(self) -> dict[str, Any]:
        self._drop_device()
        ours = Ours(self._card, self.store, "lazy")
        try:
            self._warm_up(ours)
            return self._cycles(ours, self._options.rounds)
        finally:
            ours.close()

    def stock(self) -> dict[str, Any]:
        self._drop_device()
        peer = Stock(self._card, self._root / "stock")
        try:
            begin = time.perf_counter()
            pending = peer.begin(self.trainer.state())
            if pending.before_optimizer is not None:
                pending.before_optimizer()
            pending.wait()
            first_s = time.perf_counter() - begin
            peer.settle()
            self.trainer.window(2)
            return {"first_s": first_s, **self._cycles(peer, self._options.rounds)}
        finally:
            peer.close()

    def close(self) -> None:
        self._drop_device()
        if self._store is not None:
            self._store.close()


def rows_of(big: Big) -> list[tuple[str, Any, float, float]]:
    """Return each row's name, its function, and the most and the least seconds for it."""
    return [
        ("limits", big.find_limits, 60, 1),
        ("training", big.train, 60, 5),
        ("first save", big.first_save, 60, 10),
        ("device", big.to_device, 150, 20),
        ("second save", big.second_save, 60, 10),
        ("rollback", big.rollback, 60, 8),
        ("load", big.load, 60, 8),
        ("ram", big.to_ram, 60, 10),
        ("stock", big.stock, 120, 15),
        ("lazy", big.lazily, 90, 10),
    ]
