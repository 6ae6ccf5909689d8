"""The threads of a mount, which read requests from the kernel and answer them.

A request may hang because the object tier hangs. A watching thread then answers it with EIO after a time limit. The
thread that hangs is abandoned and replaced, so the mount continues. An error of a handler becomes an errno, and never
ends a thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tierfs.mount.reading import Views
from tierfs.mount.requests import NO_ANSWER, SLOW, Answer, name_of
from tierfs.mount.wire import HEADER_BYTES, MAX_WRITE, OUT_HEADER, Opcode, RequestHeader, errno_of, refusal
from tierfs.threads import start_daemon

THREADS_FIRST = 2
THREADS_MAX = 32
LOST_MAX = 64
# After STUCK_S seconds a request (for example one that stores a file) does not count toward THREADS_MAX, so that
# another thread can start and serve other requests. At most STUCK_MAX requests are discounted in this way.
STUCK_S = 1.0
STUCK_MAX = 96
TIMEOUT_S = 30.0
SLOW_TIMEOUT_S = 600.0
LOOK_S = 0.5
# The kernel requires room for a header, the largest write and a page.
BUFFER_BYTES = MAX_WRITE + 8192
_logger = logging.getLogger("tierfs.mount")


@dataclass(slots=True, eq=False)
class _Underway:
    """A request that is being served.

    Attributes:
        more_s: Seconds to add to the time limit.
        lock: Held to send the answer, so that only one is sent.
    """

    header: RequestHeader
    body: memoryview
    begun_s: float
    more_s: float = 0.0
    is_answered: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Server:
    """Reads requests from ``/dev/fuse`` on several threads and answers them.

    Args:
        device: A descriptor of ``/dev/fuse`` that a mount is attached to.
        serve: Executes a request and returns the answer.
        timeout_s: Seconds after which a request is abandoned.
        slow_timeout_s: The same for requests that store or move whole files, or have begun to change the store.
        describe: Returns the operation and path of a request, for the log.
    """

    def __init__(
        self,
        device: int,
        serve: Callable[[RequestHeader, memoryview], Answer],
        *,
        timeout_s: float = TIMEOUT_S,
        slow_timeout_s: float = SLOW_TIMEOUT_S,
        describe: Callable[[RequestHeader, memoryview], str] = lambda header, _: name_of(header.opcode),
    ) -> None:
        self._device = device
        self._serve, self._describe = serve, describe
        self._timeout_s, self._slow_timeout_s = timeout_s, slow_timeout_s
        self._lock = threading.Lock()
        self._underway: dict[int, _Underway] = {}
        self._served_here = threading.local()
        self._threads = self._idle = self._lost = self._stuck = 0
        self.is_ready = threading.Event()
        self.ended = threading.Event()

    def __repr__(self) -> str:
        return f"Server({self._threads} threads, {len(self._underway)} requests, {self._lost} lost)"

    def start(self) -> None:
        for _ in range(THREADS_FIRST):
            self._start_thread()
        start_daemon(self._watch, name="mount-watch")

    def give_time(self, seconds: float) -> None:
        """Extend the time limit of the request that this thread is serving."""
        self._served_here.underway.more_s = seconds

    def begin_change(self) -> None:
        """Note that the request that this thread serves, if any, is about to change something.

        The longer time limit applies from then on.

        Raises:
            OSError: The request was abandoned, so its program has an error and the change must not happen (ETIMEDOUT).
                A RELEASE goes on: no program waits for it, and it has bytes to publish.
        """
        underway: _Underway | None = getattr(self._served_here, "underway", None)
        if underway is None or underway.header.opcode == Opcode.RELEASE:
            return
        with underway.lock:
            if underway.is_answered:
                raise refusal(errno.ETIMEDOUT, "the request was abandoned before it changed anything")
            if underway.header.opcode not in SLOW:
                underway.more_s = max(underway.more_s, self._slow_timeout_s - self._timeout_s)

    def _start_thread(self) -> None:
        with self._lock:
            self._threads += 1
            self._idle += 1
        if start_daemon(self._work, name="mount") is None:
            with self._lock:
                self._threads -= 1
                self._idle -= 1

    def _work(self) -> None:
        try:
            buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
            while not self.ended.is_set():
                try:
                    count = os.readv(self._device, [buffer])
                except OSError as error:
                    if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                        continue  # ENOENT: the request was interrupted before this read
                    if error.errno != errno.ENODEV:
                        _logger.error("the mount can no longer receive requests: %s", error)  # noqa: TRY400 - needs no traceback
                    self.ended.set()
                    return
                if not count:
                    self.ended.set()
                    return
                if not self._take(buffer[:count]):
                    return
        finally:
            with self._lock:
                self._threads -= 1

    def _take(self, request: memoryview) -> bool:
        """Serve one request. Return False if this thread was abandoned in the meantime."""
        header = RequestHeader.parse(request)
        with self._lock:
            self._idle -= 1
            is_last = self._needs_thread()
        if is_last:
            self._start_thread()
        body = request[HEADER_BYTES:]
        underway = self._served_here.underway = _Underway(header, body, time.monotonic())
        if header.opcode not in NO_ANSWER:
            self._underway[header.unique] = underway
        number, answer = 0, None
        try:
            answer = self._serve(header, body)
        except BaseException as error:  # noqa: BLE001 - any error of a handler becomes an errno
            number = errno_of(error, self._describe(header, body))
        try:
            is_ours = header.opcode in NO_ANSWER or self._answer(underway, number, answer)
        finally:
            if isinstance(answer, Views):
                answer.release()
        if header.opcode == Opcode.INIT and not number:
            self.is_ready.set()
        with self._lock:
            if not is_ours:
                self._lost -= 1
                return False
            self._idle += 1
        return True

    def _answer(self, underway: _Underway, number: int, answer: Answer) -> bool:
        """Send an answer, unless the request was answered before. Return whether this call answered it."""
        with underway.lock:
            if underway.is_answered:
                return False
            underway.is_answered = True
        self._underway.pop(underway.header.unique, None)
        parts: list[memoryview | bytes] = []
        if not number and answer is not None:
            parts = list(answer) if isinstance(answer, Views) else [answer]
        length = OUT_HEADER.size + sum(len(part) for part in parts)
        try:
            os.writev(self._device, [OUT_HEADER.pack(length, -number, underway.header.unique), *parts])
        except OSError as error:
            # ENOENT: the caller was interrupted and no longer waits. ENODEV: the store is unmounted.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                what = self._describe(underway.header, underway.body)
                _logger.error("%s could not be answered: %s", what, error)  # noqa: TRY400
                with contextlib.suppress(OSError):
                    os.write(self._device, OUT_HEADER.pack(OUT_HEADER.size, -errno.EIO, underway.header.unique))
        return True

    def _needs_thread(self) -> bool:
        """Whether no thread is idle and another one may start. The caller holds the lock."""
        return not self._idle and self._threads - self._lost - self._stuck < THREADS_MAX

    def _watch(self) -> None:
        while not self.ended.wait(LOOK_S):
            now_s = time.monotonic()
            requests = list(self._underway.values())
            # A request for a file that is being stored waits for that, so the longer limit applies to it too.
            slow_nodes = {underway.header.node for underway in requests if underway.header.opcode in SLOW}
            with self._lock:
                self._stuck = min(STUCK_MAX, sum(now_s - underway.begun_s > STUCK_S for underway in requests))
                needs_thread = self._needs_thread()
            if needs_thread:
                self._start_thread()
            for underway in requests:
                limit_s = self._slow_timeout_s if underway.header.node in slow_nodes else self._timeout_s
                limit_s += underway.more_s
                if now_s - underway.begun_s > limit_s:
                    self._give_up(underway, limit_s)

    def _give_up(self, underway: _Underway, limit_s: float) -> None:
        with self._lock:
            if self._lost >= LOST_MAX:
                return
            self._lost += 1
        if not self._answer(underway, errno.EIO, None):
            with self._lock:
                self._lost -= 1
            return
        _logger.error("%s was abandoned: no answer in %g s", self._describe(underway.header, underway.body), limit_s)
        self._start_thread()
