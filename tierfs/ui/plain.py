"""The page's tables for browsers without JavaScript, and for those that read them aloud."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from tierfs.units import format_bytes

ROWS_MAX = 500
_ALARMS = ("severity", "what", "do", "command")
_TIERS = ("tier", "used_bytes", "budget_bytes", "dirty_bytes", "clean_bytes", "gives")
_CHECKPOINTS = ("name", "step", "state", "level", "size", "stored", "kind", "created")
_SIZES = {*_TIERS[1:5], "size", "stored"}
_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tierfs</title>
<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/static/style.css"></head>
<body class="plain"><main><p><a href="/">The page with live figures</a></p>"""


def plain_page(stores: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Return the page for stores, each with its status and its list of checkpoints."""
    return _HEAD + "".join(_store(*store) for store in stores) + "</main></body></html>"


def _store(status: Mapping[str, Any], listed: Mapping[str, Any]) -> str:
    report, rows = status["report"] or {"tiers": {}, "queue_files": 0, "queue_bytes": 0}, listed["checkpoints"]
    tiers = [{"tier": tier, **values} for tier, values in report["tiers"].items()]
    queue = f"{report['queue_files']} files, {format_bytes(report['queue_bytes'])} wait for the object tier."
    more = f"{len(rows)} checkpoints" + (f", of which these are the first {ROWS_MAX}" if len(rows) > ROWS_MAX else "")
    tables = (("Alarms", _ALARMS, status["alarms"]), ("Tiers", _TIERS, tiers), (more, _CHECKPOINTS, rows[:ROWS_MAX]))
    return f"<h1>{escape(status['url'])}</h1><p>{queue}</p>" + "".join(_table(*each) for each in tables)


def _table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f'<th scope="col">{name.removesuffix("_bytes")}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(_cell(row.get(name), name) for name in columns)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any, name: str) -> str:
    text = "" if value is None else format_bytes(value) if name in _SIZES else str(value)
    return f"<td>{escape(text)}</td>"
