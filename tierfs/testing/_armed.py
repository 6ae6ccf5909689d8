"""Planned faults that wait for what they are to strike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

__all__ = ["ArmedFaults"]


class _Planned(Protocol):
    @property
    def after(self) -> int:
        """How many calls that it might strike it lets pass first."""


APlanned = TypeVar("APlanned", bound=_Planned)


class ArmedFaults(Generic[APlanned]):
    """Faults in the order of their plan; each strikes once. Thread-safe."""

    def __init__(self, plan: Iterable[APlanned]) -> None:
        self._lock = threading.Lock()
        self._waiting = [(planned, planned.after) for planned in plan]

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, planned: APlanned) -> None:
        """Plan one more."""
        with self._lock:
            self._waiting.append((planned, planned.after))

    def clear(self) -> None:
        """Forget those that have not struck yet."""
        with self._lock:
            self._waiting.clear()

    def take(self, might_strike: Callable[[APlanned], bool]) -> APlanned | None:
        """Take the first fault that is due for a call; every other one that might strike it has seen it pass."""
        taken: APlanned | None = None
        with self._lock:
            waiting = []
            for planned, left in self._waiting:
                is_possible = might_strike(planned)
                if is_possible and not left and taken is None:
                    taken = planned
                else:
                    waiting.append((planned, max(0, left - is_possible)))
            self._waiting = waiting
        return taken
