"""Events in the local tiers: counters, log messages that appear once, and a hook at each ordered step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

Faults = Callable[[str], None]
"""Called around every ordered step with ``"before STEP"`` and ``"after STEP"``. Tests raise or kill there."""
_logger = logging.getLogger("tierfs.flush")


class Counters(Counter[str]):
    """Event counts and byte counts by name; 0 for an absent name. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, object] = {}

    def fall_back(self, what: str, text: str, *arguments: object) -> None:
        """Count a fallback, and log the first one of its kind."""
        self[what] += 1
        self.say(what, text, *arguments)

    def say(self, what: str, text: str, *arguments: object) -> None:
        """Log a warning the first time that it is called with this ``what``."""
        ours = object()
        # setdefault is atomic, so no lock is needed that a fork could leave held.
        if self._said.setdefault(what, ours) is ours:
            _logger.warning(text, *arguments)


def no_faults(point: str) -> None:
    """Do nothing: the hook in production."""
