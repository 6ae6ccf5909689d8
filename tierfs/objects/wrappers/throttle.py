"""Bound the number of requests to an object tier that are in flight."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator

from tierfs.clock import Clock, SystemClock
from tierfs.errors import InvalidInputError, StoreError, TierfsError
from tierfs.objects.protocol import Listed, ObjectTier
from tierfs.objects.wrappers.wrapper import Answer, Request, WrappedObjects, batch_sizes

ADAPT_S = 1.0
"""The limit is halved or raised at most once in this time: object stores themselves take seconds to add capacity."""

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

    def __init__(
        self,
        inner: ObjectTier,
        *,
        concurrency: int = 32,
        clock: Clock | None = None,
    ) -> None:
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
