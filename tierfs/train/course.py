"""`Course`: the line in which training goes on, and its record in the run's directory. See `tierfs.checkpoint.notes`."""

from __future__ import annotations

import enum
import logging
import reprlib
import secrets
from typing import Any

from tierfs.checkpoint.notes import FIRST, NOTHING, Lines, line_of
from tierfs.train.agree import World
from tierfs.train.restore import Restored
from tierfs.train.run import RunDirectory

_logger = logging.getLogger("tierfs.train")


class _State(enum.Enum):
    """The states of a course. `Course.resume` enters `BACK` or `GOING` from any of them."""

    FRESH = "nothing was restored: the first save records the run, which becomes GOING"
    BACK = "training went back to an earlier step: `Course.record_return` records that, and it becomes GOING"
    GOING = "the line is recorded, or goes on as it was"


class Course:
    """The line of a run, the same on every rank. The constructor and `resume` are collectives.

    Attributes:
        run: The id of the run, which names its line.
        lines: The lines of the root; ``None`` if none are recorded.
        newer: Steps after the restored one, which training does not go on from. A save may replace them unless they are
            pinned, and takes its own step out.
    """

    def __init__(self, directory: RunDirectory, world: World) -> None:
        self._directory = directory
        self._world = world
        self._state = _State.FRESH
        self.run: str = world.from_first(secrets.token_hex(8), world.training)
        self.lines: Lines | None = None
        self.newer: set[int] = set()

    def __repr__(self) -> str:
        return f"Course({self.run!r}, {self._state.name})"

    def resume(self, found: Restored | None, *, is_choice: bool) -> None:
        """Take the line in which training goes on after a restore.

        Args:
            found: The outcome of the restore.
            is_choice: Whether the user chose the step. Then newer steps are left behind, and a new line begins.
        """

        def look() -> tuple[Any, ...]:
            directory, name = self._directory, secrets.token_hex(8)
            lines = directory.lines()
            if found is not None and is_choice:
                line = line_of(directory.checkpoint(found.step)) or FIRST
                newer = {step for step in directory.candidates() if step > found.step}
                if newer or (lines is not None and not lines.holds(line, found.step)):
                    return _State.BACK, name, (lines or Lines()).begun(name, line, found.step), newer
            current = lines.current if lines is not None else FIRST
            about = found.about if found is not None else None
            newer = {step for step, _ in found.passed_over} if found is not None else set()
            return _State.GOING, current or (about.run if about is not None else name), lines, newer

        self._state, self.run, self.lines, self.newer = self._world.ask_first(look, self._world.training)

    def record_return(self) -> None:
        """Record that training went back to an earlier step, before anything follows from it. Rank 0 does it.

        Raises:
            TierfsError: It could not be recorded.
        """
        if self._state is not _State.BACK:
            return
        if self._world.is_first and self.lines is not None:
            self._directory.write_lines(self.lines)
            steps = reprlib.repr(sorted(self.newer))
            _logger.warning("%s: training went back: it leaves the newer steps %s behind", self._directory.url, steps)
        self._state = _State.GOING

    def record_save(self, step: int) -> None:
        """Record the line after a save, if that is not done, so that foreign checkpoints can be told from the run's own.

        Raises:
            TierfsError: It could not be recorded.
        """
        if self.lines is None and self._world.is_first:
            lines = self._directory.lines()
            has_others = lines is not None or any(each != step for each in self._directory.candidates())
            if self._state is _State.FRESH and has_others:
                lines = (lines or Lines()).begun(self.run, FIRST, NOTHING)
            self._directory.write_lines(lines or Lines())
        self.lines, self._state = self.lines or Lines(), _State.GOING
