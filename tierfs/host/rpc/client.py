"""The client of the flusher: finds it, starts it if none runs, replaces an older one, and sends it requests.

Each request uses a connection of its own, and a few idle connections are kept for the next requests. So threads do not
wait for each other. All requests may be repeated. If a connection breaks before the answer, the client repeats the
request to the flusher that runs then.
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
from typing import Any, NoReturn

from tierfs._fork import renew_in_children
from tierfs.errors import FormatError, StoreError
from tierfs.host.host import ExclusiveLock
from tierfs.host.rpc import protocol as wire
from tierfs.host.rpc.launch import LOG_NAME, Launched, tail
from tierfs.host.rpc.protocol import LOCK_NAME

START_TIMEOUT_S = 30.0
ANSWER_S = 1.0
"""Time that a client gives the flusher, beyond a timeout in its request, to report the timeout."""
IDLE_MAX = 4
REPEATS_MAX = 1  # repeats after a crash of the flusher, because the request may be its cause
ATTEMPTS_MAX = 20
_LAUNCH_LOCK_NAME = "launch.lock"
_UNWATCHED_S = 1.0
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.002, 0.02


class NoAnswerError(TimeoutError):
    """The flusher did not answer in time: it is stopped, hangs, or cannot be started.

    A timeout that the flusher itself reports is a plain TimeoutError.
    """


class _BrokenError(Exception):
    """The connection ended before the answer."""


class _EndedError(_BrokenError):
    """The connection ended because the flusher ended in order, or the flusher never received the request."""


def is_flusher_running(directory: Path) -> bool:
    """Return whether a process holds the lock of the flusher of the store with this directory on the host."""
    if not (directory / LOCK_NAME).exists():
        return False
    lock = ExclusiveLock(directory / LOCK_NAME)
    if not lock.acquire():
        return True
    lock.release()
    return False


class FlusherClient:
    """Sends requests to the flusher of one store on this host. Thread-safe.

    Args:
        directory: The store's directory on this host, absolute.
        launch: Starts a flusher. Only one process at a time calls it. Returns the process, so that the client notices
            its end; None if there is no process to watch, for example for a thread.
        version: Version of this tierfs.
        hello: Returns the first message of each connection, as JSON values; it contains credentials.
        start_timeout_s: How long to wait for any answer from a flusher, in seconds.
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
        self._open: set[socket.socket] = set()  # all connections, idle or not
        self._outdated: set[socket.socket] = set()  # open connections that began with an older hello
        self._finalizer = weakref.finalize(self, _close_all, self._open)
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"FlusherClient({str(self._directory)!r}, {len(self._open)} connections, {IDLE_MAX} idle at most)"

    def __enter__(self) -> FlusherClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed after its request."""
        with self._lock:
            self._is_closed = True
        self._forget_idle()

    def greet_again(self) -> None:
        """Open new connections for all further requests, because the content of the hello has changed."""
        with self._lock:
            self._outdated = set(self._open)
        self._forget_idle()

    @property
    def ends_with_us(self) -> bool:
        """Whether the flusher is a thread of this process, and runs."""
        return False

    def hand_over(self, options: dict[str, Any], *, writes: bool, codecs: str | None = None) -> None:
        """Do nothing: a client that can start a flusher sends these options for the object tier."""

    def is_running(self) -> bool:
        return is_flusher_running(self._directory)

    def request(
        self, do: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Send a request to the flusher, and wait for its answer.

        Args:
            do: Name of the request, which must be idempotent.
            arguments: JSON values that fit into one message.
            timeout_s: Limit for the whole call, in seconds. The client then closes the connection, and the flusher
                notices.

        Raises:
            TierfsError: The flusher raised it.
            NoAnswerError: There was no answer in time.
            TimeoutError: The flusher raised it.
            StoreError: No flusher could be started, or each one ended during the request. The message names the log.
            InvalidInputError: The request is too large.
            ReadOnlyError: A process of another user listens in place of the flusher.
        """
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        request = {"do": do, "arguments": dict(arguments or {})}
        attempts = crashes = 0
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        while True:
            is_fresh = connection is None
            if connection is None:
                connection = self._connect(ends, do)
            try:
                answer = self._ask(connection, request, ends)
            except _BrokenError as error:
                self._discard(connection)
                self._forget_idle()  # the idle connections lead to the same flusher
                connection = None
                attempts += 1
                crashes += is_fresh and not isinstance(error, _EndedError)
                if crashes > REPEATS_MAX or attempts >= ATTEMPTS_MAX:
                    problem = f"the flusher ended {attempts} times while it was asked to {do}"
                    raise self._failed(problem) from error
                # A newer client that ended the flusher is to start the next one: see `_connect`.
                time.sleep(min(_PAUSE_S_MIN * 2**attempts, _PAUSE_S_MAX))
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
        """Send one request on this connection and wait for its answer.

        Raises:
            _BrokenError: The connection ended before the answer.
            TimeoutError: There was no answer before ``ends``.
        """
        number = next(self._numbers)
        packet = wire.encode({"id": number, **request})
        try:
            connection.settimeout(_seconds_until(ends))
            wire.send(connection, packet)
            connection.settimeout(_seconds_until(ends))
            answer = wire.receive(connection)
        except BrokenPipeError as error:
            raise _EndedError from error  # only sending raises it
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

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < IDLE_MAX and connection not in self._outdated:
                self._idle.append(connection)
                return
        self._discard(connection)

    def _discard(self, connection: socket.socket) -> None:
        self._open.discard(connection)
        self._outdated.discard(connection)
        # Closing is not enough: a process that another thread is starting may have a copy of the descriptor.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _forget_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._discard(connection)

    def _connect(self, request_ends: float | None, do: str) -> socket.socket:
        """Connect to a flusher that is not older than this client, and send the hello. Start a flusher if needed."""
        ends = time.monotonic() + self._start_timeout_s
        ends = ends if request_ends is None else min(ends, request_ends)
        pause_s = _PAUSE_S_MIN
        while True:
            connection = self._dial(ends) or self._start(ends)
            theirs = None if connection is None else self._greet(connection, ends)
            if connection is not None and theirs is not None:
                if theirs >= wire.version_of(self._version):
                    return connection
                try:
                    with contextlib.suppress(_BrokenError, TimeoutError):  # another client was faster, or it hangs
                        _outcome(self._ask(connection, {"do": "retire"}, ends))
                    pause_s = _PAUSE_S_MIN
                finally:
                    self._discard(connection)
            if time.monotonic() >= ends:
                if ends == request_ends:
                    raise self._unanswered(do)
                problem = f"no flusher answered in {self._directory} within {self._start_timeout_s:g} s"
                raise self._failed(problem)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _start(self, ends: float) -> socket.socket | None:
        """Start a flusher, and connect to it. None: the caller must try again."""
        launching = ExclusiveLock(self._directory / _LAUNCH_LOCK_NAME)
        if not launching.acquire():
            return None  # another process is starting one
        try:
            running = ExclusiveLock(self._directory / LOCK_NAME)
            if not running.acquire():
                return None  # a flusher is about to listen, or about to end
            running.release()
            return self._launch_and_dial(ends)
        finally:
            launching.release()

    def _launch_and_dial(self, ends: float) -> socket.socket | None:
        launched = self._launch()
        if launched is None:
            # It may have started, served other clients and ended again: then there is nothing to wait for.
            ends = min(ends, time.monotonic() + _UNWATCHED_S)
        pause_s = _PAUSE_S_MIN
        while time.monotonic() < ends:
            # Read the status before connecting: a process that has ended by then cannot start to listen.
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
                return None  # another flusher had the lock, or this one served other clients and ended
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _PAUSE_S_MAX)
        return None

    def _dial(self, ends: float) -> socket.socket | None:
        connection = wire.connect(self._directory, _seconds_until(ends))
        if connection is not None:
            self._open.add(connection)
        return connection

    def _greet(self, connection: socket.socket, ends: float) -> tuple[int, ...] | None:
        """Send the hello and return the flusher's version. If there is no answer, disconnect and return None."""
        try:
            hello = {"do": "hello", "arguments": {**self._hello(), "version": self._version}}
            return wire.version_of(_outcome(self._ask(connection, hello, ends)).get("version"))
        except (_BrokenError, TimeoutError):
            # the flusher ended meanwhile, or does not answer: the caller tries again until the timeout
            self._discard(connection)
            return None
        except BaseException:
            self._discard(connection)
            raise

    def _unanswered(self, do: str, timeout_s: float | None = None) -> NoAnswerError:
        when = "in time" if timeout_s is None else f"within {timeout_s:.3g} s"
        return NoAnswerError(
            f"the flusher did not answer {do!r} {when}: it is stopped, hangs, or lacks processor time. Its log is "
            f"{self._directory / LOG_NAME}; once its process has ended, the next one continues with the pending changes"
        )

    def _failed(self, problem: str) -> StoreError:
        log = self._directory / LOG_NAME
        words = tail(log)
        return StoreError(
            f"{problem}. The end of its log, {log}:\n{words}" if words else f"{problem}. It has no log, {log}",
            transient=True,
            path=str(log),
        )

    def _renew(self) -> None:
        """In a forked child: close the parent's connections, so that the flusher notices when the parent does."""
        _close_all(self._open)


