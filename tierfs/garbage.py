"""Puts the collection of garbage off while objects are made by the ten thousand, that stay or all go soon.

They would set off a collection of all generations. A process that has imported torch spends 0.2 s in that, all its threads with it.
"""

from __future__ import annotations

import gc
import threading

from tierfs.daemons import start_daemon
from tierfs.forks import renew_in_children

__all__ = ["Uncollected"]


class Uncollected:
    """Nothing is collected until `end`, or until a ``with`` block of it ends. Several may overlap, on any threads.

    What the program says meanwhile with ``gc.disable()`` is undone in the end; collections that it asks for are done. A child
    that is forked meanwhile collects.

    Args:
        seconds: After so many nothing is put off any more, where it is not sure that `end` is called.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._epoch = _switch.turn_off()
        if seconds is not None and start_daemon(self._end_after, seconds, name="uncollected") is None:
            self.end()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Put nothing off any more. May be called twice."""
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                _switch.turn_on(self._epoch)

    def _end_after(self, seconds: float) -> None:
        if not self._ended.wait(seconds):
            self.end()


class _Switch:
    """Off while somebody has it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0  # of this process: what was begun in its parent does not end here
        self._count = 0
        self._was_enabled = False
        renew_in_children(self)

    def turn_off(self) -> int:
        with self._lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1
            return self._epoch

    def turn_on(self, epoch: int) -> None:
        with self._lock:
            if epoch != self._epoch:
                return
            self._count -= 1
            if not self._count and self._was_enabled:
                gc.enable()

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._epoch += 1
        if self._count and self._was_enabled:
            gc.enable()
        self._count = 0


_switch = _Switch()
