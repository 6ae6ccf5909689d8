"""The device tier: copies of a rank's state in GPU memory within a budget of the user, the newest two if they fit.

A snapshot is a device-to-device copy on the current stream. It runs after the previous step and before the
next one, so training continues at once and needs no fence. A snapshot survives no crash: its level is
``none`` until the drain has copied it to the ram tier.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tierfs.device.accelerator import Accelerator
from tierfs.errors import CapacityError
from tierfs.units import format_bytes

ALIGN_BYTES = 4096
GENERATIONS = 2


class Spot(NamedTuple):
    """The place of a tensor in a generation: offset in bytes, dtype and shape."""

    at: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(slots=True, eq=False)
class Generation:
    """The memory of one snapshot.

    Attributes:
        memory: Device memory, uint8 of one dimension.
        is_busy: Whether a save or a rollback uses the generation. No other snapshot replaces it then.
        taken_s: When the snapshot was taken, in seconds of the monotonic clock. ``None`` if there is no snapshot.
        drained: Whether the ram tier has the whole snapshot.
        owner: The object that took the snapshot.
        save_id: The save that published the snapshot. Empty until then.
        digests: The digests of the blocks in order, computed before the bytes leave the device. Empty without CuPy.
        blocks: Addresses of the blocks, and their lengths.
        items: The place of each published item. See `DeviceTier.publish`.
    """

    memory: torch.Tensor
    is_busy: bool = False
    taken_s: float | None = None
    drained: bool = False
    owner: object = None
    save_id: str = ""
    digests: bytes = b""
    blocks: tuple[Any, Any] = ((), ())
    items: dict[Any, Spot] = field(default_factory=dict)

    def tensor(self, spot: Spot) -> torch.Tensor:
        """Return the tensor at a place: a contiguous view of this generation's device memory."""
        length = spot.shape.numel() * spot.dtype.itemsize
        return self.memory[spot.at : spot.at + length].view(spot.dtype).view(spot.shape)

    def forget(self) -> None:
        """Reset all fields that describe a snapshot, because its bytes are being replaced."""
        self.taken_s, self.drained, self.owner, self.save_id = None, False, None, ""
        self.digests, self.blocks, self.items = b"", ((), ()), {}


class DeviceTier:
    """Snapshots in GPU memory. Thread-safe.

    The memory is one slab from torch's allocator, allocated at the first snapshot and kept. If a state exceeds the
    budget or the free memory of the GPU, `take` raises, and the caller copies to the ram tier.

    Args:
        budget_bytes: The most GPU memory to use. With room for two states, a new snapshot can be taken while the
            previous one drains.
    """

    def __init__(self, budget_bytes: int, accelerator: Accelerator) -> None:
        self.budget_bytes = budget_bytes
        self.accelerator = accelerator
        self._lock = threading.Lock()
        self.generations: list[Generation] = []
        self._length = 0
        self._refused = 0  # the length that could not be allocated
        _live.add(self)

    def __repr__(self) -> str:
        return (
            f"DeviceTier(budget={format_bytes(self.budget_bytes)}, {len(self.generations)} generations of "
            f"{format_bytes(self._length)}, {self.accelerator!r})"
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of GPU memory that the slab takes."""
        return len(self.generations) * self._length

    def take(self, length: int, owner: object) -> Generation:
        """Reserve the generation with the oldest snapshot. The caller fills it on the current stream, and calls `give`.

        Args:
            length: Bytes that the snapshot needs.
            owner: The object that takes the snapshot.

        Raises:
            CapacityError: The budget or the GPU has no room for the snapshot, or every generation is in use.
        """
        with self._lock:
            if length > self._length:
                self._grow(-(-length // ALIGN_BYTES) * ALIGN_BYTES)
            free = [generation for generation in self.generations if not generation.is_busy]
            if not free:
                raise CapacityError(
                    f"all {len(self.generations)} generations of the device tier are still being drained: save less often, or "
                    "raise device= (TIERFS_DEVICE)",
                    tier="device",
                )
            oldest = min(free, key=lambda generation: generation.taken_s or 0.0)
            oldest.forget()
            oldest.is_busy, oldest.owner = True, owner
            return oldest

    def _grow(self, length: int, count_max: int = GENERATIONS) -> None:
        count = min(self.budget_bytes // length, count_max)
        if not count:
            raise CapacityError(
                f"a snapshot of {format_bytes(length)} does not fit the device tier's budget of "
                f"{format_bytes(self.budget_bytes)}: raise device= (TIERFS_DEVICE)",
                tier="device",
            )
        if any(generation.is_busy for generation in self.generations):
            raise CapacityError(
                "the state has grown, and a snapshot of the smaller one is still being drained", tier="device"
            )
        if self._refused and length >= self._refused:
            raise CapacityError("the GPU had no memory for the device tier in an earlier save", tier="device")
        # Release the old slab before allocating the new one. Transfers that ended refer to its generations.
        for generation in self.generations:
            generation.memory = torch.empty(0, dtype=torch.uint8)
        self.generations, self._length = [], 0
        try:
            slab = self.accelerator.allocate(count * length)
        except CapacityError:
            if count == 1:
                self._refused = length
                raise
            self._grow(length, count - 1)
            return
        self._length = length
        self.generations = [Generation(slab[at * length : (at + 1) * length]) for at in range(count)]

    def give(self, generation: Generation, *, drained: bool) -> None:
        """End the use of a generation that `take` or `hold` returned.

        Args:
            generation: The generation.
            drained: Whether it holds a whole snapshot that the ram tier also has. If not, the snapshot is dropped.
        """
        with self._lock:
            generation.is_busy = False
            generation.drained = drained
            if not drained:
                generation.forget()

    def publish(self, owner: object, save_id: str, items: dict[Any, Spot]) -> None:
        """Record the save that published a snapshot, and the places of the save's items in it.

        If the snapshot was replaced in the meantime, nothing is recorded.
        """
        with self._lock:
            for generation in (one for one in self.generations if one.owner is owner):
                generation.save_id, generation.items = save_id, items

    def hold(self, save_id: str) -> Generation | None:
        """Reserve the snapshot of a save until `give`, so that it is not replaced. ``None`` if it is gone or in use."""
        with self._lock:
            for generation in self.generations:
                if generation.drained and not generation.is_busy and save_id and generation.save_id == save_id:
                    generation.is_busy = True
                    return generation
        return None

    def is_intact(self, generation: Generation) -> bool:
        """Hash a generation on the current stream, and return whether the digests are those of its snapshot.

        Returns ``False`` if the generation has no digests to compare with.
        """
        if not generation.digests:
            return False
        addresses, lengths = generation.blocks
        accelerator = self.accelerator
        return accelerator.hash(accelerator.current(), addresses, lengths)() == generation.digests

    def status(self) -> dict[str, Any]:
        """Return the state of the tier as plain values, for ``tierfs status``."""
        now = time.monotonic()
        taken = [generation.taken_s for generation in self.generations if generation.taken_s is not None]
        return {
            "device": self.accelerator.name,
            "budget_bytes": self.budget_bytes,
            "used_bytes": self.used_bytes,
            "generations": len(self.generations),
            "snapshots": len(taken),
            "newest_age_s": round(now - max(taken), 3) if taken else None,
        }


_live: weakref.WeakSet[DeviceTier] = weakref.WeakSet()


def device_tiers() -> list[DeviceTier]:
    """Return the device tiers of this process."""
    return list(_live)
