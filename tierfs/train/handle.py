"""A save as the training loop sees it: whether it is done, how safe it is, how to wait for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from tierfs.dcp.save.publish import level_reached, wait_for
from tierfs.format.checkpoint import ROOT, SaveMark
from tierfs.format.keys import inside
from tierfs.host.pending.levels import Level
from tierfs.store import level_of
from tierfs.train.run import RunDirectory

__all__ = ["SaveHandle", "SaveOrder"]


@dataclass(slots=True)
class SaveOrder:
    """A save that was asked for, on one rank.

    Attributes:
        step: Of the training.
        kind: ``full`` or ``light``.
        staged: The state, safe from training.
        problem: What kept it from being staged.
        metrics: By name.
        history: The metrics of the steps before, and of this one.
        overwrite: Whether another content of this step may be replaced.
    """

    step: int
    kind: str
    staged: Mapping[str, Any] = field(default_factory=dict)
    problem: Exception | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: Sequence[tuple[int, Mapping[str, Any]]] = ()
    overwrite: bool = False


class SaveHandle:
    """A save that is under way, or done.

    Attributes:
        step: Of the training.
        kind: ``full``, or ``light`` for one without optimizer and data loader.
        blocked_s: How long it kept this rank's training from going on.
        is_cancelled: Whether this rank does not want it any more.
        was_there: Whether the step was saved already, with the same content, so that nothing had to be done.
    """

    def __init__(self, run: RunDirectory, order: SaveOrder) -> None:
        self.step = order.step
        self.kind = order.kind
        self.blocked_s = 0.0
        self.was_there = False
        self._run = run
        self._order: SaveOrder | None = order
        self._mark: SaveMark | None = None
        self.is_cancelled = False
        self._ended: Future[None] = Future()
        self._asked_s = time.monotonic()
        self._seconds = 0.0

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, kind={self.kind!r}, done={self.done})"

    @property
    def url(self) -> str:
        """Where the checkpoint is."""
        return self._run.url_of(self.step)

    @property
    def done(self) -> bool:
        """Whether it came to its end: it failed, or has reached the level that the manager asks for."""
        return self._ended.done()

    @property
    def error(self) -> Exception | None:
        """Why it failed; ``None`` while it is under way, and where it did not."""
        error = self._ended.exception() if self._ended.done() else None
        assert error is None or isinstance(error, Exception), "the save thread passes no others on"
        return error

    @property
    def seconds(self) -> float:
        """How long it took from being asked for to its end, or takes by now."""
        return self._seconds or time.monotonic() - self._asked_s

    def wait(self, level: str = "staged", timeout: float | None = None) -> None:
        """Wait until the checkpoint has reached a level: below ``"object"`` what this host saved, there the whole.

        Raises:
            TimeoutError: It has not, in time.
            Exception: The save failed.
        """
        begun = time.monotonic()
        try:
            self._ended.result(timeout)
        except FutureTimeoutError:
            raise TimeoutError(f"{self.url}: the save has not come to its end within {timeout} s") from None
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        store, path = self._run.path_of(self.step)
        wait_for(store, path, inside(path, ROOT), self._mark, Level.parse(level), left)

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for its end, whatever that is. Returns whether it came in time."""
        return bool(wait([self._ended], timeout).done)

    @property
    def level(self) -> str:
        """The level that it has reached, as this host sees it; ``none`` while it is under way, and where it failed."""
        if not self._ended.done() or self._ended.exception() is not None:
            return Level.NONE.label
        store, path = self._run.path_of(self.step)
        return level_reached(store, path, inside(path, ROOT), self._mark).label

    @property
    def progress(self) -> float:
        """The share of its bytes that is in the object tier, from 0 to 1, as this host sees it."""
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
        """Have the save not be made, if it has not begun. What one rank cancels no rank saves.

        Returns:
            Whether it will not be made, as far as this rank knows: it is done if another rank has begun already.
        """
        self.is_cancelled = True
        return not self._ended.done() and self._order is not None

    def end(self, error: Exception | None, mark: SaveMark | None) -> None:
        """Take note of how it ended."""
        self._mark, self._order = mark, None
        self._seconds = time.monotonic() - self._asked_s
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
