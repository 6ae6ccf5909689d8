"""Threads for moving chunks, bounded in number, one set per process.

A task on these threads never submits another task to them and waits for it, so tasks cannot deadlock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from tierfs._fork import PerProcess

_In = TypeVar("_In")
_Out = TypeVar("_Out")

WORKERS = 16


class Errand(Generic[_In, _Out]):
    """A task that runs once, although two threads may try to run it.

    If no thread can be started, the task stays in the executor's queue while the caller runs it.
    """

    def __init__(self, task: Callable[[_In], _Out], argument: _In) -> None:
        self.future: Future[_Out] = Future()
        self._todo = [(task, argument)]

    def run(self) -> None:
        """Run the task, unless another thread has begun it."""
        try:
            task, argument = self._todo.pop()
        except IndexError:
            return
        try:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(task(argument))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the future
            self.future.set_exception(error)
            # Drop this frame's references: the future refers to the error, and the error to this frame. Otherwise the
            # future would keep borrowed memory alive.
            del self, task, argument

    def cancel(self) -> bool:
        """Cancel the task unless it has begun, and drop its references. Return whether it was cancelled."""
        is_cancelled = self.future.cancel()
        if is_cancelled:
            self._todo.clear()
        return is_cancelled


class Transfers:
    """Threads for requests to the object tier. ``name`` is the prefix of the threads' names."""

    def __init__(self, workers: int = WORKERS, *, name: str = "tierfs-transfer") -> None:
        self.workers = workers
        self._name = name
        # Reentrant: garbage collection may run while this thread holds it, and finalize a file that submits tasks.
        self._lock = threading.RLock()
        self._places = threading.BoundedSemaphore(workers)
        self._executor: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"Transfers(workers={self.workers})"

    def submit(self, task: Callable[[_In], _Out], argument: _In) -> Future[_Out]:
        """Start ``task(argument)`` on a thread. If none can take it, as at interpreter exit, run it here."""
        errand = Errand(task, argument)
        self._start(errand)
        return errand.future

    def send(self, task: Callable[[_In], _Out], argument: _In) -> Future[_Out]:
        """Start ``task(argument)`` once fewer sent tasks are unfinished than there are threads.

        This bounds the memory of tasks in flight, however many files are written at once.
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

        If the call is interrupted, it starts no further task and raises when the running tasks have ended. The caller
        may then reuse memory that it lent to them. A request that hangs delays this until its timeout.

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
