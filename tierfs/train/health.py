"""`Health`: counts failed saves, and raises if too many fail in a row or the newest durable step is too old."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from tierfs.errors import InvalidInputError, TierfsError
from tierfs.train.agree import Agreed
from tierfs.train.handle import SaveHandle
from tierfs.units import parse_time

ERRORS_MAX = 100
WATCHED_MAX = 16
LOOK_EVERY_S = 5.0
_logger = logging.getLogger("tierfs.train")


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A save that failed, or a save after which retention failed.

    Attributes:
        step: The training step.
        error: The reason. Its message says so if the save itself ended and retention failed after it.
    """

    step: int
    error: Exception


class Health:
    """The outcomes of this rank's saves.

    Args:
        on_error: ``"warn"``: training goes on after a failed save. ``"raise"``: the next step raises.
        max_failures: After this many failures in a row, the next step raises even with ``"warn"``.
        max_age: The next step also raises if the newest step in the object tier is older than this, such as ``"2h"``.
            ``None`` allows any age.

    Raises:
        InvalidInputError: An argument is invalid.
    """

    def __init__(self, on_error: str, max_failures: int, max_age: str | None) -> None:
        if on_error not in {"warn", "raise"}:
            raise InvalidInputError(f"on_error must be 'warn' or 'raise', not {on_error!r}")
        if max_failures < 1:
            raise InvalidInputError(f"max_failures={max_failures}: must be at least 1")
        self._max_failures = max_failures if on_error == "warn" else 1
        self._max_age_s = None if max_age is None else parse_time(max_age, "max_age")
        self._lock = threading.Lock()
        self._errors: deque[FailedSave] = deque(maxlen=ERRORS_MAX)
        self._in_a_row = 0
        self._watched: deque[tuple[float, SaveHandle]] = deque(maxlen=WATCHED_MAX)  # not durable when last checked
        self._durable_s = self._looked_s = time.monotonic()

    def __repr__(self) -> str:
        return f"Health({len(self._errors)} failed, {self._in_a_row} in a row)"

    @property
    def errors(self) -> list[FailedSave]:
        """The last hundred failed saves, the oldest first."""
        with self._lock:
            return list(self._errors)

    @property
    def in_a_row(self) -> int:
        """How many saves have failed since the last successful one."""
        return self._in_a_row

    def note(self, handle: SaveHandle, error: Exception | None) -> None:
        """Record the end of a save, with the reason if it failed."""
        with self._lock:
            if error is None:
                self._in_a_row = 0
                self._watched.append((time.monotonic(), handle))
                return
            self._in_a_row += 1
            self._errors.append(FailedSave(handle.step, error))
        _logger.error("%s could not be saved; training continues: %s", handle.url, error)

    def note_after(self, handle: SaveHandle, error: Exception) -> None:
        """Record that retention failed after a save, for example in a user's policy. It counts as a failure."""
        problem = TierfsError(f"retention failed after the save, with {type(error).__name__}: {error}")
        problem.__cause__ = error
        with self._lock:
            self._in_a_row = max(1, self._in_a_row)  # a failure of the save itself is already counted
            self._errors.append(FailedSave(handle.step, problem))
        _logger.error("%s: retention failed after the save; training continues", handle.url, exc_info=error)

    def is_old(self) -> bool:
        """Return whether the newest durable step is older than allowed. It is checked every few seconds."""
        if self._max_age_s is None:
            return False
        now_s = time.monotonic()
        if now_s - self._looked_s >= min(LOOK_EVERY_S, self._max_age_s / 4):
            self._looked_s = now_s
            self._look()
        return now_s - self._durable_s > self._max_age_s

    def _look(self) -> None:
        with self._lock:
            watched = list(self._watched)
        for saved_s, handle in reversed(watched):
            try:
                is_durable = handle.level == "object"
            except TierfsError:
                continue
            if is_durable:
                self._durable_s = max(self._durable_s, saved_s)
                with self._lock:
                    self._watched = deque((each for each in self._watched if each[0] > saved_s), maxlen=WATCHED_MAX)
                return

    def check(self, agreed: Agreed) -> None:
        """Raise if an agreement reports too many failures or too old a durable step. All ranks then raise.

        Raises:
            TierfsError: Too many saves failed, or the newest durable step is too old.
        """
        if agreed.failures >= self._max_failures:
            last = self._errors[-1] if self._errors else None
            why = "on another rank" if last is None else f"the last one, step {last.step}: {last.error}"
            raise TierfsError(f"{agreed.failures} saves in a row failed, {why}") from (
                None if last is None else last.error
            )
        if agreed.is_old:
            raise TierfsError(
                f"no step reached the object tier within the last {self._max_age_s:g} s (max_age): "
                "`tierfs status` shows what is pending"
            )
