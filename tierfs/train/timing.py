"""`StepTimer`: measures training steps and the cost of saves."""

from __future__ import annotations

import time
from collections import deque

STEPS_MEASURED = 16
SLOWEST_COUNTS = 0.9
"""A deadline allows for the slowest recent save. Each later save reduces the time of that one by this factor."""


class StepTimer:
    """Measures steps without the saves between them.

    Attributes:
        step_s: Mean seconds of the last steps; 0 before the second step.
        blocked_s: Seconds for which a save blocks training; 0 before the first save.
        save_s: Seconds until a save reaches the level that the manager asks for; 0 before the first save.
    """

    def __init__(self) -> None:
        self._resumed_s = self._saved_s = time.perf_counter()
        self._steps: deque[float] = deque(maxlen=STEPS_MEASURED)
        self._has_stepped = False
        self.step_s = self.blocked_s = self.save_s = 0.0

    def made_step(self) -> None:
        """Record the end of a step."""
        if self._has_stepped:  # more than a step lies before the first call
            self._steps.append(time.perf_counter() - self._resumed_s)
            self.step_s = sum(self._steps) / len(self._steps)
        self._has_stepped = True

    def go_on(self) -> None:
        """Record the start of the next step."""
        self._resumed_s = time.perf_counter()

    def made_save(self, blocked_s: float) -> None:
        """Record a save, and the seconds for which it blocked training."""
        self._saved_s = time.perf_counter()
        # The last save counts for one half, because the first save of a process costs more than later ones.
        self.blocked_s = blocked_s if not self.blocked_s else (self.blocked_s + blocked_s) / 2

    def reached_level(self, seconds: float) -> None:
        """Record the seconds that a save took until it was done."""
        self.save_s = max(seconds, self.save_s * SLOWEST_COUNTS)

    @property
    def since_s(self) -> float:
        """Seconds since the last save was requested, or since this timer began."""
        return time.perf_counter() - self._saved_s
