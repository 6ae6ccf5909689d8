"""A client that is not asynchronous: each thread makes its own requests, and all share one connection pool."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from tierfs._fork import leave_to_parent, renew_in_children

__all__ = ["Direct"]


class Session(Protocol):
    """A connection pool that many threads may use at once."""

    def close(self) -> None:
        """Close its connections."""


SessionT = TypeVar("SessionT", bound=Session)
Answer = TypeVar("Answer")


class Direct(Generic[SessionT]):
    """One session, opened when the first request comes. The counterpart of `Lanes` for clients that wait themselves.

    Nothing of it is used after a fork: a child opens a session of its own, and leaves that of its parent alone.

    Args:
        name: What it goes to, for `repr`; no secrets.
        connect: Opens a session.

    Attributes:
        waits: See `Sessions`.
    """

    waits = True

    def __init__(self, name: str, connect: Callable[[], SessionT]) -> None:
        self.name = name
        self._connect = connect
        self._lock = threading.Lock()
        self._open: list[SessionT] = []
        self._finalizer = weakref.finalize(self, _close, self._open, os.getpid())
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"Direct({self.name!r})"

    def _renew(self) -> None:
        self._finalizer.detach()
        leave_to_parent(self._open)
        self._lock = threading.Lock()
        self._open = []
        self._finalizer = weakref.finalize(self, _close, self._open, os.getpid())

    def run(self, call: Callable[[SessionT], Awaitable[Answer]]) -> Answer:
        """Run ``call(session)`` to its end. Of what it awaits, nothing may need an event loop.

        Raises:
            BaseException: What the call raises.
        """
        running = call(self._session()).__await__()
        try:
            next(running)
        except StopIteration as done:
            # Not by way of a variable: an error among the outcomes holds this frame, and would hold itself.
            return cast("Answer", done.value)
        raise AssertionError(f"{self.name}: a call waits for something that this thread does not run")

    async def together(self, calls: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer | BaseException]:
        """What each comes to, or its error; one after the other. To be awaited in `run`."""
        outcomes: list[Answer | BaseException] = []
        try:
            for call in calls:
                try:
                    outcomes.append(await call)
                except Exception as error:  # noqa: BLE001, PERF203 - for the caller to raise
                    outcomes.append(error)
            return outcomes
        finally:
            for call in calls:
                call.close()
            del outcomes  # an error holds this frame: it would hold itself, and all that was lent, until collected

    def _session(self) -> SessionT:
        with self._lock:
            if not self._open:
                self._open.append(self._connect())
            return self._open[0]


def _close(sessions: list[Any], pid: int) -> None:
    while sessions and pid == os.getpid():
        with contextlib.suppress(Exception):  # nobody waits for an answer any more
            sessions.pop().close()
