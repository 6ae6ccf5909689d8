"""Count the requests to an object tier, and measure how long they take."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

from tierfs.clock import Clock, SystemClock
from tierfs.errors import AlreadyExistsError, ConflictError, NotFoundError
from tierfs.objects.protocol import Listed, ObjectInfo, ObjectTier
from tierfs.objects.wrappers.wrapper import METHODS, Answer, Request, WrappedObjects, batch_sizes

_ANSWERS = (AlreadyExistsError, ConflictError, NotFoundError)
"""Errors that a healthy object tier raises too."""


class MeasuredObjects(WrappedObjects):
    """Counts requests, errors, bytes and seconds per method.

    An answer that an object is missing, exists or has changed is not an error. Bytes are those of objects, in
    successful requests. Seconds are summed over all threads, so they may pass faster than the clock. The time to
    consume a stream is included. A listing is one request.
    """

    def __init__(self, inner: ObjectTier, clock: Clock | None = None) -> None:
        super().__init__(inner)
        self._clock: Clock = clock or SystemClock()
        self._counts: dict[str, dict[str, int | float]] = {
            method: {"requests": 0, "errors": 0, "bytes": 0, "seconds": 0.0} for method in METHODS
        }
        self._lock = threading.Lock()

    def snapshot(self) -> dict[str, dict[str, int | float]]:
        """Return the counts since the tier was made: by method ``requests``, ``errors``, ``bytes`` and ``seconds``."""
        with self._lock:
            return {method: dict(counts) for method, counts in self._counts.items()}

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        content, info = super().read(key, limit)
        self._count("read", size=len(content))
        return content, info

    def _around(self, request: Request, send: Callable[[], Answer]) -> Answer:
        started_s = self._clock.monotonic()
        errors, size = 1, 0
        try:
            answer = send()
            errors, size = 0, request.size
        except _ANSWERS:
            errors = 0
            raise
        finally:
            seconds = self._clock.monotonic() - started_s
            self._count(request.method, requests=1, errors=errors, size=size, seconds=seconds)
        return answer

    def _around_list(self, request: Request, send: Callable[[], Iterator[Listed]]) -> Iterator[Listed]:
        self._count("list", requests=1)
        listing: Iterator[Listed] | None = None
        for size in batch_sizes():
            started_s = self._clock.monotonic()
            errors = 1
            try:
                listing = listing or send()
                batch = list(itertools.islice(listing, size))
                errors = 0
            finally:
                self._count("list", errors=errors, seconds=self._clock.monotonic() - started_s)
            if not batch:
                return
            yield from batch

    def _count(self, method: str, *, requests: int = 0, errors: int = 0, size: int = 0, seconds: float = 0.0) -> None:
        with self._lock:
            counts = self._counts[method]
            counts["requests"] += requests
            counts["errors"] += errors
            counts["bytes"] += size
            counts["seconds"] += seconds
