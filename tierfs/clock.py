"""Time as an argument, so that tests decide what time it is; and what counts until the next start of the host alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock", "boot_id"]


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Where the code gets its time from."""

    def now_ns(self) -> int:
        """Wall-clock nanoseconds since the epoch. May jump; only ever stored or shown, never subtracted."""

    def monotonic(self) -> float:
        """Seconds that only grow; what durations are measured with."""

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""


class SystemClock:
    """The machine's own clock."""

    def now_ns(self) -> int:
        """See `Clock.now_ns`."""
        return time.time_ns()

    def monotonic(self) -> float:
        """See `Clock.monotonic`. Goes on while the machine is suspended: a lease at the object tier runs out then, too."""
        return time.clock_gettime(_BOOT_CLOCK)

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when told to. ``sleep`` moves it."""

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s

    def now_ns(self) -> int:
        """See `Clock.now_ns`."""
        return int(self._now_s * 1_000_000_000)

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Move the clock on by ``seconds``."""
        self._now_s += seconds


def boot_id() -> str:
    """Which run of the kernel this is; hex."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
