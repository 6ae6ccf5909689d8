"""Event loops of our own on threads of their own, for clients that are asynchronous.

All clients of a process share a few loops. fsspec's one loop is left to others: a thread that copies every byte of every
request is the first thing to be full. Requests come from many threads, and each goes to the loop with the fewest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, Protocol, TypeVar

from tierfs._fork import leave_to_parent, renew_in_children

__all__ = ["LOOPS_MAX", "Lanes"]

LOOPS_MAX = 4
CLOSE_S_MAX = 2.0


class Session(Protocol):
    """What is opened on each loop: connections, credentials."""

    async def close(self) -> None:
        """Close its connections."""


SessionT = TypeVar("SessionT", bound=Session)
Answer = TypeVar("Answer")


class _Loop:
    """One event loop, and the thread that runs it for as long as the process lives."""

    def __init__(self, number: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.under_way = 0
        self.thread = threading.Thread(target=self.loop.run_forever, name=f"tierfs-loop-{number}", daemon=True)
        self.thread.start()


class _Call(Future[Answer]):
    """A coroutine for another thread's loop to run, and its outcome to come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Answer]) -> None:
        super().__init__()
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[Answer] | None = None

    def start(self) -> None:
        """Have it run."""
        self._loop.call_soon_threadsafe(self._begin)

    def stop(self) -> None:
        """Cancel it. It has an outcome soon, also where `start` was interrupted and may not have taken effect."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.done():  # the loop keeps the order: it will never be begun
            self._coroutine.close()
            self.set_exception(asyncio.CancelledError())

    def _end(self, task: asyncio.Task[Answer]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class _Loops:
    """The loops of this process."""

    def __init__(self) -> None:
        self._loops: list[_Loop] = []
        self._renew()
        renew_in_children(self)

    def _renew(self) -> None:
        # The threads of the parent do not run in a child.
        leave_to_parent(self._loops)
        self._loops = []
        self._lock = threading.RLock()  # the collector may run a destructor that sends a request, while it is held

    @contextlib.contextmanager
    def least_busy(self) -> Any:
        """The number and the loop that has the least to do."""
        with self._lock:
            if any(each.thread is threading.current_thread() for each in self._loops):
                # A destructor that the collector runs there, for example: it would wait for itself.
                raise RuntimeError("an event loop of tierfs cannot wait for a request")
            if not self._loops:
                count = min(LOOPS_MAX, len(os.sched_getaffinity(0)))
                self._loops = [_Loop(number) for number in range(count)]
            number = min(range(len(self._loops)), key=lambda each: self._loops[each].under_way)
            chosen = self._loops[number]
            chosen.under_way += 1
        try:
            yield number, chosen
        finally:
            with self._lock:
                chosen.under_way -= 1

    def __getitem__(self, number: int) -> _Loop:
        return self._loops[number]


_loops = _Loops()


class Lanes(Generic[SessionT]):
    """One session per loop, opened when the loop's first request comes.

    Nothing of it is used after a fork: a child opens sessions of its own, and leaves those of its parent alone. Sessions
    are closed when the lanes are not used any more, at the latest when the process ends.

    Args:
        name: What they go to, for `repr`; no secrets.
        connect: Opens a session; runs on the loop that the session is for.

    Attributes:
        waits: See `Sessions`.
    """

    waits = False

    def __init__(self, name: str, connect: Callable[[], Coroutine[Any, Any, SessionT]]) -> None:
        self.name = name
        self._connect = connect
        self._sessions: dict[int, asyncio.Task[SessionT]] = {}
        self._finalizer = weakref.finalize(self, _close, self._sessions, os.getpid())
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"Lanes({self.name!r}, loops_max={LOOPS_MAX})"

    def _renew(self) -> None:
        self._finalizer.detach()
        leave_to_parent(self._sessions)
        self._sessions = {}
        self._finalizer = weakref.finalize(self, _close, self._sessions, os.getpid())

    def run(self, call: Callable[[SessionT], Awaitable[Answer]]) -> Answer:
        """Wait for ``call(session)`` on one of the loops.

        If the wait is interrupted, the call is cancelled, and has ended when this raises: what it was lent is the
        caller's again.

        Raises:
            BaseException: What the call raises.
        """
        with _loops.least_busy() as (number, chosen):
            sending = _Call(chosen.loop, self._work(number, call))
            try:
                sending.start()
                return sending.result()
            except BaseException:
                while not sending.done():
                    with contextlib.suppress(BaseException):  # another interrupt must not cut this one's wait short
                        sending.stop()
                        wait([sending])
                raise
            finally:
                del sending  # an error holds this frame: it would hold itself, and all that was lent, until collected

    async def together(self, calls: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer | BaseException]:
        """What each comes to, or its error, when all have ended; they run at once. To be awaited in `run`."""
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _work(self, number: int, call: Callable[[SessionT], Awaitable[Answer]]) -> Answer:
        return await call(await self._session(number))

    async def _session(self, number: int) -> SessionT:
        # On the loop of this number, which runs one thing at a time.
        opening = self._sessions.get(number)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._sessions[number] = asyncio.get_running_loop().create_task(self._connect())
        # One caller's interrupt must not take the session from the others.
        return await asyncio.shield(opening)


def _close(sessions: dict[int, asyncio.Task[Any]], pid: int) -> None:
    if pid != os.getpid():
        return

    async def close(opening: asyncio.Task[Any]) -> None:
        with contextlib.suppress(Exception):  # nobody waits for an answer any more
            await (await opening).close()

    closing: list[_Call[None]] = []
    while sessions:  # taken out: who sends requests later than this, at the end of the process, opens another one
        number, opening = sessions.popitem()
        closing.append(_Call(_loops[number].loop, close(opening)))
        closing[-1].start()
    if threading.current_thread() is threading.main_thread():
        wait(closing, CLOSE_S_MAX)
