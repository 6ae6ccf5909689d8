"""The device tier: copies of a rank's state in GPU memory that the user granted, the newest two where the budget allows.

A snapshot is a device-to-device copy on the current stream: it is ordered behind the step before and ahead of the step
after, so training goes on at once and nothing has to be fenced. What lies in a snapshot alone survives nothing: its level
is ``none`` until the drain has brought it to the ram tier.
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

__all__ = ["DeviceTier", "Generation", "Spot", "device_tiers"]

ALIGN_BYTES = 4096
GENERATIONS = 2


class Spot(NamedTuple):
    """Where a tensor lies in a generation: offset in bytes, dtype, shape."""

    at: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(slots=True, eq=False)
class Generation:
    """One snapshot's memory.

    Attributes:
        memory: Device memory, uint8 of one dimension.
        is_busy: Whether a save or a rollback uses it; then no other snapshot is put there.
        taken_s: When the snapshot was taken, on the monotonic clock; ``None`` while it holds none.
        drained: Whether the ram tier has all of it.
        owner: Whose snapshot it holds.
        save_id: The save that it was published as; empty until then.
        digests: Its blocks', in order, as they were before the bytes left the device; empty where CuPy is missing.
        blocks: Address and length of each block.
        items: For what was published, its place: see `DeviceTier.publish`.
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
        """The tensor at a place: contiguous, on the device, a view of this generation's memory."""
        length = spot.shape.numel() * spot.dtype.itemsize
        return self.memory[spot.at : spot.at + length].view(spot.dtype).view(spot.shape)

    def forget(self) -> None:
        """Note that its bytes are being replaced."""
        self.taken_s, self.drained, self.owner, self.save_id = None, False, None, ""
        self.digests, self.blocks, self.items = b"", ((), ()), {}


class DeviceTier:
    """Snapshots in GPU memory. Safe for use by many threads.

    The memory is one slab from torch's allocator, taken at the first snapshot and kept. A state that does not fit the
    budget, and a GPU without so much memory left, are refused: the caller then copies to the ram tier.

    Args:
        budget_bytes: The most GPU memory to use. With room for two states, a snapshot is taken while the one before
            drains.
        accelerator: The GPU.

    Attributes:
        budget_bytes: As given.
        accelerator: As given.
    """

    def __init__(self, budget_bytes: int, accelerator: Accelerator) -> None:
        self.budget_bytes = budget_bytes
        self.accelerator = accelerator
        self._lock = threading.Lock()
        self._generations: list[Generation] = []
        self._length = 0
        self._refused = 0  # the length for which there was no memory
        _live.add(self)

    def __repr__(self) -> str:
        return (
            f"DeviceTier(budget={format_bytes(self.budget_bytes)}, {len(self._generations)} generations of "
            f"{format_bytes(self._length)}, {self.accelerator!r})"
        )

    @property
    def used_bytes(self) -> int:
        """How much GPU memory the slab takes."""
        return len(self._generations) * self._length

    def take(self, length: int, owner: object) -> Generation:
        """Take the generation with the oldest snapshot, to be filled on the current stream; `give` ends that.

        Args:
            length: Bytes that the snapshot needs.
            owner: Whose snapshot it will hold.

        Raises:
            CapacityError: The budget or the GPU has no room for it, or every generation is in use.
        """
        with self._lock:
            if length > self._length:
                self._grow(-(-length // ALIGN_BYTES) * ALIGN_BYTES)
            free = [generation for generation in self._generations if not generation.is_busy]
            if not free:
                raise CapacityError(
                    f"all {len(self._generations)} generations of the device tier are still being drained: save less often, or "
                    "raise device= (TIERFS_DEVICE)",
                    tier="device",
                )
            oldest = min(free, key=lambda generation: generation.taken_s or 0.0)
            oldest.forget()
            oldest.is_busy, oldest.owner = True, owner
            return oldest

    def _grow(self, length: int) -> None:
        count = min(self.budget_bytes // length, GENERATIONS)
        if not count:
            raise CapacityError(
                f"a snapshot of {format_bytes(length)} does not fit the device tier's budget of "
                f"{format_bytes(self.budget_bytes)}: raise device= (TIERFS_DEVICE)",
                tier="device",
            )
        if any(generation.is_busy for generation in self._generations):
            raise CapacityError(
                "the state has grown, and a snapshot of the smaller one is still being drained", tier="device"
            )
        if self._refused and length >= self._refused:
            raise CapacityError("the GPU had no memory for the device tier before", tier="device")
        self._generations, self._length = [], 0  # before the new one is taken
        try:
            slab = self.accelerator.allocate(count * length)
        except CapacityError:
            self._refused = length
            raise
        self._length = length
        self._generations = [Generation(slab[at * length : (at + 1) * length]) for at in range(count)]

    def give(self, generation: Generation, *, drained: bool) -> None:
        """End the use of a generation that `take` or `hold` gave.

        Args:
            generation: Which.
            drained: Whether it holds a whole snapshot that the ram tier has, too. Otherwise it holds nothing.
        """
        with self._lock:
            generation.is_busy = False
            generation.drained = drained
            if not drained:
                generation.forget()

    def publish(self, owner: object, save_id: str, items: dict[Any, Spot]) -> None:
        """Note which save a snapshot was published as, and the place of each of the save's items that lies in it.

        Nothing is noted where the snapshot was replaced meanwhile.
        """
        with self._lock:
            for generation in (one for one in self._generations if one.owner is owner):
                generation.save_id, generation.items = save_id, items

    def hold(self, save_id: str) -> Generation | None:
        """The snapshot of a save, kept from being replaced until `give`; ``None`` if it lies here no more."""
        with self._lock:
            for generation in self._generations:
                if generation.drained and not generation.is_busy and save_id and generation.save_id == save_id:
                    generation.is_busy = True
                    return generation
        return None

    def is_intact(self, generation: Generation) -> bool:
        """Whether a generation's bytes are those of its snapshot: hashed now, on the current stream.

        ``False`` where there are no digests to compare with.
        """
        if not generation.digests:
            return False
        addresses, lengths = generation.blocks
        accelerator = self.accelerator
        return accelerator.hash(accelerator.current(), addresses, lengths) == generation.digests

    def status(self) -> dict[str, Any]:
        """The content of the tier, as plain values; see `tierfs status`."""
        now = time.monotonic()
        taken = [generation.taken_s for generation in self._generations if generation.taken_s is not None]
        return {
            "device": self.accelerator.name,
            "budget_bytes": self.budget_bytes,
            "used_bytes": self.used_bytes,
            "generations": len(self._generations),
            "snapshots": len(taken),
            "newest_age_s": round(now - max(taken), 3) if taken else None,
        }


_live: weakref.WeakSet[DeviceTier] = weakref.WeakSet()


def device_tiers() -> list[DeviceTier]:
    """The device tiers of this process."""
    return list(_live)
