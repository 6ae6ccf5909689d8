"""Run rows of `device.py` one after the other within a time. A row that fails or hangs does not affect the others."""

from __future__ import annotations

import faulthandler
import gc
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Budget:
    """The time at which all rows must be done.

    Args:
        end: Wall clock time in seconds since the epoch.
    """

    def __init__(self, end: float) -> None:
        self._end = end

    def left(self) -> float:
        return self._end - time.time()

    def allows(self, seconds: float) -> bool:
        """Whether a task of this many seconds can end in time."""
        return self.left() > seconds


class Rows:
    """The results of rows, written to a file after each row.

    Args:
        path: The file; ``None`` writes none.
        budget: The time for all rows.
        found: Facts about the run. Rows are added to it.
    """

    def __init__(self, path: Path | None, budget: Budget, found: dict[str, Any]) -> None:
        self._path, self._budget = path, budget
        self.found = {**found, "rows": {}}

    def run(
        self, name: str, measure: Callable[[], dict[str, Any]], *, at_most_s: float, at_least_s: float = 1.0
    ) -> None:
        """Measure a row, unless less than ``at_least_s`` is left."""
        left = self._budget.left()
        if left < at_least_s:
            self._note(name, {"not_reached": f"{left:.0f} s of the budget were left, {at_least_s:.0f} s are needed"})
            return
        begin = time.perf_counter()
        limit = min(at_most_s, left)
        try:
            with _Limited(limit):
                row = measure()
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            row = {"error": "".join(traceback.format_exception(error))[-6000:]}
            print(f"{name} failed: {error!r}"[:500], flush=True)
            del error
        gc.collect()
        row["row_s"] = round(time.perf_counter() - begin, 2)
        self._note(name, row)

    def _note(self, name: str, row: dict[str, Any]) -> None:
        self.found["rows"][name] = row
        shown = {key: value for key, value in row.items() if isinstance(value, (int, float, str))}
        print(f"[{self._budget.left():5.0f} s left] {name}: {json.dumps(shown)[:700]}", flush=True)
        self.write()

    def write(self) -> None:
        if self._path is not None:
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.found, indent=1))
            temporary.replace(self._path)


class _Limited:
    """Raise TimeoutError on the main thread when the time is up, after a dump of all threads' stacks."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._ring)
        # Repeats every 10 s, in case the row catches the first error.
        signal.setitimer(signal.ITIMER_REAL, self._limit_s, 10.0)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *_: object) -> None:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        raise TimeoutError(f"the row did not end within {self._limit_s:.0f} s")
