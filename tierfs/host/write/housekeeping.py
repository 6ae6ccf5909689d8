"""A thread of a process that writes: makes room in the ram tier ahead of need, and releases claimed memory."""

from __future__ import annotations

import threading
import weakref

from tierfs.host.slab.ram import RamTier
from tierfs.threads import start_daemon

HOUSEKEEPING_S = 1.0


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
