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
from tierfs.objects.protocol import Listed, ObjectInfo, ObjectTier
from tierfs.objects.wrappers.wrapper import Answer, Request, WrappedObjects, batch_sizes
from tierfs.units import format_bytes

__all__ = ["LimitedObjects"]

BURST_S = 1.0
"""An idle link saves up this many seconds of its rate."""
ADAPT_S = 1.0
"""The limit is halved or raised once in so many seconds: object stores take seconds to make room themselves."""

_log = logging.getLogger("tierfs.objects")


class LimitedObjects(WrappedObjects):
    """Lets a bounded number of requests through at a time, and a bounded number of bytes per second.

    Where the endpoint asks for fewer requests, half as many are let through, and one more after each second in which
    it answers (additive increase, multiplicative decrease). Only a request that was sent a second after the limit was
    halved counts for either: what was in flight by then says nothing of the new limit, so a burst counts once.

    Bytes are those of objects, put, got or read; a read pays for its bytes when it knows how many there are. A listing
    counts as a request while it is fetching, not while its consumer works on what it gave.

    Args:
        inner: The tier to send to.
        concurrency: Requests in flight at most.
        bytes_per_s: Rate, averaged over more than a second; ``None`` for no limit.
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
        bytes_per_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        if concurrency < 1 or (bytes_per_s is not None and bytes_per_s <= 0):
            raise InvalidInputError("concurrency must be at least 1, and bytes_per_s more than 0")
        super().__init__(inner)
        self.concurrency = concurrency
        self.bytes_per_s = bytes_per_s
        self.limit = concurrency
        self.throttled = 0
        self._clock: Clock = clock or SystemClock()
        self._free_at_s = self._clock.monotonic() - BURST_S
        self._halve_from_s = self._raise_from_s = -math.inf
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._in_flight = 0

    def __repr__(self) -> str:
        rate = "unlimited" if self.bytes_per_s is None else f"{format_bytes(int(self.bytes_per_s))}/s"
        now = f" ({self.limit} for now, throttled {self.throttled} times)" if self.throttled else ""
        return f"LimitedObjects({self.inner!r}, concurrency={self.concurrency}{now}, bandwidth={rate})"

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        """See `ObjectTier.read`."""
        content, info = super().read(key, limit)
        self._pass(len(content))
        return content, info

    def _around(self, request: Request, send: Callable[[], Answer]) -> Answer:
        self._pass(request.size)
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

    def _pass(self, size: int) -> None:
        """Wait until the link has carried what was to go before, and take it for ``size`` bytes."""
        if self.bytes_per_s is None or not size:
            return
        with self._lock:
            now_s = self._clock.monotonic()
            self._free_at_s = max(self._free_at_s, now_s - BURST_S) + size / self.bytes_per_s
            wait_s = self._free_at_s - now_s
        if wait_s > 0:
            self._clock.sleep(wait_s)
