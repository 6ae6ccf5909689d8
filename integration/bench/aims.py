"""Aims of a benchmark, each with the measured value."""

from __future__ import annotations

from typing import Any


class Aims:
    """Ratios that must stay at most, or at least, at a limit.

    Attributes:
        found: One dict of plain values for each aim.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def at_most(self, what: str, value: float, limit: float) -> None:
        self.found.append({"what": what, "value": value, "at most": limit, "holds": value <= limit})

    def at_least(self, what: str, value: float, limit: float) -> None:
        self.found.append({"what": what, "value": value, "at least": limit, "holds": value >= limit})


def show(aims: list[dict[str, Any]]) -> None:
    for aim in aims:
        limit = f"at most {aim['at most']}" if "at most" in aim else f"at least {aim['at least']}"
        print(f"{'yes' if aim['holds'] else 'NO ':3} {aim['value']:7.3f}  {limit:14} {aim['what']}")
