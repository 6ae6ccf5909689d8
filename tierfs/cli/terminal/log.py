"""Log to stderr while a command runs. ``TIERFS_LOG`` sets the level and the format: ``level[,format]``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from tierfs.cli.terminal.output import format_time
from tierfs.cli.terminal.progress import print_above
from tierfs.errors import InvalidInputError

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# Attributes of every record. Callers passed all others as ``extra``.
_ORDINARY = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class _Text(logging.Formatter):
    """The format for people."""

    def format(self, record: logging.LogRecord) -> str:
        return f"tierfs: {record.levelname.lower()}: {super().format(record)}"


class _KeyValue(logging.Formatter):
    """One line of ``key=value`` pairs per event. A value that is not a single word is quoted as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{key}={self._word(value)}" for key, value in _fields(record).items())

    @staticmethod
    def _word(value: object) -> str:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        is_word = text.isprintable() and text and not set(text) & set(' "=\\')
        return text if is_word else json.dumps(text)


class _Json(logging.Formatter):
    """One line with a JSON object per event."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), default=str)


FORMATS: dict[str, type[logging.Formatter]] = {"text": _Text, "logfmt": _KeyValue, "json": _Json}
"""The formats of a log, by name."""


class _Handler(logging.Handler):
    """Writes to the current ``sys.stderr``, above the progress bar if one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        # A full disk must not stop the work that is logged. A buffered stderr keeps part of the text that it could not
        # write, and writes it when there is room.
        with contextlib.suppress(OSError):
            print_above(line)


@contextlib.contextmanager
def logging_to_stderr(
    *, level: str = "warning", format: str = "text", wanted_format: str | None = None
) -> Iterator[None]:
    """Show tierfs's log records on stderr during a ``with`` block. A nested block replaces the outer block's log.

    Args:
        level: Least severe level to show, unless ``TIERFS_LOG`` names one.
        format: One of `FORMATS`, unless ``TIERFS_LOG`` names one.
        wanted_format: One of `FORMATS`; overrides ``TIERFS_LOG``.

    Raises:
        InvalidInputError: ``TIERFS_LOG`` names an unknown level or format.
    """
    level_name, _, format_name = os.environ.get("TIERFS_LOG", "").lower().partition(",")
    level_name, format_name = level_name.strip() or level, format_name.strip() or format
    if level_name not in _LEVELS or format_name not in FORMATS:
        raise InvalidInputError(
            f"TIERFS_LOG is {os.environ['TIERFS_LOG']!r}: set it to one of {', '.join(_LEVELS)}, optionally "
            f"followed by a comma and one of {', '.join(FORMATS)}"
        )
    logger = logging.getLogger("tierfs")
    handler = _Handler()
    handler.setFormatter(FORMATS[wanted_format or format_name]())
    previous_level, previous = logger.level, [each for each in logger.handlers if isinstance(each, _Handler)]
    logger.setLevel(_LEVELS[level_name])
    for each in previous:
        logger.removeHandler(each)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for each in previous:
            logger.addHandler(each)
        logger.setLevel(previous_level)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "time": format_time(int(record.created * 1e9), precise=True),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    fields |= {key: value for key, value in vars(record).items() if key not in _ORDINARY}
    if record.exc_info:
        fields["exception"] = logging.Formatter().formatException(record.exc_info)
    return fields
