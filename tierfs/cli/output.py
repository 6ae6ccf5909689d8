"""How results are printed: one JSON document for machines, aligned columns for people."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import IO

__all__ = ["add_json_argument", "align", "colored", "format_time", "print_json", "printable"]

_COLORS = {"ok": "32", "note": "33", "problem": "31"}


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--json``, for a parser or a group of it."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def print_json(document: object) -> None:
    """Print a value as one JSON document."""
    print(json.dumps(document, indent=2))


def align(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with aligned columns.

    Args:
        rows: Each with the same number of cells.
        right: Which columns are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def colored(text: str, state: str, stream: IO[str] | None = None) -> str:
    """Text in the colour of a state, on a terminal that shows colours: not with ``NO_COLOR``, nor ``TERM=dumb``, nor in a pipe.

    Args:
        text: To be coloured as a whole, after it was aligned.
        state: ``ok``, ``note`` or ``problem``.
        stream: Where it goes; stdout by default.
    """
    shows = (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    return f"\x1b[{_COLORS[state]}m{text}\x1b[0m" if shows else text


def format_time(time_ns: int, *, precise: bool = False) -> str:
    """Nanoseconds since the epoch as ISO 8601 in UTC, to the second, or ``precise`` to the microsecond."""
    epoch = datetime(1970, 1, 1)  # noqa: DTZ001 - UTC by what is added to it; the Z is written below
    moment = epoch + timedelta(microseconds=time_ns // 1000)
    return moment.isoformat(timespec="microseconds" if precise else "seconds") + "Z"


def printable(name: str) -> str:
    """A name as it can be shown on one line: control characters, which a terminal would obey, are escaped."""
    if name.isprintable():
        return name
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
