"""Retry failed requests that may succeed when they are sent again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from random import Random, SystemRandom

from tierfs.clock import Clock, SystemClock
from tierfs.errors import InvalidInputError, StoreError
from tierfs.objects.protocol import Listed, ObjectTier
from tierfs.objects.wrappers.wrapper import Answer, Request, WrappedObjects

ATTEMPTS = 5
_THROTTLED_S_MIN = 1.0  # GCS takes one write of an object a second: https://cloud.google.com/storage/quotas#objects

_log = logging.getLogger("tierfs.objects")


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
