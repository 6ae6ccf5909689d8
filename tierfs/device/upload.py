"""Page-locked buffers from which a load copies to a GPU while the next bytes are read into the others."""

from __future__ import annotations

import torch

from tierfs.device.accelerator import Accelerator, Event
from tierfs.digest import CHUNK_BYTES
from tierfs.processors import processors

__all__ = ["Uploads"]


class Uploads:
    """Two sets of buffers of one chunk each: one is filled while the other one is copied. For one thread.

    Args:
        accelerator: Where the bytes go.
        length: How many there will be, at most: for few bytes, few buffers are taken.

    Attributes:
        accelerator: As given.
        count: Buffers of a set.
    """

    def __init__(self, accelerator: Accelerator, length: int) -> None:
        self.accelerator = accelerator
        self.count = max(1, min(processors().count, -(-length // (2 * CHUNK_BYTES))))
        memory = accelerator.host_memory(2 * self.count * CHUNK_BYTES)
        self._sets = [memory[: self.count * CHUNK_BYTES], memory[self.count * CHUNK_BYTES :]]
        self._events: list[Event | None] = [None, None]
        self._used = 0

    def __repr__(self) -> str:
        return f"Uploads({self.accelerator!r}, count={self.count})"

    def lend(self) -> memoryview | None:
        """A buffer of the set that is being filled; ``None`` when all of it is in use."""
        if self._used == self.count:
            return None
        event = self._events[0]
        if event is not None:  # copies from this set may still be under way
            event.synchronize()
            self._events[0] = None
        begin = self._used * CHUNK_BYTES
        self._used += 1
        return memoryview(self._sets[0][begin : begin + CHUNK_BYTES].numpy())

    def swap(self) -> None:
        """Note that copies from all lent buffers are queued on the current stream, and go on with the other set."""
        if self._used:
            self._events[0] = self.accelerator.record(self.accelerator.current())
            self._sets.reverse()
            self._events.reverse()
            self._used = 0

    def finish(self) -> None:
        """Wait for all copies."""
        for event in self._events:
            if event is not None:
                event.synchronize()

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of a tensor that lies in a lent buffer, converting the dtype."""
        with torch.no_grad():
            self.accelerator.send(target, source)
