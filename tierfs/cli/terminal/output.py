"""Print results: one JSON document for machines, aligned columns for people."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import IO

WIDTH_MAX = 1 << 20  # columns of a line: no path is as long, so none is wrapped or cut
_COLORS = {"ok": 2, "note": 3, "problem": 1}  # green, yellow and red of the terminal's palette
# The meaning of each word in a column of states.
_MEANINGS = {word: word for word in _COLORS}
_MEANINGS |= dict.fromkeys(("complete", "kept", "object", "running"), "ok")
_MEANINGS |= dict.fromkeys(("foreign", "local", "none", "not kept", "staged", "would go", "yes"), "note")
_MEANINGS |= dict.fromkeys(("damaged", "failed", "incomplete", "missing"), "problem")


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--json`` on a parser or an argument group."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


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
    if rows and _shows_colors(sys.stdout):
        return _colored_table(rows, right=right, has_head=has_head, states=states)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _colored_table(
    rows: Sequence[Sequence[str]], *, right: Sequence[int], has_head: bool, states: Sequence[int]
) -> list[str]:
    from rich.console import Console  # noqa: PLC0415 - 40 ms, for a terminal only
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    # One row, whose cells are whole columns: rich takes 0.3 ms for each row that it draws.
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    columns = []
    for index, column in enumerate(zip(*rows, strict=True)):
        table.add_column(justify="right" if index in right else "left", no_wrap=True)
        cells = [Text(cell, _style(cell) if index in states else "") for cell in column]
        if has_head:
            cells[0].stylize("bold")
        columns.append(Text("\n").join(cells))
    table.add_row(*columns)
    console = Console(force_terminal=True, color_system="standard", width=WIDTH_MAX)
    with console.capture() as lines:
        console.print(table)
    return [line.rstrip() for line in lines.get().removesuffix("\n").split("\n")]


def _style(state: str) -> str:
    return f"color({_COLORS[_MEANINGS[state]]})" if state in _MEANINGS else ""


def colored(text: str, state: str, stream: IO[str] | None = None) -> str:
    """Colour a text, unless ``NO_COLOR`` is set, ``TERM`` is ``dumb``, or the stream is not a terminal.

    Args:
        text: Coloured as a whole.
        state: ``ok``, ``note`` or ``problem``.
        stream: The stream that the text is for; by default, stdout.
    """
    return f"\x1b[3{_COLORS[state]}m{text}\x1b[0m" if _shows_colors(stream or sys.stdout) else text


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
