"""Bounded threads for moving chunks; one set per process.

A task handed to these threads never hands another one to them and waits for it, so they cannot wait for each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from tierfs._fork import PerProcess

__all__ = ["Errand", "Transfers", "transfers"]

_In = TypeVar("_In")
_Out = TypeVar("_Out")

WORKERS = 16


class Errand(Generic[_In, _Out]):
    """A task that is done once, by whoever comes first: one that no thread could be started for stays in their queue.

    Attributes:
        future: Its result.
    """

    def __init__(self, task: Callable[[_In], _Out], argument: _In) -> None:
        self.future: Future[_Out] = Future()
        self._todo = [(task, argument)]

    def run(self) -> None:
        """Do it, unless somebody did."""
        try:
            task, argument = self._todo.pop()
        except IndexError:
            return
        try:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(task(argument))
        except BaseException as error:  # noqa: BLE001 - raised by who waits for the future
            self.future.set_exception(error)
            # The error knows this frame, and the future the error: without this, memory that is only lent would be kept.
            del self, task, argument

    def cancel(self) -> bool:
        """Have nobody begin it, and forget what it was lent. Returns whether nobody had."""
        is_cancelled = self.future.cancel()
        if is_cancelled:
            self._todo.clear()
        return is_cancelled


class Transfers:
    """Threads for requests to the object tier.

    Args:
        workers: Requests under way at once.
        name: The threads'.
    """

    def __init__(self, workers: int = WORKERS, *, name: str = "tierfs-transfer") -> None:
        self.workers = workers
        self._name = name
        # Garbage may be collected while it is held, and what is collected may end a file.
        self._lock = threading.RLock()
        self._places = threading.BoundedSemaphore(workers)
        self._executor: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"Transfers(workers={self.workers})"

    def submit(self, task: Callable[[_In], _Out], argument: _In) -> Future[_Out]:
        """Start ``task(argument)`` on one of the threads; at the interpreter's end, when they take no more, do it here."""
        errand = Errand(task, argument)
        self._start(errand)
        return errand.future

    def send(self, task: Callable[[_In], _Out], argument: _In) -> Future[_Out]:
        """Start ``task(argument)``, waiting first while as many as there are threads are on their way.

        So however many files are written at once, what is on its way takes no more memory than that.
        """
        self._places.acquire()
        try:
            future = self.submit(task, argument)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        return future

    def map(self, task: Callable[[_In], _Out], arguments: Iterable[_In]) -> list[_Out]:
        """Run ``task`` on every argument and return the results in order.

        If it is interrupted, no further task is begun, and those that were have ended when this raises: what they were lent is
        the caller's again. A request that hangs keeps the interrupt waiting for its timeout.

        Raises:
            BaseException: The first error of a task, after every task has ended.
        """
        items = list(arguments)
        if len(items) < 2:  # noqa: PLR2004 - one item needs no thread
            return [task(item) for item in items]
        errands = [Errand(task, item) for item in items]
        try:
            for errand in errands:
                self._start(errand)
            errors = [error for error in [errand.future.exception() for errand in errands] if error is not None]
        except BaseException:
            while not all(errand.future.done() for errand in errands):
                with contextlib.suppress(BaseException):  # another interrupt must not cut this one's wait short
                    wait([errand.future for errand in errands if not errand.cancel()])
            raise
        if errors:
            raise errors[0]
        return [errand.future.result() for errand in errands]

    def _start(self, errand: Errand[_In, _Out]) -> None:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix=self._name)
            try:
                self._executor.submit(errand.run)
            except RuntimeError:
                pass
            else:
                return
        errand.run()


transfers = PerProcess(Transfers)
"""This process's `Transfers`."""