def _outcome(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of an answer, or raise the error that it describes."""
    outcome = answer.get("ok")
    if isinstance(outcome, dict):
        return outcome
    raise wire.error_from(answer.get("error"))


def _seconds_until(ends: float | None) -> float | None:
    # Never 0, which would mean a non-blocking socket, and raise another error.
    return None if ends is None else max(ends - time.monotonic(), 0.001)


def _close_all(connections: set[socket.socket]) -> None:
    while connections:
        connections.pop().close()


_PAUSE_S = 0.02


def stop_flusher(directory: Path, version: str, *, timeout_s: float) -> bool:
    """Stop the flusher of one store after the steps in progress, and wait until it has ended. Return whether one ran.

    Pending changes stay where they are, for the next flusher.

    Raises:
        TimeoutError: It has not ended yet, but will.
        ReadOnlyError, StoreError: It cannot be asked.
    """
    ends = time.monotonic() + timeout_s
    with FlusherClient(directory, _start_none, version, dict) as client:
        if not client.is_running():
            return False
        try:
            client.request("stop", timeout_s=timeout_s)
        except StoreError:
            if client.is_running():
                raise
    while client.is_running():
        if time.monotonic() >= ends:
            raise TimeoutError(f"the flusher has not ended within {timeout_s:g} s: a step is still under way")
        time.sleep(_PAUSE_S)
    return True


def _start_none() -> NoReturn:
    raise StoreError("no flusher runs")
