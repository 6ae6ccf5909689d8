"""Copies remotely read chunks to the nvme tier in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from tierfs.errors import TierfsError
from tierfs.host.slab.segment import Slot
from tierfs.threads import start_daemon

QUEUE_MAX = 256
BATCH_MAX = 64
_logger = logging.getLogger("tierfs.flush")


class Backfill:
    """A queue of clean chunks in slabs, and a thread that calls ``keep`` with them while there are any.

    ``keep`` asks the flusher to copy them to the nvme tier. Only a cache is filled: if the thread cannot keep
    up, the oldest queued chunks are dropped.
    """

    def __init__(self, keep: Callable[[Sequence[Slot]], None]) -> None:
        self._keep = keep
        self.failures = 0
        self._lock = threading.Lock()
        self._queue: deque[Slot] = deque(maxlen=QUEUE_MAX)
        self._running = False

    def __repr__(self) -> str:
        return f"Backfill({len(self._queue)}/{QUEUE_MAX} queued, failures={self.failures})"

    def add(self, slot: Slot) -> None:
        with self._lock:
            self._queue.append(slot)
            if not self._running:
                self._running = start_daemon(self._run, name="backfill") is not None

    def _run(self) -> None:
        while True:
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]
                if not batch:
                    self._running = False
                    return
            try:
                self._keep(batch)
            except (TierfsError, TimeoutError) as error:
                self.failures += 1
                if self.failures == 1:
                    _logger.warning("chunks that were read are not copied to the nvme tier: %s", error)
