"""A session of a cloud that all threads of a process share."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tierfs._fork import leave_to_parent, renew_in_children

SessionT = TypeVar("SessionT")


class SharedSession(Generic[SessionT]):
    """Opens a session at the first request, and closes it when no tier uses it any more.

    A forked child opens its own session, and leaves the parent's alone.

    Args:
        name: The place that the session connects to, for `repr`; no secrets.
        connect: Opens the session: a connection pool with its credentials, an ``endpoint``, and a method ``close``. If it
            fails, the next request tries again.
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
        """Return this process's session; open it if necessary."""
        with self._lock:
            if not self._open:
                self._open.append(self._connect())
            return self._open[0]


def _close(sessions: list[Any], pid: int) -> None:
    while sessions and pid == os.getpid():
        with contextlib.suppress(Exception):  # no caller is left to handle an error
            sessions.pop().close()


# A password may contain "@" or a slash. Without a password, a port number follows the host's colon.
_NOT_THE_PLACE = re.compile(r"(?<=//)(?:[^/?]*@|[^/?@:]*:(?!\d+(?:/|$))[^?]*@)|\?.*|/$")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


def plain(url: str) -> str:
    """Normalize an endpoint's URL: lower case, and no user, password, query, final slash or default port.

    ``localhost`` becomes 127.0.0.1.
    """
    scheme, colon, rest = _NOT_THE_PLACE.sub("", url).lower().partition("://")
    host, slash, path = rest.partition("/")
    host = host.removesuffix(_USUAL_PORTS.get(scheme, "/"))
    if host.partition(":")[0] == "localhost":
        host = host.replace("localhost", "127.0.0.1", 1)
    return f"{scheme}{colon}{host}{slash}{path}"
