"""Figures of past runs, claim by claim, and a plot of them.

    python integration/bench/history.py [--only dcp] [--plot FILE.png]

A file in ``history/`` is the ``--json`` report of a benchmark, whose aims have one ``value`` each, or several runs,
whose aims have ``values``. To keep a report:
``python integration/bench/dcp.py --json > integration/bench/history/DATE-dcp.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HISTORY = Path(__file__).parent / "history"


class Point(NamedTuple):
    """The figures of one claim in one run."""

    run: str
    values: list[float]
    limit: float | None
    is_at_most: bool


def runs_of(path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the runs in a file with their aims, oldest first."""
    report = json.loads(path.read_text())
    if "runs" in report:
        for run in report["runs"]:
            yield run.get("label", path.stem[:10]), run.get("aims", [])
    else:
        yield report.get("date", path.stem)[:10], report.get("aims", [])


def claims(only: str = "") -> dict[str, list[Point]]:
    """Return the points of each claim, oldest first."""
    found: dict[str, list[Point]] = {}
    for path in sorted(HISTORY.glob("*.json")):
        for label, aims in runs_of(path) if only in path.name else ():
            for aim in aims:
                values = aim["values"] if "values" in aim else [aim["value"]]
                limit = aim.get("at most", aim.get("at least"))
                found.setdefault(aim["what"], []).append(Point(label, values, limit, "at most" in aim))
    return found


def show(found: dict[str, list[Point]]) -> None:
    """Print the claims. A star marks a figure that misses its aim."""
    for what, points in found.items():
        limit = points[-1].limit
        aim = "" if limit is None else f" ({'at most' if points[-1].is_at_most else 'at least'} {limit:g})"
        print(f"{what}{aim}")
        for point in points:
            figures = (
                f"{value:g}{'*' if limit is not None and (value > limit if point.is_at_most else value < limit) else ''}"
                for value in point.values
            )
            print(f"    {point.run:36} {', '.join(figures)}")


def plot(found: dict[str, list[Point]], target: str) -> None:
    """Draw a panel for each claim with more than one run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn = {what: points for what, points in found.items() if len(points) > 1}
    rows = max(-(-len(drawn) // 3), 1)
    figure, panels = plt.subplots(rows, 3, figsize=(15, 2.6 * rows), squeeze=False)
    for panel in panels.flat[len(drawn) :]:
        panel.axis("off")
    for panel, (what, points) in zip(panels.flat, drawn.items(), strict=False):
        for place, point in enumerate(points):
            panel.plot([place] * len(point.values), point.values, "o", color="tab:blue", alpha=0.7)
        if points[-1].limit is not None:
            panel.axhline(points[-1].limit, color="tab:red", linewidth=1)
        panel.set_title(what if len(what) < 60 else f"{what[:57]}...", fontsize=8)
        panel.set_xticks(range(len(points)), [point.run[:18] for point in points], fontsize=6, rotation=15)
        panel.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="use only files with this in their names")
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    found = claims(options.only)
    show(found)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
