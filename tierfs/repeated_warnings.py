"""Drop warnings that this process has logged in the last ten minutes, and the passwords of URLs in its log.

A process opens a store once for each filesystem instance, rank thread or set of options, and each meets the same
unreadable file or missing tier. So the loggers of this package drop a warning whose text equals that of an earlier one.
For a text with a number that changes, ``extra={"repeat_of": ...}`` gives the key to compare instead.
"""

from __future__ import annotations

import logging
import threading
import time

from tierfs.errors import without_passwords

SAID_AGAIN_S = 600.0
SAID_MAX = 1000


def hide_passwords(record: logging.LogRecord) -> bool:
    """A filter for loggers: passes every record, without the passwords of the URLs in its text."""
    text = record.getMessage()
    if (shown := without_passwords(text)) != text:
        record.msg, record.args = shown, None
    return True


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
        """Make every warning be logged again."""
        with self._lock:
            self._said.clear()


_repeats = _Repeats()


def drop_repeats() -> None:
    """Make the loggers of this package drop repeats and passwords. Idempotent."""
    for room in ("", ".codec", ".dcp", ".flush", ".fs", ".local", ".objects", ".plugs", ".store"):
        logging.getLogger(f"tierfs{room}").addFilter(hide_passwords)
        logging.getLogger(f"tierfs{room}").addFilter(_repeats)


forget_repeats = _repeats.forget
