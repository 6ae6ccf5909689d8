"""Warnings that a process has logged are not logged again for a while, however many instances and threads find the same.

A process opens a store once for each filesystem instance, rank thread or set of options, and each of them meets the same
unreadable file or missing tier. Loggers of this package drop a warning whose text is that of an earlier one. Where the text has a
number that changes, ``extra={"repeat_of": ...}`` says what it is a repeat of.
"""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["drop_repeats", "forget_repeats"]

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
    "tierfs.store",
)


class _Repeats(logging.Filter):
    """Lets a warning pass if none with its text was logged lately. Safe for use by many threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._said: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter.filter`."""
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
        """Log everything once more."""
        with self._lock:
            self._said.clear()


_repeats = _Repeats()


def drop_repeats() -> None:
    """Have the loggers of this package do so. May be called again."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_repeats)


def forget_repeats() -> None:
    """Have every warning logged once more."""
    _repeats.forget()
