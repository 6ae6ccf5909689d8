"""One process's counters of its use of a store's local tiers, and messages that it logs once and not each time."""

from __future__ import annotations

import logging
from collections import Counter

__all__ = ["Counters"]

_logger = logging.getLogger("tierfs.flush")


class Counters(Counter[str]):
    """How often something happened, or how many bytes of it, by name; 0 of what did not. For use by many threads."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, object] = {}

    def fall_back(self, what: str, text: str, *arguments: object) -> None:
        """Count a fallback, and log the first one of its kind."""
        self[what] += 1
        self.say(what, text, *arguments)

    def say(self, what: str, text: str, *arguments: object) -> None:
        """Log something the first time."""
        ours = object()
        # In one step, so that no lock is needed which a fork could leave held.
        if self._said.setdefault(what, ours) is ours:
            _logger.warning(text, *arguments)
