"""Page-locked host memory. Each region of this process is registered with the GPU once, and released before unmapping.

Copies between the GPU and pageable memory run at a fraction of the link's speed and block the calling thread.
Registration takes about a second per 10 GB, so regions stay registered from save to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tierfs.device.accelerator import Accelerator
from tierfs.errors import TierfsError

PIN_BYTES_MAX = 64 << 30
"""Registrations of more than this in one call fail on some drivers."""


class _Pin(NamedTuple):
    memory: torch.Tensor | None  # None: it is pageable, or other code registered it
    is_used: Callable[[], bool]


class Pins:
    """The registered regions of one process and GPU. Not thread-safe; no copy to a region may be in flight.

    A registration keeps the region mapped until `sweep` finds that it is no longer used.

    Attributes:
        failed: Number of regions that could not be registered, and are used as pageable memory.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._regions: dict[str, _Pin] = {}
        self.failed = 0

    def __repr__(self) -> str:
        return f"Pins({self.registered_bytes} bytes, failed={self.failed})"

    @property
    def registered_bytes(self) -> int:
        """Number of registered bytes."""
        return sum(region.memory.numel() for region in list(self._regions.values()) if region.memory is not None)

    def add(
        self,
        key: str,
        memory: Callable[[], memoryview],
        is_used: Callable[[], bool],
        fall_back: Callable[[str, str], None],
    ) -> None:
        """Register a region, unless it was registered or refused before.

        Args:
            key: Unique name of the region. It is never reused for another one.
            memory: Returns the whole region, writable. The registration keeps a reference to it.
            is_used: Returns whether any code still writes to the region.
            fall_back: Called with a name and a message if the region cannot be registered.
        """
        if key in self._regions:
            return
        whole = torch.frombuffer(memory(), dtype=torch.uint8)
        pinned: torch.Tensor | None = None
        try:
            if not self._accelerator.is_pinned(whole):
                self._pin(whole)
                pinned = whole
        except (TierfsError, RuntimeError) as error:
            self.failed += 1
            fall_back(
                "unpinned",
                "host memory cannot be registered with the GPU, so copies to it are slow and block their thread: "
                f"{error}; raise the limit on locked memory (ulimit -l)",
            )
        self._regions[key] = _Pin(pinned, is_used)

    def sweep(self) -> None:
        """Release the regions that are no longer used."""
        for key in [key for key, region in self._regions.items() if not region.is_used()]:
            region = self._regions.pop(key)
            if region.memory is not None:
                for piece in region.memory.split(PIN_BYTES_MAX):
                    self._accelerator.unpin(piece)

    def _pin(self, whole: torch.Tensor) -> None:
        done: list[torch.Tensor] = []
        try:
            for piece in whole.split(PIN_BYTES_MAX):
                self._accelerator.pin(piece)
                done.append(piece)
        except BaseException:
            for piece in done:
                self._accelerator.unpin(piece)
            raise
