"""Planned faults that wait for the calls that they strike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class _Planned(Protocol):
    @property
    def after(self) -> int:
        """Number of matching calls that pass before the fault strikes."""


APlanned = TypeVar("APlanned", bound=_Planned)


class ArmedFaults(Generic[APlanned]):
    """Faults in the order of their plan. Each strikes once. Thread-safe."""

    def __init__(self, plan: Iterable[APlanned]) -> None:
        self._lock = threading.Lock()
        self._waiting = [(planned, planned.after) for planned in plan]

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, planned: APlanned) -> None:
        """Plan one more fault."""
        with self._lock:
            self._waiting.append((planned, planned.after))

    def clear(self) -> None:
        """Forget the faults that have not struck yet."""
        with self._lock:
            self._waiting.clear()

    def take(self, might_strike: Callable[[APlanned], bool]) -> APlanned | None:
        """Take the first due fault that might strike a call. All other faults that might strike it count the call."""
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
