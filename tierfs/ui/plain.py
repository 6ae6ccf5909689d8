"""The page's tables for browsers without JavaScript, and for those that read them aloud."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from tierfs.units import format_bytes

ROWS_MAX = 500
_SIZES = ("used_bytes", "budget_bytes", "dirty_bytes", "clean_bytes")
_COLUMNS = ("name", "step", "state", "level", "size", "stored", "kind", "created")


def plain_page(stores: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Return the page for stores, each with its status and its list of checkpoints."""
    body = "".join(_store(status, listed) for status, listed in stores)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tierfs</title>'
        '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/static/style.css"></head>'
        f'<body class="plain"><main><p><a href="/">The page with live figures</a></p>{body}</main></body></html>'
    )


def _store(status: Mapping[str, Any], listed: Mapping[str, Any]) -> str:
    alarms = [(alarm["severity"], alarm["what"], alarm["command"] or alarm["do"]) for alarm in status["alarms"]]
    report = status["report"] or {"tiers": {}, "queue_files": 0, "queue_bytes": 0}
    tiers = [
        (
            tier,
            *("" if values.get(key) is None else format_bytes(values[key]) for key in _SIZES),
            values.get("gives", ""),
        )
        for tier, values in report["tiers"].items()
    ]
    rows = [
        tuple(
            format_bytes(row[key]) if key in {"size", "stored"} and row[key] is not None else row[key]
            for key in _COLUMNS
        )
        for row in listed["checkpoints"][:ROWS_MAX]
    ]
    queue = f"{report['queue_files']} files, {format_bytes(report['queue_bytes'])} wait for the object tier."
    more = (
        f"<p>{len(listed['checkpoints']) - ROWS_MAX} more are not shown.</p>"
        if len(listed["checkpoints"]) > ROWS_MAX
        else ""
    )
    return (
        f"<section><h1>{escape(str(status['url']))}</h1>"
        + (_table("Alarms", ("severity", "what", "do"), alarms) if alarms else "<p>No alarms.</p>")
        + f"<p>{escape(queue)}</p>"
        + _table("Tiers", ("tier", "used", "budget", "dirty", "clean", "level"), tiers)
        + _table("Checkpoints", _COLUMNS, rows)
        + more
        + "</section>"
    )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{'' if cell is None else escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(title)}</caption><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
