"""Aims of a bench, each with what was measured."""

from __future__ import annotations

from typing import Any


class Aims:
    """Ratios that are to be at most or at least what the aim says.

    Attributes:
        found: One plain value for each.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def at_most(self, what: str, value: float, limit: float) -> None:
        """Note one."""
        self.found.append({"what": what, "value": value, "at most": limit, "holds": value <= limit})

    def at_least(self, what: str, value: float, limit: float) -> None:
        """Note one."""
        self.found.append({"what": what, "value": value, "at least": limit, "holds": value >= limit})


def show(aims: list[dict[str, Any]]) -> None:
    """Print a line for each."""
    for aim in aims:
        limit = f"at most {aim['at most']}" if "at most" in aim else f"at least {aim['at least']}"
        print(f"{'yes' if aim['holds'] else 'NO ':3} {aim['value']:7.3f}  {limit:14} {aim['what']}")
