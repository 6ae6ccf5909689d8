"""Bound what is asked of an object tier at a time."""

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

__all__ = ["LimitedObjects"]

ADAPT_S = 1.0
"""The limit is halved or raised once in so many seconds: object stores take seconds to make room themselves."""

_log = logging.getLogger("tierfs.objects")


class LimitedObjects(WrappedObjects):
    """Lets a bounded number of requests through at a time.

    Where the endpoint asks for fewer requests, half as many are let through, and one more after each second in which
    it answers (additive increase, multiplicative decrease). Only a request that was sent a second after the limit was
    halved counts for either: what was in flight by then says nothing of the new limit, so a burst counts once.

    A listing counts as a request while it is fetching, not while its consumer works on what it gave.

    Args:
        inner: The tier to send to.
        concurrency: Requests in flight at most.
        clock: For the waits.

    Attributes:
        limit: Requests in flight at most, for now: from 1 to ``concurrency``.
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
        """Wait for a place, hold it, and learn from how the request went."""
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
        except TierfsError:  # that something is absent, for example
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
                "the object tier asks for fewer requests: %d at a time instead of %d, and more again as it answers",
                self.limit,
                self.concurrency,
            )

    def _add_one(self, sent_s: float) -> None:
        """Let one more request through, if it is time; the lock is held."""
        now_s = self._clock.monotonic()
        if self.limit < self.concurrency and sent_s >= self._halve_from_s and now_s >= self._raise_from_s:
            self.limit += 1
            self._raise_from_s = now_s + ADAPT_S
            self._room.notify()
