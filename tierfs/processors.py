"""Work that is bound by the processor, shared out among as many threads as there are processors; one set per process.

A call never waits for a thread to be free, only for what one has begun of it: calls within calls cannot wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from tierfs._fork import PerProcess

__all__ = ["Processors", "processors"]

_In = TypeVar("_In")

THREADS_MAX = 16


class Processors:
    """Threads that help whoever calls `share_out`. Safe for use by many threads.

    Args:
        threads_max: Threads that work at once, if there are so many processors; callers count as well.
    """

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        self.threads_max = threads_max
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(self.count)
        self._places = threading.Semaphore(self.count)
        self._busy = 0
        self._helpers: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"Processors(threads_max={self.threads_max}, busy={self._busy})"

    @property
    def count(self) -> int:
        """How many threads work at once."""
        return min(len(os.sched_getaffinity(0)), self.threads_max)

    def share_out(
        self, task: Callable[[_In], object], arguments: Iterable[_In], *, threads_max: int | None = None
    ) -> None:
        """Run ``task`` on every argument: here, and on a helper for each processor on which nothing is shared out by now.

        However many calls there are at once, and within each other, a process has no more helpers than other processors,
        and a call that gets none goes on alone. More threads would only get in each other's way: measured on two processors,
        sixteen copy and hash a tenth slower than two.

        Args:
            task: Called with each argument.
            arguments: In the order in which they are begun.
            threads_max: At most so many threads, the caller's among them; by default one for each processor.

        Raises:
            BaseException: Of the errors of tasks that of the first in order, after every task has ended. Some were not
                begun then, but all before that one.
        """
        job = _Job(task, arguments)
        wanted = len(job) if threads_max is None else min(len(job), threads_max)
        helpers = self._take(wanted - 1)
        try:
            # None can be started where memory runs out, or at the interpreter's end.
            with contextlib.suppress(RuntimeError):
                for _ in range(helpers):
                    self._threads().submit(job.help)
            job.work()
        finally:
            job.end()
            self._give_back(helpers)
        job.raise_first()

    def turn(self) -> AbstractContextManager[object]:
        """Be one of as many threads as there are processors, in a ``with`` block; waits for it.

        For what threads do between waiting for others: many at once would wait for the interpreter's lock, and push what
        the others work on out of the caches. Nothing in the block may wait for another thread, but for those it shares out to.
        The main thread does not wait, and does not count: an interrupt could have it leave without giving its turn back.
        """
        return contextlib.nullcontext() if threading.current_thread() is threading.main_thread() else self._turns

    def place(self) -> AbstractContextManager[object]:
        """Be one of as many threads, in a ``with`` block around their `turn`: for what they hold until it comes, and may have to wait for.

        Others take their turns meanwhile. Nothing in the block may wait for another one's place. For the main thread see `turn`.
        """
        return contextlib.nullcontext() if threading.current_thread() is threading.main_thread() else self._places

    def _take(self, wanted: int) -> int:
        """How many helpers a caller may have, who works as well."""
        with self._lock:
            helpers = max(0, min(wanted, self.count - self._busy - 1))
            self._busy += helpers + 1
        return helpers

    def _give_back(self, helpers: int) -> None:
        with self._lock:
            self._busy -= helpers + 1

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._helpers is None:
                # Not those of `Transfers`: who waits for requests would keep helpers waiting.
                self._helpers = ThreadPoolExecutor(self.threads_max, thread_name_prefix="tierfs-share")
            return self._helpers


class _Job(Generic[_In]):
    """What one call shares out."""

    def __init__(self, task: Callable[[_In], object], arguments: Iterable[_In]) -> None:
        self._task = task
        self._waiting = deque(enumerate(arguments))
        self._errors: dict[int, BaseException] = {}
        self._helping = 0
        self._changed = threading.Condition(threading.Lock())

    def __len__(self) -> int:
        return len(self._waiting)

    def work(self) -> None:
        """Do what nobody else does, until an error ends it all."""
        while True:
            try:
                number, argument = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._task(argument)
            except Exception as error:  # noqa: BLE001 - raised by the caller
                self._errors[number] = error
                self._waiting.clear()

    def help(self) -> None:
        """Work on another thread than the caller's, unless it is done."""
        with self._changed:
            if not self._waiting:
                return
            self._helping += 1
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            self._errors[-1] = error
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify()

    def end(self) -> None:
        """Let nothing more be begun, and wait for what was: an interrupt must not take from under it what it works on.

        Then forget the task: a helper refers to the job for a moment longer, and the caller's memory is only lent.
        """
        self._waiting.clear()
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._helping)
            except BaseException as interrupt:  # noqa: BLE001, PERF203 - raised by the caller
                self._errors[-1] = interrupt
            else:
                break
        del self._task

    def raise_first(self) -> None:
        """Raise the error of the first task that failed; an interrupt comes before them all."""
        try:
            if self._errors:
                raise self._errors[min(self._errors)]
        finally:
            self._errors.clear()  # they refer to the job, and to the caller's memory, which would live on until garbage is collected


processors = PerProcess(Processors)
"""This process's `Processors`."""
