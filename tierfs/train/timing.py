"""How long training steps take, and what saves cost of them."""

from __future__ import annotations

import time
from collections import deque

__all__ = ["StepTimer"]

STEPS_MEASURED = 16
SLOWEST_COUNTS = 0.9
"""A deadline is met by the slowest of the last saves, which counts for less with each one after it."""


class StepTimer:
    """Measures steps without the saves between them.

    Attributes:
        step_s: The mean of the last steps; 0 before the second one.
        blocked_s: How long a save blocks training; 0 before the first one.
        save_s: How long a save takes until the manager calls it done; 0 before the first one.
    """

    def __init__(self) -> None:
        self._resumed_s = self._saved_s = time.perf_counter()
        self._steps: deque[float] = deque(maxlen=STEPS_MEASURED)
        self._has_stepped = False
        self.step_s = self.blocked_s = self.save_s = 0.0

    def made_step(self) -> None:
        """Take note of the end of a step."""
        if self._has_stepped:  # else more than a step came before
            self._steps.append(time.perf_counter() - self._resumed_s)
            self.step_s = sum(self._steps) / len(self._steps)
        self._has_stepped = True

    def go_on(self) -> None:
        """Take note that the next one begins."""
        self._resumed_s = time.perf_counter()

    def made_save(self, blocked_s: float) -> None:
        """Take note of a save."""
        self._saved_s = time.perf_counter()
        # The last save counts for a half: the first one of a process costs more than all others.
        self.blocked_s = blocked_s if not self.blocked_s else (self.blocked_s + blocked_s) / 2

    def reached_level(self, seconds: float) -> None:
        """Take note of how long a save took."""
        self.save_s = max(seconds, self.save_s * SLOWEST_COUNTS)

    @property
    def since_s(self) -> float:
        """Seconds since the last save was asked for."""
        return time.perf_counter() - self._saved_s
