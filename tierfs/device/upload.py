"""Page-locked buffers for loads. Bytes are read into one set of buffers while the other set is copied to the GPU."""

from __future__ import annotations

import torch

from tierfs.device.accelerator import Accelerator, Event
from tierfs.digest import CHUNK_BYTES
from tierfs.threads import processors


class Uploads:
    """Two sets of buffers of one chunk each: one is filled while the other is copied. Not thread-safe.

    Args:
        accelerator: The GPU that receives the bytes.
        length: Most bytes that will be copied. Few bytes take few buffers.

    Attributes:
        count: Number of buffers in a set.
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
        """Return a buffer of the set that is being filled. ``None`` if all its buffers are in use."""
        if self._used == self.count:
            return None
        event = self._events[0]
        if event is not None:  # copies from this set may still be in flight
            event.synchronize()
            self._events[0] = None
        begin = self._used * CHUNK_BYTES
        self._used += 1
        return memoryview(self._sets[0][begin : begin + CHUNK_BYTES].numpy())

    def swap(self) -> None:
        """Switch to the other set. Call it once the copies from all lent buffers are queued on the current stream."""
        if self._used:
            self._events[0] = self.accelerator.record(self.accelerator.current())
            self._sets.reverse()
            self._events.reverse()
            self._used = 0

    def finish(self) -> None:
        for event in self._events:
            if event is not None:
                event.synchronize()

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from a tensor in a lent buffer to the device. The dtype is converted."""
        with torch.no_grad():
            self.accelerator.send(target, source)
