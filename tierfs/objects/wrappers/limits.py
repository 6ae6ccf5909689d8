"""Bound the number of requests in flight, retry those that may succeed when they are sent again, and count them all."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from random import Random, SystemRandom

from tierfs.clock import Clock, SystemClock
from tierfs.errors import AlreadyExistsError, ConflictError, InvalidInputError, NotFoundError, StoreError, TierfsError
from tierfs.objects.protocol import Listed, ObjectInfo, ObjectTier
from tierfs.objects.wrappers.wrapper import METHODS, Answer, Request, WrappedObjects, batch_sizes

ADAPT_S = 1.0
"""The limit is halved or raised at most once in this time: object stores themselves take seconds to add capacity."""

ATTEMPTS = 5
_THROTTLED_S_MIN = 1.0  # GCS takes one write of an object a second: https://cloud.google.com/storage/quotas#objects
_ANSWERS = (AlreadyExistsError, ConflictError, NotFoundError)
"""Errors that a healthy object tier raises too."""
_log = logging.getLogger("tierfs.objects")


class LimitedObjects(WrappedObjects):
    """Bounds the number of requests in flight.

    If the endpoint asks for fewer requests, the limit is halved. It rises by one after each second in which the
    endpoint answers (additive increase, multiplicative decrease). Only a request that was sent at least a second after
    the last halving counts for either: earlier requests say nothing about the new limit. So a burst of refusals halves
    it once.

    A listing counts as a request while it fetches a page, not while its consumer works on the objects.

    Attributes:
        concurrency: Largest number of requests in flight.
        limit: The same at present: from 1 to ``concurrency``.
        throttled: How often the endpoint asked for fewer requests.
    """

    def __init__(self, inner: ObjectTier, *, concurrency: int = 32, clock: Clock | None = None) -> None:
        if concurrency < 1:
            raise InvalidInputError("concurrency must be at least 1")
        super().__init__(inner)
        self.concurrency = concurrency
        self.limit = concurrency
        self.throttled = 0
        self._clock: Clock = clock or SystemClock()
        self._halve_from_s = self._raise_from_s = -math.inf
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._in_flight = 0

    def __repr__(self) -> str:
        now = f" ({self.limit} for now, throttled {self.throttled} times)" if self.throttled else ""
        return f"LimitedObjects({self.inner!r}, concurrency={self.concurrency}{now})"

    def _around(self, request: Request, send: Callable[[], Answer]) -> Answer:
        with self._place():
            return send()

    def _around_list(self, request: Request, send: Callable[[], Iterator[Listed]]) -> Iterator[Listed]:
        with self._place():
            listing = send()
        for size in batch_sizes():
            with self._place():
                batch = list(itertools.islice(listing, size))
            if not batch:
                return
            yield from batch

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Wait for a place, hold it, and adapt the limit to the outcome of the request."""
        with self._room:
            self._room.wait_for(lambda: self._in_flight < self.limit)
            self._in_flight += 1
        sent_s = self._clock.monotonic()
        answered = False
        try:
            yield
            answered = True
        except StoreError as error:
            if error.throttled:
                self._halve(sent_s)
            raise
        except TierfsError:  # an answer as well: no object is there, for example
            answered = True
            raise
        finally:
            with self._room:
                self._in_flight -= 1
                if answered:
                    self._add_one(sent_s)
                self._room.notify()

    def _halve(self, sent_s: float) -> None:
        with self._lock:
            self.throttled += 1
            is_first = self.throttled == 1
            if sent_s >= self._halve_from_s:
                self.limit = max(1, self.limit // 2)
                self._halve_from_s = self._clock.monotonic() + ADAPT_S
        if is_first:
            _log.warning(
                "the object tier asks for fewer requests: sending at most %d at a time instead of %d, and more again "
                "as it answers",
                self.limit,
                self.concurrency,
            )

    def _add_one(self, sent_s: float) -> None:
        """Raise the limit by one if a second has passed. The caller holds the lock."""
        now_s = self._clock.monotonic()
        if self.limit < self.concurrency and sent_s >= self._halve_from_s and now_s >= self._raise_from_s:
            self.limit += 1
            self._raise_from_s = now_s + ADAPT_S
            self._room.notify()


class RetryingObjects(WrappedObjects):
    """Retries transient failures, each after a random wait up to a bound that doubles ("full jitter").

    If the endpoint asks for a pause (Retry-After), the pause is added to the random wait, up to ``delay_s_max``. If it
    asks for fewer requests without a pause, one second is added.

    Outcomes are not interpreted. If a conditional put took effect but its answer was lost, the second attempt finds the
    object of the first. Its `AlreadyExistsError` or `ConflictError` goes to the caller, which can tell the difference.

    Args:
        attempts: How often a request is sent at most.
        delay_s: Bound of the first wait.
        delay_s_max: The largest bound, and the longest pause that an endpoint may ask for.
        random: Draws the length of each wait.

    Attributes:
        retries: How many requests were sent again.
    """

    def __init__(
        self,
        inner: ObjectTier,
        *,
        attempts: int = ATTEMPTS,
        delay_s: float = 0.1,
        delay_s_max: float = 10.0,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        if attempts < 1 or delay_s < 0 or delay_s_max < 0:
            raise InvalidInputError("attempts must be at least 1, and delays at least 0")
        super().__init__(inner)
        self.attempts = attempts
        self.delay_s = delay_s
        self.delay_s_max = delay_s_max
        self.retries = 0
        self._clock: Clock = clock or SystemClock()
        # A stateless generator: with copies of one state, forked ranks would wait equally long and retry together.
        self._random = random or SystemRandom()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        limits = f"attempts={self.attempts}, delay_s={self.delay_s:g}, delay_s_max={self.delay_s_max:g}"
        return f"RetryingObjects({self.inner!r}, {limits})"

    def _around(self, request: Request, send: Callable[[], Answer]) -> Answer:
        attempt = 1
        while True:
            try:
                return send()
            except StoreError as error:
                if not self._wait(request, attempt, error):
                    raise
            attempt += 1

    def _around_list(self, request: Request, send: Callable[[], Iterator[Listed]]) -> Iterator[Listed]:
        # Listings have no order, so a failed listing starts again, and skips the keys that it has already yielded.
        given: set[str] = set()
        attempt = 1
        while True:
            try:
                for listed in send():
                    if listed.key not in given:
                        given.add(listed.key)
                        yield listed
            except StoreError as error:
                if not self._wait(request, attempt, error):
                    raise
            else:
                return
            attempt += 1

    def _wait(self, request: Request, attempt: int, error: StoreError) -> bool:
        """Wait before the next attempt. Return False if there is none."""
        if not error.transient or attempt >= self.attempts:
            return False
        bound_s = min(self.delay_s_max, self.delay_s * 2 ** (attempt - 1))
        with self._lock:
            self.retries += 1
            asked_s = error.retry_after_s or (_THROTTLED_S_MIN if error.throttled else 0.0)
            wait_s = self._random.uniform(0, bound_s) + min(asked_s, self.delay_s_max)
        _log.warning(
            "%s %s failed, attempt %d of %d, retrying in %.2f s: %s",
            request.method,
            request.key,
            attempt,
            self.attempts,
            wait_s,
            error,
        )
        self._clock.sleep(wait_s)
        return True


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
