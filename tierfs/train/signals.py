"""`Signals`: handlers of signals that announce the end of this process. A handler only notes its signal.

The workers of a data loader outlive these signals: their parent needs them until it has saved.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable
from types import FrameType
from typing import Any

from tierfs.errors import InvalidInputError
from tierfs.threads import start_daemon

_logger = logging.getLogger("tierfs.train")


class Signals:
    """Handles signals until `close`, and also calls the previous handlers.

    Python lets only the main thread set handlers. On another thread, this logs a warning and handles nothing.

    Raises:
        InvalidInputError: A signal is invalid or cannot be handled, such as SIGKILL. No handler is set then.

    Attributes:
        received: The number of the first signal that arrived; 0 for none.
        received_s: The time of its arrival by `time.monotonic`, in seconds.
        is_terminated: Whether SIGTERM arrived, first or later.
    """

    def __init__(self, wanted: Iterable[signal.Signals]) -> None:
        self.received = 0
        self.received_s = 0.0
        self.is_terminated = False
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._is_closed = False
        numbers = sorted(set(wanted))
        if not numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(number).name for number in numbers)
            _logger.warning("%s are not handled: the manager was not made on the main thread", names)
            return
        try:
            for number in numbers:
                self._before[number] = signal.signal(number, self._handle)
        except (OSError, ValueError) as error:
            self.close()
            raise InvalidInputError(f"signal {int(number)} cannot be handled: {error}") from error
        multiprocessing.util.register_after_fork(self, Signals._protect_worker)

    def __repr__(self) -> str:
        return f"Signals({sorted(self._before)}, received={self.received})"

    def close(self) -> None:
        """Restore the previous handlers, except where other code has set a handler since.

        That code may call this handler, or restore it. From now on it only passes signals on. Python lets no other
        thread than the main one restore handlers.
        """
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in list(self._before.items()):
            if signal.getsignal(number) == self._handle:
                # A handler that C code set reads as None, and Python cannot restore it.
                signal.signal(number, signal.SIG_DFL if before is None else before)
                del self._before[number]

    @property
    def _notes(self) -> bool:
        # A forked child inherits the handler, and nothing in it asks for the signal.
        return not self._is_closed and os.getpid() == self._pid

    def _protect_worker(self) -> None:
        """Let this process outlive the signals if it is a worker of a data loader. Called after a fork."""
        # torch starts its workers and those of torchdata with functions of this name. Nothing public tells a worker.
        target = getattr(multiprocessing.current_process(), "_target", None)
        if not self._is_closed and getattr(target, "__name__", "") == "_worker_loop":
            outlive_signals(numbers=self._before.keys())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._notes:
            self.is_terminated |= number == signal.SIGTERM
            if not self.received:
                self.received_s = time.monotonic()
                self.received = number
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before is not signal.SIG_IGN and not _is_taken(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def outlive_signals(_worker_id: int = 0, *, numbers: Collection[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
    """Let this process outlive signals to its process group. A ``worker_init_fn`` for workers that are no forks.

    SIGTERM from its parent still ends the process: so it is ended at the end of its parent.

    Args:
        _worker_id: Not used: torch passes it.
        numbers: The signals. The programs that this process starts do not get them, either.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def answer() -> None:
        parent = os.getppid()
        while True:
            found = signal.sigwaitinfo(numbers)
            if found.si_signo == signal.SIGTERM and found.si_pid == parent:
                os._exit(0)

    start_daemon(answer, name="worker-signals")


def _is_taken(number: int) -> bool:
    """Return whether a signal has a handler other than that of a closed or inherited `Signals`."""
    called = getattr(signal.getsignal(number), "__self__", None)
    return not isinstance(called, Signals) or called._notes
