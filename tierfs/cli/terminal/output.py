"""Print results, as JSON for machines or aligned columns for people; describe errors; write the log to stderr."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import IO, Any

from tierfs.cli.terminal.progress import print_above
from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    TierfsError,
    without_passwords,
)
from tierfs.format.keys import DESCRIPTOR
from tierfs.units import format_bytes

_BOLD, _GREEN, _YELLOW, _RED = 1, 32, 33, 31  # of the terminal's palette
# The style of each word in a column of states.
_STYLES = dict.fromkeys(("ok", "complete", "kept", "object", "running"), _GREEN)
_STYLES |= dict.fromkeys(("note", "foreign", "local", "none", "not kept", "staged", "would go", "yes"), _YELLOW)
_STYLES |= dict.fromkeys(("problem", "damaged", "failed", "incomplete", "missing"), _RED)

_BY_NUMBER: dict[int, type[TierfsError]] = {
    errno.ENOSPC: CapacityError,
    errno.EDQUOT: CapacityError,
    errno.EROFS: ReadOnlyError,
    errno.ENAMETOOLONG: InvalidInputError,
    errno.ELOOP: InvalidInputError,
}
_VERIFY = "`tierfs verify`"
_REPAIR = "`tierfs repair URL --from COPY` restores it"
TIMEOUT_KIND = "timeout"
TIMEOUT_EXIT_CODE = 11
_NEXT_STEP: dict[type[TierfsError], str] = {
    NotFoundError: "check the path",
    AlreadyExistsError: "choose another name, or remove it",
    ReadOnlyError: "check the rights of the file and its directory",
    InvalidInputError: "check the path",
    CapacityError: "free some room and try again",
}
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# Attributes of every record. Callers passed all others as ``extra``.
_ORDINARY = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--json`` on a parser or an argument group."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


def print_result(arguments: argparse.Namespace, document: object, *lines: str, code: int = 0) -> int:
    """Print the document with ``--json``, else the lines. Return ``code``, the exit code."""
    if arguments.json:
        print_json(document)
    elif lines:
        print("\n".join(lines))
    return code


def counted(files: int, size: int, new_bytes: int | None = None) -> str:
    """Describe a number of files and their bytes; and how many of the bytes the object tier did not have."""
    new = "" if new_bytes is None else f" ({format_bytes(new_bytes)} new)"
    return f"{files} file{'s' * (files != 1)}, {format_bytes(size)}{new}"


def align(
    rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), has_head: bool = False, states: Sequence[int] = ()
) -> list[str]:
    """Format rows as lines with aligned columns, for stdout. Lines are never wrapped or cut.

    Args:
        rows: Each with the same number of cells.
        right: Indices of the columns to align right.
        has_head: Whether the first row names the columns. It is bold on a terminal that shows colours.
        states: Indices of the columns of states. Their words are coloured on such a terminal.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shows_colors = _shows_colors(sys.stdout)

    def shown(number: int, index: int, cell: str) -> str:
        room = " " * (widths[index] - len(cell))
        style = _BOLD if has_head and not number else _STYLES.get(cell) if index in states else None
        if style and shows_colors and cell:
            cell = f"\x1b[{style}m{cell}\x1b[0m"
        return room + cell if index in right else cell + room

    return ["  ".join(shown(number, *each) for each in enumerate(row)).rstrip() for number, row in enumerate(rows)]


def colored(text: str, state: str, stream: IO[str] | None = None) -> str:
    """Colour a text as ``ok``, ``note`` or ``problem`` for a stream, by default stdout.

    It is not coloured if ``NO_COLOR`` is set, ``TERM`` is ``dumb``, or the stream is not a terminal.
    """
    return f"\x1b[{_STYLES[state]}m{text}\x1b[0m" if _shows_colors(stream or sys.stdout) else text


def _shows_colors(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def format_time(time_ns: int, *, precise: bool = False) -> str:
    """Format nanoseconds since the epoch as ISO 8601 in UTC, to the second, or if ``precise``, to the microsecond."""
    epoch = datetime(1970, 1, 1)  # noqa: DTZ001 - the time is UTC, and the Z is added below
    moment = epoch + timedelta(microseconds=time_ns // 1000)
    return moment.isoformat(timespec="microseconds" if precise else "seconds") + "Z"


def printable(name: str) -> str:
    """Escape characters that do not print, so that a name fits on one line and controls no terminal."""
    if name.isprintable():
        return name
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


@dataclass(frozen=True, slots=True)
class Failure:
    """The report of an error.

    Attributes:
        kind: Category, as in `tierfs.errors`, or ``timeout``.
        message: What went wrong, where, and what to do next.
        path: The affected path, or None.
        exit_code: Exit code of the process.
    """

    kind: str
    message: str
    path: str | None
    exit_code: int


def describe(error: TierfsError | OSError) -> Failure:
    """Describe an error. An `OSError` gets the category of the matching tierfs error."""
    if isinstance(error, TierfsError):
        message = str(error)
        if isinstance(error, CorruptionError) and _VERIFY not in message and "tierfs repair" not in message:
            is_descriptor = f"{DESCRIPTOR}: " in message  # without it, no other command opens the store
            message += f": {_REPAIR}" if is_descriptor else f": {_VERIFY} lists all damage"
        return Failure(error.kind, message, error.path, error.exit_code)
    if isinstance(error, TimeoutError) and error.errno is None:
        # A wait timed out and the work goes on: nothing failed, but the command did not do its task.
        return Failure(TIMEOUT_KIND, without_passwords(str(error)), None, TIMEOUT_EXIT_CODE)
    category = _category(error)
    name = error.filename2 if error.filename2 is not None else error.filename
    path = None if name is None or isinstance(name, int) else without_passwords(os.fsdecode(name))
    words = [path, error.strerror or str(error) or type(error).__name__, _NEXT_STEP.get(category)]
    message = without_passwords(": ".join(word for word in words if word))
    return Failure(category.kind, message, path, category.exit_code)


def _category(error: OSError) -> type[TierfsError]:
    if error.errno in _BY_NUMBER:
        return _BY_NUMBER[error.errno]
    match error:
        case FileNotFoundError():
            return NotFoundError
        case FileExistsError():
            return AlreadyExistsError
        case PermissionError():
            return ReadOnlyError
        case IsADirectoryError() | NotADirectoryError():
            return InvalidInputError
    return TierfsError


def _text(record: logging.LogRecord) -> str:
    return f"tierfs: {record.levelname.lower()}: {logging.Formatter().format(record)}"


def _key_value(record: logging.LogRecord) -> str:
    """Return one line of ``key=value`` pairs. A value that is not a single word is quoted as in JSON."""
    return " ".join(f"{key}={_word(value)}" for key, value in _fields(record).items())


def _word(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    is_word = text.isprintable() and text and not set(text) & set(' "=\\')
    return text if is_word else json.dumps(text)


def _json(record: logging.LogRecord) -> str:
    return json.dumps(_fields(record), default=str)


FORMATS: dict[str, Callable[[logging.LogRecord], str]] = {"text": _text, "logfmt": _key_value, "json": _json}
"""The formats of a log, by name: how each writes an event as a line."""


class _Handler(logging.Handler):
    """Writes to the current ``sys.stderr``, above the progress bar if one is shown."""

    def __init__(self, write: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        line = without_passwords(self._write(record))
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
    handler = _Handler(FORMATS[wanted_format or format_name])
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
