"""Chunks of a large file are written to the nvme tier while the rest of it is being sealed. docs/decisions/0039."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tierfs.host.slab.segment import Slot
from tierfs.threads import start_daemon

__all__ = ["AHEAD_BYTES_MIN", "Ahead"]

AHEAD_BYTES_MIN = 64 << 20
"""So much of a file goes ahead of its draft at a time. Less is there before it would have been worth it."""


class Ahead:
    """Has a file's chunks written before its draft names them. Safe for use by many threads.

    While those that the flusher was told of are written, more are sealed, which it is told of next. Nothing relies on any of it: what
    is missing when the draft is sealed is written then.

    Args:
        tell: Has chunks written, of a file of which so many bytes are sealed; says whether more are to follow. May take long.
    """

    def __init__(self, tell: Callable[[Sequence[Slot], int], bool]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._sealed: list[Slot] = []  # and not told of
        self._waiting_bytes = self._all_bytes = 0
        self._is_telling = self._is_over = False

    def __repr__(self) -> str:
        return f"Ahead({self._all_bytes} bytes sealed, {self._waiting_bytes} not told of)"

    def add(self, slot: Slot) -> None:
        """Take note of a chunk that was sealed."""
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
        """Tell of nothing more: the draft does, or the file is discarded."""
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
