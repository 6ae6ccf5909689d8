"""The way to the flusher: finds it, starts it where there is none, replaces one that is older, and asks it.

A request waits on a connection of its own, and a few connections are kept for the next requests; so threads do not
wait for one another. All requests may be repeated, and one whose connection broke before the answer came is: by the
flusher that is there then.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tierfs._fork import renew_in_children
from tierfs.errors import FormatError, StoreError
from tierfs.host.host import ExclusiveLock
from tierfs.host.rpc import protocol as wire
from tierfs.host.rpc.launch import LOG_NAME, Launched, tail
from tierfs.host.rpc.protocol import LOCK_NAME

__all__ = ["FlusherClient", "NoAnswerError", "is_flusher_running"]

START_TIMEOUT_S = 30.0
IDLE_MAX = 4
REPEATS_MAX = 1  # when it crashes: the request may be why
ATTEMPTS_MAX = 20
_LAUNCH_LOCK_NAME = "launch.lock"
_UNWATCHED_S = 1.0
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.002, 0.02


class NoAnswerError(TimeoutError):
    """The flusher did not answer in time: it is stopped, hangs, or cannot be started. Its own answers are no such error."""


class _BrokenError(Exception):
    """The connection ended before the answer came."""


class _EndedError(_BrokenError):
    """The same, but it is certain that the flusher ended in good order, or was never asked."""


def is_flusher_running(directory: Path) -> bool:
    """Whether a flusher of the store with this directory of the host runs now: somebody holds its lock."""
    if not (directory / LOCK_NAME).exists():
        return False
    lock = ExclusiveLock(directory / LOCK_NAME)
    if not lock.acquire():
        return True
    lock.release()
    return False


class FlusherClient:
    """Asks the flusher of one store on this host. Safe for use by many threads.

    Args:
        directory: The store's directory on this host, absolute.
        launch: Starts a flusher for it. Called while nobody else does the same. Returns the process, so that its end
            is noticed; None where there is none to watch, as when a thread is started.
        version: This tierfs's.
        hello: The first message of each connection, credentials included, as JSON.
        start_timeout_s: How long to wait for a flusher to answer at all.
    """

    def __init__(
        self,
        directory: Path,
        launch: Callable[[], Launched | None],
        version: str,
        hello: Callable[[], Mapping[str, Any]],
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._directory = directory
        self._launch = launch
        self._version = version
        self._hello = hello
        self._start_timeout_s = start_timeout_s
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle: list[socket.socket] = []
        self._open: set[socket.socket] = set()  # idle or not
        self._outdated: set[socket.socket] = set()  # of these, those that began with another hello
        self._finalizer = weakref.finalize(self, _close_all, self._open)
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"FlusherClient({str(self._directory)!r}, {len(self._open)} connections, {IDLE_MAX} idle at most)"

    def __enter__(self) -> FlusherClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up the connections that are not in use; those in use are when they are not any more."""
        with self._lock:
            self._is_closed = True
        self._forget_idle()

    def greet_again(self) -> None:
        """Begin each request with a new hello, because what that says has changed."""
        with self._lock:
            self._outdated = set(self._open)
        self._forget_idle()

    def is_running(self) -> bool:
        """Whether a flusher runs now: somebody holds its lock."""
        return is_flusher_running(self._directory)

    def request(
        self,
        do: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Ask the flusher, and wait for its answer.

        Args:
            do: The request; must be one that may be done twice.
            arguments: JSON values, within a message.
            timeout_s: For all of it. When it is over the flusher sees this client hang up.

        Raises:
            TierfsError: As the flusher raised it.
            NoAnswerError: There was no answer in time.
            TimeoutError: As the flusher raised it.
            StoreError: No flusher could be started, or it ended each time it was asked. Names its log.
            InvalidInputError: The request is too large.
            ReadOnlyError: Somebody else's process listens where the flusher should.
        """
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        request = {"do": do, "arguments": dict(arguments or {})}
        attempts = crashes = 0
        connection = self._take_idle()
        while True:
            is_fresh = connection is None
            if connection is None:
                connection = self._connect(ends, do)
            try:
                answer = self._ask(connection, request, ends)
            except _BrokenError as error:
                self._discard(connection)
                self._forget_idle()  # they led to the same flusher
                connection = None
                attempts += 1
                crashes += is_fresh and not isinstance(error, _EndedError)
                if crashes > REPEATS_MAX or attempts >= ATTEMPTS_MAX:
                    problem = f"the flusher ended {attempts} times while it was asked to {do}"
                    raise self._failed(problem, transient=True) from error
            except TimeoutError as error:
                self._discard(connection)
                raise self._unanswered(do, timeout_s) from error
            except BaseException:
                self._discard(connection)
                raise
            else:
                self._keep(connection)
                return _outcome(answer)

    def _ask(self, connection: socket.socket, request: Mapping[str, Any], ends: float | None) -> dict[str, Any]:
        """Send one request and wait for the answer to it.

        Raises:
            _BrokenError: There is none.
            TimeoutError: There is none by ``ends``.
        """
        number = next(self._numbers)
        packet = wire.encode({"id": number, **request})
        try:
            connection.settimeout(_seconds_until(ends))
            wire.send(connection, packet)
            connection.settimeout(_seconds_until(ends))
            answer = wire.receive(connection)
        except BrokenPipeError as error:
            raise _EndedError from error  # raised by sending alone
        except ConnectionError as error:
            raise _BrokenError from error
        except TimeoutError:
            raise
        except OSError as error:
            raise StoreError(f"the flusher cannot be asked to {request['do']}: {error}") from error
        if answer is None:
            raise _BrokenError
        if answer.get("id") != number:
            raise FormatError("the flusher's answer is to another request")
        if answer.get("ended") is True:
            raise _EndedError
        return answer

    # -- connections -------------------------------------------------------------------------------------------------

    def _take_idle(self) -> socket.socket | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < IDLE_MAX and connection not in self._outdated:
                self._idle.append(connection)
                return
        self._discard(connection)

    def _discard(self, connection: socket.socket) -> None:
        self._open.discard(connection)
        self._outdated.discard(connection)
        # Closing is not enough where another thread is starting a process just now, which has a copy.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _forget_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._discard(connection)

    def _connect(self, request_ends: float | None, do: str) -> socket.socket:
        """Connect to a flusher that is not older than we are, starting one where needed, and say hello."""
        ends = time.monotonic() + self._start_timeout_s
        ends = ends if request_ends is None else min(ends, request_ends)
        pause_s = _PAUSE_S_MIN
        successor = None
        while True:
            connection, successor = successor or self._dial(ends) or self._start(ends), None
            theirs = None if connection is None else self._greet(connection, ends)
            if connection is not None and theirs is not None:
                if theirs >= wire.version_of(self._version):
                    return connection
                try:
                    successor = self._start(ends, older=connection)
                finally:
                    self._discard(connection)
            if time.monotonic() >= ends:
                if successor is not None:
                    self._discard(successor)
                if ends == request_ends:
                    raise self._unanswered(do)
                problem = f"no flusher answered in {self._directory} within {self._start_timeout_s:g} s"
                raise self._failed(problem, transient=True)
            if successor is None:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _start(self, ends: float, *, older: socket.socket | None = None) -> socket.socket | None:
        """Start a flusher, in place of an older one if need be, and connect to it. None: look again in a moment."""
        launching = ExclusiveLock(self._directory / _LAUNCH_LOCK_NAME)
        if not launching.acquire():
            return None  # somebody else is at it
        try:
            # Kept until ours listens: clients as old as that flusher would start another one like it.
            if older is not None and not self._retire(older, ends):
                return None
            running = ExclusiveLock(self._directory / LOCK_NAME)
            if not running.acquire():
                return None  # there is one that is about to listen, or about to end
            running.release()
            return self._launch_and_dial(ends)
        finally:
            launching.release()

    def _retire(self, older: socket.socket, ends: float) -> bool:
        """Have a flusher retire, and wait until it has."""
        before = wire.identity_of(self._directory)
        try:
            _outcome(self._ask(older, {"do": "retire"}, ends))
        except (_BrokenError, TimeoutError):
            return False
        running = ExclusiveLock(self._directory / LOCK_NAME)
        while not running.acquire():
            if time.monotonic() >= ends or wire.identity_of(self._directory) not in {before, None}:
                return False  # a service manager was faster
            time.sleep(_PAUSE_S_MIN)
        running.release()
        return True

    def _launch_and_dial(self, ends: float) -> socket.socket | None:
        launched = self._launch()
        if launched is None:
            # It may have come and, since others found it, gone: then there would be nothing to wait for.
            ends = min(ends, time.monotonic() + _UNWATCHED_S)
        pause_s = _PAUSE_S_MIN
        while time.monotonic() < ends:
            # Asked before it is dialled: who has ended by then cannot begin to listen.
            status = None if launched is None else launched.status()
            connection = self._dial(ends)
            if connection is not None:
                return connection
            if launched is not None and status:
                raise StoreError(
                    f"the flusher cannot be started: it ended with status {status}. The end of its log, "
                    f"{launched.log}:\n{launched.last_words()}",
                    path=str(launched.log),
                )
            if status == 0:
                return None  # another had the lock, or others found it and it has gone again
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _PAUSE_S_MAX)
        return None

    def _dial(self, ends: float) -> socket.socket | None:
        connection = wire.connect(self._directory, _seconds_until(ends))
        if connection is not None:
            self._open.add(connection)
        return connection

    def _greet(self, connection: socket.socket, ends: float) -> tuple[int, ...] | None:
        """Say hello, and learn the flusher's version. None where the connection leads nowhere: then it is closed."""
        try:
            hello = {"do": "hello", "arguments": {**self._hello(), "version": self._version}}
            return wire.version_of(_outcome(self._ask(connection, hello, ends)).get("version"))
        except (_BrokenError, TimeoutError):
            self._discard(connection)  # it ended meanwhile, or does not answer: trying again is a question of time
            return None
        except BaseException:
            self._discard(connection)
            raise

    def _unanswered(self, do: str, timeout_s: float | None = None) -> NoAnswerError:
        when = "in time" if timeout_s is None else f"within {timeout_s:.3g} s"
        return NoAnswerError(
            f"the flusher did not answer {do!r} {when}: it is stopped, hangs, or is short of processors. Its log is "
            f"{self._directory / LOG_NAME}; once its process has ended, the next one goes on with what is pending"
        )

    def _failed(self, problem: str, *, transient: bool) -> StoreError:
        log = self._directory / LOG_NAME
        words = tail(log)
        return StoreError(
            f"{problem}. The end of its log, {log}:\n{words}" if words else f"{problem}. It has no log, {log}",
            transient=transient,
            path=str(log),
        )

    def _renew(self) -> None:
        """In a forked child: its parent's connections are closed, so that the flusher sees when the parent hangs up."""
        _close_all(self._open)


def _outcome(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The content of an answer. Raises the error that it describes."""
    outcome = answer.get("ok")
    if isinstance(outcome, dict):
        return outcome
    raise wire.error_from(answer.get("error"))


def _seconds_until(ends: float | None) -> float | None:
    # Never 0, which would mean not to wait, and raise something else.
    return None if ends is None else max(ends - time.monotonic(), 0.001)


def _close_all(connections: set[socket.socket]) -> None:
    while connections:
        connections.pop().close()
