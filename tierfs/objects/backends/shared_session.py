"""One session of a cloud that all threads of a process share."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from tierfs._fork import leave_to_parent, renew_in_children

__all__ = ["Session", "SharedSession"]


class Session(Protocol):
    """A connection pool with its credentials, which many threads may use at once."""

    @property
    def endpoint(self) -> str:
        """Where requests go."""

    def close(self) -> None:
        """Close its connections."""


SessionT = TypeVar("SessionT", bound=Session)


class SharedSession(Generic[SessionT]):
    """Opens a session when the first request comes, and closes it when nobody uses it any more.

    A forked child opens a session of its own, and leaves that of its parent alone.

    Args:
        name: Where it goes to, for `repr`; no secrets.
        connect: Opens the session. If that fails, the next request tries again.
    """

    def __init__(self, name: str, connect: Callable[[], SessionT]) -> None:
        self.name = name
        self._connect = connect
        self._renew_lock()
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"SharedSession({self.name!r})"

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()
        self._open: list[SessionT] = []
        self._finalizer = weakref.finalize(self, _close, self._open, os.getpid())

    def _renew(self) -> None:
        self._finalizer.detach()
        leave_to_parent(self._open)
        self._renew_lock()

    def get(self) -> SessionT:
        """The session of this process."""
        with self._lock:
            if not self._open:
                self._open.append(self._connect())
            return self._open[0]


def _close(sessions: list[Any], pid: int) -> None:
    while sessions and pid == os.getpid():
        with contextlib.suppress(Exception):  # nobody waits for an answer any more
            sessions.pop().close()
