"""The log on stderr while a command runs. ``TIERFS_LOG`` sets how much of it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from tierfs.errors import InvalidInputError

__all__ = ["logging_to_stderr"]

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class _Handler(logging.Handler):
    """Writes to whatever stderr is now, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        line = f"tierfs: {record.levelname.lower()}: {self.format(record)}"
        if "tqdm" in sys.modules:
            from tqdm import tqdm  # noqa: PLC0415 - only where a bar is loaded anyway

            tqdm.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr)


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show tierfs's log records on stderr.

    Raises:
        InvalidInputError: ``TIERFS_LOG`` names no level.
    """
    level = os.environ.get("TIERFS_LOG", "").lower() or "warning"
    if level not in _LEVELS:
        raise InvalidInputError(f"TIERFS_LOG is {level!r}: set it to one of {', '.join(_LEVELS)}")
    logger = logging.getLogger("tierfs")
    handler = _Handler()
    previous = logger.level
    logger.setLevel(_LEVELS[level])
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous)
