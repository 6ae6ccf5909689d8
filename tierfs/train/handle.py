"""`SaveHandle`: a save as the training loop sees it. `Health`: a rank's outcomes, and when they end training."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from tierfs.dcp.save.publish import level_reached, wait_for
from tierfs.errors import InvalidInputError, TierfsError
from tierfs.format.checkpoint import ROOT, SaveMark
from tierfs.format.keys import inside
from tierfs.host.pending.levels import Level
from tierfs.store import level_of
from tierfs.train.agree import Agreed
from tierfs.train.run import RunDirectory
from tierfs.units import bounded_timeout, parse_time

ERRORS_MAX = 100
WATCHED_MAX = 16
LOOK_EVERY_S = 5.0
_logger = logging.getLogger("tierfs.train")


class SaveHandle:
    """A save that is in flight, or done.

    Attributes:
        step: The training step.
        kind: ``full`` or ``light``, as for `Manager.save`.
        blocked_s: Seconds for which the save blocked training on this rank.
        was_there: Whether the step was already saved with the same content, so that this save wrote nothing.
    """

    def __init__(self, run: RunDirectory, step: int, kind: str) -> None:
        self.step = step
        self.kind = kind
        self.blocked_s = 0.0
        self.was_there = False
        self._run = run
        self._mark: SaveMark | None = None
        self._begin: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._asked_s = time.monotonic()
        self._seconds = 0.0

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, kind={self.kind!r}, done={self.done})"

    @property
    def url(self) -> str:
        """The URL of the checkpoint."""
        return self._run.url_of(self.step)

    @property
    def done(self) -> bool:
        """Whether the save has ended: it has failed, or has reached the level that the manager asks for (``ack``)."""
        return self._ended.done()

    @property
    def error(self) -> Exception | None:
        """The reason why the save failed; ``None`` while it is in flight and if it succeeded."""
        error = self._ended.exception() if self._ended.done() else None
        assert error is None or isinstance(error, Exception), "the save thread reports only these"
        return error

    @property
    def seconds(self) -> float:
        """Seconds from the request to the end of the save, or until now while it is in flight."""
        return self._seconds or time.monotonic() - self._asked_s

    def wait(self, level: str = "staged", timeout: float | None = None) -> None:
        """Wait until the checkpoint has reached a level.

        Args:
            level: ``"staged"``, ``"local"`` and ``"peer"`` cover the files that this host saved, ``"object"`` the whole
                checkpoint.
            timeout: In seconds; ``None`` waits without a limit.

        Raises:
            TimeoutError: The checkpoint did not reach the level in time.
            Exception: The save failed, for this reason.
        """
        timeout, begun = bounded_timeout(timeout), time.monotonic()
        try:
            self._ended.result(timeout)
        except FutureTimeoutError:
            raise TimeoutError(f"{self.url}: the save did not finish within {timeout} s; it continues") from None
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        store, path = self._run.path_of(self.step)
        wait_for(store, path, inside(path, ROOT), self._mark, Level.parse(level), left)

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until the save has succeeded or failed. Return whether it ended within ``timeout`` seconds."""
        return bool(wait([self._ended], timeout).done)

    @property
    def level(self) -> str:
        """The level of the checkpoint as this host sees it; ``none`` while the save is in flight and if it failed."""
        if not self._ended.done() or self._ended.exception() is not None:
            return Level.NONE.label
        store, path = self._run.path_of(self.step)
        return level_reached(store, path, inside(path, ROOT), self._mark).label

    @property
    def progress(self) -> float:
        """The share of the checkpoint's bytes in the object tier, from 0 to 1, as this host sees it."""
        if not self._ended.done() or self._ended.exception() is not None:
            return 0.0
        checkpoint = self._run.checkpoint(self.step)
        files = checkpoint.files()
        there = sum(
            length
            for name, length in files.items()
            if level_of(checkpoint.store, inside(checkpoint.directory, name)) is Level.OBJECT
        )
        return there / max(1, sum(files.values()))

    def cancel(self) -> bool:
        """Cancel the save if this rank has not begun it. If one rank cancels a save, no rank makes it.

        Returns:
            Whether the save was cancelled. A save that this rank has begun is finished all the same.
        """
        return self._begin.cancel()

    def begin(self) -> bool:
        """Begin the save, on the thread that makes it. Return whether this rank has cancelled it."""
        return not self._begin.set_running_or_notify_cancel()

    def end(self, error: Exception | None, mark: SaveMark | None) -> None:
        """Record the end of the save: why it failed, or which save it is if it wrote something."""
        self._mark = mark
        self._seconds = time.monotonic() - self._asked_s
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


@dataclass(slots=True)
class SaveOrder:
    """A requested save, on one rank. It holds a copy of the state, so nothing keeps it after the save.

    Attributes:
        handle: The save as the training loop sees it.
        run: The id of the run.
        metrics: The metrics of this step, by name.
        history: The metrics of earlier steps and of this one.
        overwrite: Whether the save may replace a checkpoint of this step with different content.
        staged: A copy of the state, which training does not change.
        unsaved: A copy of what a restore compares, and no checkpoint holds.
        said: Facts about the state, such as its epoch, as `About.state` has them.
        problem: The reason why the state could not be copied; ``None`` if it was.
    """

    handle: SaveHandle
    run: str
    metrics: Mapping[str, float]
    history: Sequence[tuple[int, Mapping[str, Any]]]
    overwrite: bool
    staged: Mapping[str, Any] = field(default_factory=dict)
    unsaved: Mapping[str, Any] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)
    problem: Exception | None = None


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
