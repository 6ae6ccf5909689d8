"""The clock as an argument, so that tests control time; a pace by that clock; and the id of the host's boot."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Protocol

PACE_S = 1.0  # longest sleep of `Pace`, so that it notices a stop
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """A source of time."""

    def now_ns(self) -> int:
        """Return wall-clock nanoseconds since the epoch. May jump: store or show them, never subtract them."""

    def monotonic(self) -> float:
        """Return seconds that never decrease, for measuring durations."""

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``."""


class SystemClock:
    """The machine's clock."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        """Return seconds that never decrease.

        They include the time that the machine is suspended, because a lease at the object tier expires meanwhile, too.
        """
        return time.clock_gettime(_BOOT_CLOCK)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """A clock for tests that moves only when told to. ``sleep`` moves it."""

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s

    def now_ns(self) -> int:
        return int(self._now_s * 1_000_000_000)

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Advance the clock by ``seconds``."""
        self._now_s += seconds


class Pace:
    """Limits the bytes per second. Safe for use by many threads.

    Args:
        clock: The source of time.
        bandwidth: Bytes per second; None or 0 for no limit.
    """

    def __init__(self, clock: Clock, bandwidth: float | None) -> None:
        self._clock, self._bandwidth = clock, bandwidth
        self._lock = threading.Lock()
        self._next = clock.monotonic()
        self._is_stopped = False

    def take(self, count: int) -> None:
        """Wait as long as this many bytes take after those of earlier calls, or until `stop`."""
        if not self._bandwidth:
            return
        with self._lock:
            self._next = end = max(self._clock.monotonic(), self._next) + count / self._bandwidth
        while not self._is_stopped and (left := end - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, PACE_S))

    def stop(self) -> None:
        """Let all calls of `take` return soon."""
        self._is_stopped = True


@functools.cache
def boot_id() -> str:
    """Return the id of the current boot of the kernel, in hex."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
