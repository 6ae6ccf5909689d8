"""`Jobs`: work that takes seconds, such as a comparison. It runs on a thread of its own while a client asks for it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeAlias

from tierfs.threads import start_daemon

KEPT_MAX = 32
ABANDONED_S = 15.0  # a job that no client has asked for in this time ends at its next step
WAIT_S = 1.0  # of a request for the result, before it gets the progress instead
Task: TypeAlias = "Callable[[Job], dict[str, Any]]"


class Job:
    """One piece of work, and its result or error."""

    def __init__(self) -> None:
        self.done = self.total = 0  # in bytes or items
        self.result: Future[dict[str, Any]] = Future()
        self.asked_s = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Count finished work. Raises `CancelledError` if no client waits for the rest."""
        self.done += count
        if time.monotonic() - self.asked_s > ABANDONED_S:
            raise CancelledError

    def run(self, task: Task, turn: threading.Lock) -> None:
        """Do the work when it is its turn."""
        try:
            with turn:
                self.advance(0)
                self.result.set_result(task(self))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asks
            self.result.set_exception(error)


class Jobs:
    """Runs one job at a time, and keeps the results of the last `KEPT_MAX` ones."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Hashable, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def answer(self, key: Hashable, task: Task) -> tuple[int, dict[str, Any]]:
        """Return an HTTP status and the result, or after `WAIT_S` seconds the progress. A failed job is done again.

        Raises:
            TierfsError, OSError: Raised by the job.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None or (job.result.done() and job.result.exception()):
                job = self._jobs[key] = Job()
                start_daemon(job.run, task, self._turn, name="ui-job")
            self._jobs.move_to_end(key)
            while len(self._jobs) > KEPT_MAX:
                self._jobs.popitem(last=False)
        job.asked_s = time.monotonic()
        try:
            return 200, job.result.result(WAIT_S)
        except FutureTimeoutError:
            return 202, {"running": True, "done": job.done, "total": job.total}
