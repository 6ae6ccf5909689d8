"""Pause Python's garbage collector while many objects are created that stay, or all go soon.

They would set off a collection of all generations, which stops all threads. With torch imported it takes 0.2 s.
`untied` keeps an error from being garbage that only the collector finds.
"""

from __future__ import annotations

import gc
import threading
from types import TracebackType

from tierfs._fork import renew_in_children
from tierfs.threads import start_daemon

__all__ = ["Uncollected", "untied"]


class Uncollected:
    """Nothing is collected until `end`, or until a ``with`` block of it ends. Several may overlap, on any threads.

    What the program says meanwhile with ``gc.disable()`` is undone in the end; collections that it asks for are done. A child
    that is forked meanwhile collects.

    Args:
        seconds: After so many nothing is put off any more, where it is not sure that `end` is called.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._is_off = True
        self._ended = threading.Event()
        self._epoch = _switch.turn_off()
        try:
            ends_late = seconds is None or start_daemon(self._end_after, seconds, name="uncollected") is not None
        except BaseException:
            self.end()
            raise
        if not ends_late:
            self.end()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Put nothing off any more. May be called twice."""
        with _switch.lock:
            if not self._is_off:
                return
            self._is_off = False
            _switch.turn_on(self._epoch)
        self._ended.set()

    def _end_after(self, seconds: float) -> None:
        if not self._ended.wait(seconds):
            self.end()


class _Switch:
    """Off while somebody has it off.

    Attributes:
        lock: A handler of signals may take it within its own thread. Whatever that or a fork comes in between of, it is not off
            without being counted.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._epoch = 0  # of this process: what was begun in its parent does not end here
        self._count = 0
        self._was_enabled = False
        renew_in_children(self)

    def turn_off(self) -> int:
        with self.lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
            self._count += 1
            if self._count == 1:
                gc.disable()
            return self._epoch

    def turn_on(self, epoch: int) -> None:
        with self.lock:
            if epoch != self._epoch:
                return
            if self._count == 1 and self._was_enabled:
                gc.enable()
            self._count -= 1

    def _renew(self) -> None:
        self.lock = threading.RLock()
        self._epoch += 1
        if self._count and self._was_enabled:
            gc.enable()
        self._count = 0


_switch = _Switch()


def untied(error: BaseException) -> BaseException:
    """Return ``error`` after taking the context managers that are generators out of its traceback.

    A context manager that raises another error in place of ``error`` calls this. From Python 3.12 on, the frame of a generator
    leads back to contextlib's frame, which holds ``error``. That is a cycle: whatever the frames of the traceback hold, such as
    memory that was lent to a call, would stay until the garbage collector runs.
    """
    chained: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chained:
        each = chained.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _without_generators(each.__traceback__)
            chained += [each.__cause__, each.__context__]
    return error


def _without_generators(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        caller = trace.tb_frame.f_back
        if caller is None or caller.f_globals.get("__name__") != "contextlib":
            kept.append(trace)
        trace = trace.tb_next
    rest = None
    for trace in reversed(kept):
        trace.tb_next = rest
        rest = trace
    return rest
