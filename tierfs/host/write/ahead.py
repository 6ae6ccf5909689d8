"""Threads of a process that writes, which work ahead of need.

One writes chunks of a large file to the nvme tier while the rest of the file is being sealed (docs/decisions/0039). The
other makes room in the ram tier, and releases claimed memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Slot
from tierfs.threads import start_daemon

AHEAD_BYTES_MIN = 64 << 20
"""Minimum bytes for one request. Fewer are not worth one: they arrive with the draft about as soon."""
HOUSEKEEPING_S = 1.0


class Ahead:
    """Asks for a file's chunks to be written before its draft names them. Thread-safe.

    While the flusher writes the chunks of one request, more are sealed, which the next request names. Nothing relies on
    this: chunks that are missing when the draft is sealed are written then.

    Args:
        tell: Asks for chunks to be written, given their slots and the bytes of the file sealed so far. Returns whether
            to ask again for further chunks. May take long.
    """

    def __init__(self, tell: Callable[[Sequence[Slot], int], bool]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._sealed: list[Slot] = []  # and not named in a request yet
        self._waiting_bytes = self._all_bytes = 0
        self._is_telling = self._is_over = False

    def __repr__(self) -> str:
        return f"Ahead({self._all_bytes} bytes sealed, {self._waiting_bytes} not told of)"

    def add(self, slot: Slot) -> None:
        """Add a chunk that was sealed."""
        with self._lock:
            self._sealed.append(slot)
            self._waiting_bytes += slot.length
            self._all_bytes += slot.length
            if self._is_telling or self._is_over or self._waiting_bytes < AHEAD_BYTES_MIN:
                return
            self._is_telling = True
        if start_daemon(self._tell_all, name="ahead") is None:
            self.end()

    def end(self) -> None:
        """Make no further requests: the draft is being sealed, or the file is discarded."""
        with self._lock:
            self._is_over = True
            self._sealed = []

    def _tell_all(self) -> None:
        while True:
            with self._lock:
                if self._is_over or self._waiting_bytes < AHEAD_BYTES_MIN:
                    self._is_telling = False
                    return
                slots, self._sealed, self._waiting_bytes = self._sealed, [], 0
                length = self._all_bytes
            if not self._tell(slots, length):
                self.end()


class Housekeeping:
    """Maintains the ram tier until ``ended`` is set or the tier is garbage-collected."""

    def __init__(self, ram: RamTier, ended: threading.Event) -> None:
        self._ram = weakref.ref(ram)
        self._ended = ended
        self._is_running = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Housekeeping(every {HOUSEKEEPING_S:g} s, running={self._is_running})"

    def begin(self) -> None:
        """Start the thread unless it runs."""
        with self._lock:
            if self._is_running:
                return
            self._is_running = start_daemon(_run, self._ram, self._ended, name="housekeeping") is not None


def _run(ram: weakref.ref[RamTier], ended: threading.Event) -> None:
    while not ended.wait(HOUSEKEEPING_S):
        tier = ram()
        if tier is None:
            return
        tier.grow_ahead()
        tier.evict_ahead()
        tier.give_back_claimed()
        del tier
