"""The clock as an argument, so that tests control time; and the id of the host's boot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

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


def boot_id() -> str:
    """Return the id of the current boot of the kernel, in hex."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
