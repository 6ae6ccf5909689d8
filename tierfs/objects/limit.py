"""Bound what is asked of an object tier at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from tierfs.clock import Clock, SystemClock
from tierfs.errors import InvalidInputError
from tierfs.forks import renew_in_children
from tierfs.objects.protocol import Listed, ObjectInfo, ObjectTier
from tierfs.objects.wrapper import Answer, Request, WrappedObjects
from tierfs.units import format_bytes

__all__ = ["LimitedObjects"]

BURST_S = 1.0
"""An idle link saves up this many seconds of its rate."""


class LimitedObjects(WrappedObjects):
    """Lets a bounded number of requests through at a time, and a bounded number of bytes per second.

    Bytes are those of objects, put, got or read; a read pays for its bytes when it knows how many there are. A listing
    counts as a request while it is fetching, not while its consumer works on what it gave.

    Args:
        inner: The tier to send to.
        concurrency: Requests in flight at most.
        bytes_per_s: Rate, averaged over more than a second; ``None`` for no limit.
        clock: What waits.
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
        self._clock: Clock = clock or SystemClock()
        self._free_at_s = self._clock.monotonic() - BURST_S
        self._renew()
        renew_in_children(self)

    def __repr__(self) -> str:
        rate = "unlimited" if self.bytes_per_s is None else f"{format_bytes(int(self.bytes_per_s))}/s"
        return f"LimitedObjects({self.inner!r}, concurrency={self.concurrency}, bandwidth={rate})"

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self.concurrency)

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        """See `ObjectTier.read`."""
        content, info = super().read(key, limit)
        self._pass(len(content))
        return content, info

    def _around(self, request: Request, send: Callable[[], Answer]) -> Answer:
        self._pass(request.size)
        with self._slots:
            return send()

    def _around_list(self, request: Request, send: Callable[[], Iterator[Listed]]) -> Iterator[Listed]:
        with self._slots:
            listing = send()
        while True:
            with self._slots:
                listed = next(listing, None)
            if listed is None:
                return
            yield listed

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
