"""Pause Python's garbage collector while many objects are created that all stay, or all go soon.

They would trigger a collection of all generations, which stops all threads. With torch imported that takes 0.2 s.
`untied` breaks the cycles that keep an error's memory until the collector runs, and `detached` copies an error without
its frames.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
from types import TracebackType
from typing import TypeVar

from tierfs._fork import renew_in_children
from tierfs.threads import start_daemon

# Planning takes less, unless there are very many ranks or tensors. DCP does not tell a writer that planning failed.
PLANNING_S_MAX = 2.0
# By then DCP has dropped the plans of a save. A collection before that goes through all their objects.
LINGER_S = 0.2


class Uncollected:
    """Pauses the garbage collector until `end`, or until the ``with`` block ends. May overlap, on any threads.

    At the end, the collector is enabled if it was enabled before, even if the program called ``gc.disable()``
    meanwhile. Explicit collections still run. A child forked meanwhile has the collector enabled.

    Args:
        seconds: The pause ends after this time at the latest, for callers that may never call `end`; ``None`` for no
            limit.
        linger_s: A pause of limited time ends this many seconds after `end`, unless pauses have followed each other
            for long: then the collector has to run.
    """

    def __init__(self, seconds: float | None = None, *, linger_s: float = 0.0) -> None:
        self._is_off = True
        self._linger_s = linger_s
        self._ended = threading.Event()
        self._epoch = _switch.turn_off()
        try:
            ends_late = seconds is None or start_daemon(self._end_after, seconds, name="uncollected") is not None
        except BaseException:
            self._end_now()
            raise
        if not ends_late:
            self._end_now()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the pause. May be called twice."""
        if not self._linger_s or time.monotonic() - _switch.off_since > PLANNING_S_MAX:
            self._end_now()
        self._ended.set()

    def _end_now(self) -> None:
        with _switch.lock:
            if self._is_off:
                self._is_off = False
                _switch.turn_on(self._epoch)

    def _end_after(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            time.sleep(self._linger_s)
        self._end_now()


def planning(linger_s: float = 0.0) -> Uncollected:
    """Begin a pause for the time in which DCP plans a save or a load, and tierfs does it: two seconds at most.

    Plans of a thousand tensors are a hundred thousand objects: DCP creates each, pickles it for the coordinator, and
    unpickles it. A collection would block training for longer than the copy of its state. At the end they are gone:
    those of a save `LINGER_S` after tierfs's last part of it.
    """
    return Uncollected(PLANNING_S_MAX, linger_s=linger_s)


class _Switch:
    """Disables the collector while at least one pause is active.

    Attributes:
        off_since: When the first of the present pauses began.
        lock: Reentrant, because a signal handler may take it within the same thread. The collector is never disabled
            without being counted, even if a signal handler or a fork interrupts a call.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._epoch = 0  # counts forks, so that a pause of the parent does not end one of this process
        self._count = 0
        self._was_enabled = False
        self.off_since = 0.0
        renew_in_children(self)

    def turn_off(self) -> int:
        with self.lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
                self.off_since = time.monotonic()
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
    """Return ``error`` after removing generator-based context managers from its traceback.

    A context manager that raises another error in place of ``error`` calls this. From Python 3.12 on, the generator's
    frame leads back to contextlib's frame, which holds ``error``. Without this cycle, the objects in the traceback's
    frames, such as memory lent to a call, are freed at once and not when the garbage collector runs.
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


_E = TypeVar("_E", bound=BaseException)


def detached(error: _E) -> _E:
    """Copy an error and the chain of its causes, without frames. If an error cannot be copied, remove its frames.

    For an owner of host memory that keeps an error and raises it later. The frames refer to tensors in that memory, and
    the tensors refer to its owner. The garbage collector does not see these references, so an owner that kept the
    original error would live until the process ends.
    """
    causes: list[BaseException] = []
    cause = error.__cause__
    while cause is not None and cause is not error and not any(cause is known for known in causes):
        causes.append(cause)
        cause = cause.__cause__
    kept: BaseException | None = None
    for one in reversed(causes):
        kept = _with_cause(one, kept)
    return _with_cause(error, kept)


def _with_cause(error: _E, cause: BaseException | None) -> _E:
    # tblib, which Dask uses, makes copies with frames.
    made = _copy_of(error).with_traceback(None)
    made.__cause__ = cause
    made.__context__ = None
    return made


def _copy_of(error: _E) -> _E:
    with contextlib.suppress(Exception):  # an error may have any constructor
        made = copy.copy(error)
        if type(made) is type(error) and str(made) == str(error):
            return made
    with contextlib.suppress(Exception):
        # The constructor derived the message from its arguments. Do not call it again with that message.
        made = type(error).__new__(type(error), *error.args)
        made.__dict__.update(error.__dict__)
        if str(made) == str(error):
            return made
    return error
