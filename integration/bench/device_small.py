"""Rows of `device.py` that need little memory: kernels, bit-identity, and whether fifty saves leak memory."""

from __future__ import annotations

import contextlib
import os
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from device_card import Card, limits, seconds
from device_saving import Ours, Store
from device_training import Trainer
from torch.nn.attention import SDPBackend, sdpa_kernel

from tierfs.dcp import TierLoadPlanner, TierReader
from tierfs.device.kernel_launch import cut_blocks
from tierfs.digest import BLOCK_BYTES, DigestKind, hash_bytes

MODES = ("device", "lazy", "ram")
SAVES = 50
WARM_SAVES = 10  # after which memory must not grow
SAVE_EVERY = 3
STEPS = 24


class Small:
    """The rows of this module.

    Args:
        card: The GPU.
        root: A directory on the disk to use.
        dry: Whether sizes are tiny.
    """

    def __init__(self, card: Card, root: Path, *, dry: bool) -> None:
        self._card, self._root, self._dry = card, root, dry
        self.limits: dict[str, Any] = {}

    def find_limits(self) -> dict[str, Any]:
        self.limits = limits(self._card, (8 << 20) if self._dry else 4_000_000_000)
        return dict(self.limits)

    # -- kernels -------------------------------------------------------------------------------------------------------

    def digests(self) -> dict[str, Any]:
        """Measure bytes per second by size. A call includes the transfer of the table of addresses to the GPU."""
        sizes = (3 << 20, 1 << 20) if self._dry else (4_000_000_000, 1_000_000_000, 256_000_000, 64_000_000)
        data = self._card.noise(sizes[0])
        found: dict[str, Any] = {"read": self.limits.get("read")}
        for size in sizes:
            blocks = cut_blocks(data.data_ptr(), size)
            digests = self._card.hash(*blocks).cpu()
            for number in random.Random(1).sample(range(len(blocks[0])), min(16, len(blocks[0]))):
                at = number * BLOCK_BYTES
                block = data[at : at + int(blocks[1][number])].cpu().numpy().tobytes()
                expected = hash_bytes(DigestKind.XXH3_128, block)
                assert bytes(digests[number].numpy()) == expected, f"digest of block {number} is wrong"
            found[str(size)] = size / seconds(self._card, lambda blocks=blocks: self._card.hash(*blocks), each=4)
        found["value"] = found[str(sizes[0])]
        return found

    # -- bits ----------------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Check that training ends the same with and without saves, and that a save holds the state before the step."""
        torch.use_deterministic_algorithms(True)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                plain = self._trained(None)
                again = self._trained(None)
                found = {"two runs without a save are equal": _same(plain, again)}
                for mode in MODES:
                    with self._store(512 << 20) as store:
                        found |= self._saved(mode, store, plain)
        finally:
            torch.use_deterministic_algorithms(False)
        return {**found, "value": all(found.values())}

    def _trainer(self) -> Trainer:
        size, layers, batch, length = (2 << 20, 1, 1, 16) if self._dry else (80 << 20, 4, 4, 128)
        return Trainer(self._card, size, layers=layers, batch=batch, length=length, mixed=False)

    def _trained(self, ours: Ours | None) -> list[torch.Tensor]:
        trainer = self._trainer()
        pending = None
        for number in range(STEPS):
            trainer.step()
            if ours is not None and number % SAVE_EVERY == 0:
                if pending is not None:
                    pending.wait()
                pending = ours.begin(trainer.state())
        if pending is not None:
            pending.wait()
        return trainer.tensors()

    def _saved(self, mode: str, store: Store, plain: list[torch.Tensor]) -> dict[str, bool]:
        ours = Ours(self._card, store, mode, 1 << 30 if mode == "device" else None)
        found = {f"{mode}: trained with saves": _same(self._trained(ours), plain)}
        trainer = self._trainer()
        trainer.step()
        before = [tensor.clone() for tensor in trainer.tensors()]
        pending = ours.begin(trainer.state())
        trainer.step()
        pending.wait()
        assert not _same(trainer.tensors(), before), "the step changed nothing"
        target = self._trainer()  # at another step; loaded in place
        reader = self._load(store, ours.url(), target.state())
        found[f"{mode}: is of before the step"] = _same(target.tensors(), before)
        if mode == "device":
            found["device: was loaded from the device tier"] = bool(getattr(reader, "device_bytes", 0))
        url = ours.url()
        ours.settle()
        ours.close()
        target = self._trainer()
        reader = self._load(store, url, target.state())
        if getattr(reader, "device_bytes", 0) == 0:
            found[f"{mode}: is of before the step, from ram"] = _same(target.tensors(), before)
        return found

    @staticmethod
    def _load(store: Store, url: str, state: dict[str, Any]) -> TierReader:
        reader = TierReader(url, **store.options)
        dcp.load(state, storage_reader=reader, planner=TierLoadPlanner())
        return reader

    # -- leaks ---------------------------------------------------------------------------------------------------------

    def flat(self) -> dict[str, Any]:
        """Measure memory by the number of saves. A quarter of the state changes before each save."""
        size = (4 << 20) if self._dry else (512 << 20)
        tensors = [self._card.own(self._card.noise(size // 64).view(torch.float32)) for _ in range(64)]
        state = {f"tensor.{number}": tensor for number, tensor in enumerate(tensors)}
        rows: dict[int, dict[str, int]] = {}
        with self._store(3 * size + (64 << 20)) as store:
            ours = Ours(self._card, store, "device", 2 * size + (16 << 20))
            for number in range(1, SAVES + 1):
                for tensor in tensors[number % 4 :: 4]:
                    tensor.view(torch.int32).bitwise_xor_(number)
                ours.begin(state).wait()
                if number % 5 == 0:
                    ours.settle()
                if number in {1, WARM_SAVES} or number % 10 == 0:
                    self._card.synchronize()
                    rows[number] = {**_resident(), **self._card.memory()}
                    report = ours.report()
                    rows[number] |= {key: report.get(key) for key in ("registered_bytes", "used_bytes", "unpinned")}
            report = ours.report()
            ours.close()
        warm, last = rows[WARM_SAVES], rows[SAVES]
        growth = {key: last[key] - warm[key] for key in warm if last[key] is not None and warm[key] is not None}
        return {"saves": SAVES, "bytes": size, "growth": growth, "by_saves": rows, "device": report, "value": growth}

    @contextlib.contextmanager
    def _store(self, ram: int):
        store = Store(Path(tempfile.mkdtemp(prefix="store-", dir=self._root)), ram)
        try:
            yield store
        finally:
            store.close()


def _same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
        for one, other in zip(ones, others, strict=True)
    )


def _resident() -> dict[str, int]:
    with open("/proc/self/status", encoding="ascii") as file:
        found = re.findall(r"^(RssAnon|RssShmem|RssFile):\s+(\d+)", file.read(), re.MULTILINE)
    descriptors = len(os.listdir("/proc/self/fd"))
    return {**{name: int(kib) << 10 for name, kib in found}, "descriptors": descriptors}


def rows_of(small: Small) -> list[tuple[str, Any, float, float]]:
    """Return each row's name, its function, and the most and the least seconds for it."""
    return [
        ("limits", small.find_limits, 60, 1),
        ("digest", small.digests, 40, 3),
        ("identity", small.identity, 90, 10),
        ("flat", small.flat, 90, 15),
    ]
