"""Drop warnings that this process has logged in the last ten minutes.

A process opens a store once for each filesystem instance, rank thread or set of options, and each meets the same
unreadable file or missing tier. So the loggers of this package drop a warning whose text equals that of an earlier one.
For a text with a number that changes, ``extra={"repeat_of": ...}`` gives the key to compare instead.
"""

from __future__ import annotations

import logging
import threading
import time

SAID_AGAIN_S = 600.0
SAID_MAX = 1000
_LOGGERS = (
    "tierfs",
    "tierfs.codec",
    "tierfs.dcp",
    "tierfs.flush",
    "tierfs.fs",
    "tierfs.local",
    "tierfs.objects",
    "tierfs.plugs",
    "tierfs.store",
)


class _Repeats(logging.Filter):
    """Passes a warning if none with its text was logged recently. Safe for use by many threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._said: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text = getattr(record, "repeat_of", None) or record.getMessage()
        key, now = (record.name, text), time.monotonic()
        with self._lock:
            said = self._said.get(key)
            if said is not None and now < said + SAID_AGAIN_S:
                return False
            self._said.pop(key, None)
            self._said[key] = now
            while len(self._said) > SAID_MAX:
                del self._said[next(iter(self._said))]
        return True

    def forget(self) -> None:
        with self._lock:
            self._said.clear()


_repeats = _Repeats()


def drop_repeats() -> None:
    """Make the loggers of this package drop repeats. Idempotent."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_repeats)


def forget_repeats() -> None:
    """Make every warning be logged again."""
    _repeats.forget()
