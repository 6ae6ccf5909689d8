"""`Jobs`: work that takes seconds, such as a comparison. It runs on a thread of its own while a client asks for it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import asdict
from typing import Any

from tierfs.cli.terminal.failures import describe
from tierfs.errors import TierfsError
from tierfs.threads import start_daemon

KEPT_MAX = 32
ABANDONED_S = 15.0
"""A job that no client has asked for in this time ends at its next step."""
WAIT_S = 1.0
"""How long a request waits for a job's result before it gets the progress instead."""


class AbandonedError(Exception):
    """Raised inside a job that no client waits for."""


class Job:
    """One piece of work.

    Attributes:
        done: What is done of it, in bytes or items.
        total: All of it; 0 if unknown.
    """

    def __init__(self, task: Callable[[Job], Any]) -> None:
        self.done = self.total = 0
        self._task = task
        self._result: Any = None
        self._error: dict[str, Any] | None = None
        self._asked_s = time.monotonic()
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"Job({self.done} of {self.total})"

    def advance(self, count: int = 1) -> None:
        """Count work that is done. Raises `AbandonedError` if no client waits for the rest."""
        self.done += count
        if time.monotonic() - self._asked_s > ABANDONED_S:
            raise AbandonedError

    @property
    def is_useful(self) -> bool:
        """Whether it runs, or has a result: a failed one is tried again."""
        return not self._ended.is_set() or self._error is None

    def run(self, turn: threading.Lock) -> None:
        """Do the work when it is its turn."""
        try:
            with turn:
                self.advance(0)
                self._result = self._task(self)
        except AbandonedError:
            self._error = {"kind": "abandoned", "message": "no client waited for the result", "path": None}
        except (TierfsError, OSError) as error:
            self._error = asdict(describe(error))
        except Exception as error:
            self._error = {"kind": "error", "message": f"{type(error).__name__}: {error}", "path": None}
            raise
        finally:
            self._ended.set()

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Return an HTTP status and a document: the result, the error, or the progress after `WAIT_S` seconds."""
        self._asked_s = time.monotonic()
        if not self._ended.wait(WAIT_S):
            return 202, {"running": True, "done": self.done, "total": self.total}
        return (200, self._result) if self._error is None else (status_of(self._error), {"error": self._error})


class Jobs:
    """Runs one job at a time, and keeps the results of the last `KEPT_MAX` ones."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Hashable, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"Jobs({len(self._jobs)})"

    def answer(self, key: Hashable, task: Callable[[Job], Any]) -> tuple[int, dict[str, Any]]:
        """Start a job unless it runs or is done, and answer as `Job.answer` does."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None or not job.is_useful:
                job = self._jobs[key] = Job(task)
                start_daemon(job.run, self._turn, name="ui-job")
            self._jobs.move_to_end(key)
            while len(self._jobs) > KEPT_MAX:
                self._jobs.popitem(last=False)
        return job.answer()


def status_of(error: dict[str, Any]) -> int:
    """Return the HTTP status for an error of a store."""
    return {"not-found": 404, "store-not-found": 404, "invalid-input": 400, "timeout": 504, "store": 503}.get(
        str(error["kind"]), 500
    )
