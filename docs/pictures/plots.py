"""Draws the figures of a bench's report as SVG: each claim against its aim. Run it after a new report.

A report is a file in ``integration/bench/history/``, which `harness.py` there reads. Of several runs the last is drawn. Further
to the right is better: a claim at 2x needs half of what it may need, or is twice as fast as it must be.
"""

import importlib.util
import math
import textwrap
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
BENCH = HERE.parents[1] / "integration" / "bench"
REPORTS = {  # the name of the picture, and the report
    "dcp": "2026-11-26-dcp",
    "object": "2026-11-25-object",
    "growth-host": "2026-11-28-growth-host",
    "device": "2026-11-27-device-h200-20GB",
}
WIDTH, LEFT, RIGHT, TOP = 860, 400, 690, 40
LEAST, MOST = 1 / 4, 16  # of the scale; a mark beyond stands at its end
STYLE = """<style>
text { fill: #1f2328 } .small { fill: #59636e; font-size: 11px } line { stroke: #d0d7de } .aim { stroke: #59636e }
.holds { fill: #0969da } .misses { fill: #cf222e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } line { stroke: #3d444d } .aim { stroke: #9198a1 }
  .holds { fill: #58a6ff } .misses { fill: #f85149 }
}
</style>"""

_spec = importlib.util.spec_from_file_location("harness", BENCH / "harness.py")
assert _spec is not None
assert _spec.loader is not None
harness = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(harness)


def claims(report: str) -> list[tuple[str, list[float], float, bool]]:
    """The claims of the last run that have an aim: words, figures, aim, and whether it is an upper bound."""
    *_, (_, aims) = harness.runs_of(BENCH / "history" / f"{report}.json")
    return [
        (
            aim["what"],
            aim.get("values") or [aim["value"]],
            float(aim.get("at most", aim.get("at least"))),
            "at most" in aim,
        )
        for aim in aims
        if "at most" in aim or "at least" in aim
    ]


def times_better(value: float, aim: float, *, is_at_most: bool) -> float:
    """How many times a figure is better than its aim; 1 is just as good."""
    if value == aim:
        return 1.0
    better, worse = (aim, value) if is_at_most else (value, aim)
    return math.inf if worse <= 0 else better / worse


def draw(report: str) -> str:
    """One picture."""
    scale = (RIGHT - LEFT) / math.log2(MOST / LEAST)

    def x_of(ratio: float) -> float:
        return LEFT + scale * math.log2(min(max(ratio, LEAST), MOST) / LEAST)

    parts, y = [], float(TOP)
    for what, values, aim, is_at_most in claims(report):
        lines = textwrap.wrap(what, 64, max_lines=2, placeholder=" ...")
        middle = y + 8 * len(lines) + 3
        for number, line in enumerate(lines):
            parts.append(f'<text x="8" y="{y + 13 + 15 * number:.0f}">{escape(line)}</text>')
        for value in values:
            ratio = times_better(value, aim, is_at_most=is_at_most)
            x, kind = x_of(ratio), "holds" if ratio >= 1 else "misses"
            shape = f"M{x - 5:.1f} {middle:.0f} l5 -5 l5 5 l-5 5 z"
            mark = f'<circle cx="{x:.1f}" cy="{middle:.0f}" r="4.5"' if ratio >= 1 else f'<path d="{shape}"'
            parts.append(f'{mark} class="{kind}"/>')
        figures = ", ".join(f"{value:.3g}" for value in values)
        bound = f"{figures} ({'at most' if is_at_most else 'at least'} {aim:g})"
        parts.append(f'<text x="{RIGHT + 14}" y="{middle + 4:.0f}" class="small">{escape(bound)}</text>')
        y += 16 * len(lines) + 8
    ratio, grid = LEAST, []
    while ratio <= MOST:
        x, name = x_of(ratio), "aim" if ratio == 1 else f"{ratio:g}x"
        kind = ' class="aim"' if ratio == 1 else ""
        grid.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{y:.0f}"{kind}/>')
        grid.append(f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle" class="small">{name}</text>')
        ratio *= 2
    body = "\n".join([STYLE, *grid, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8:.0f}" width="{WIDTH}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def alternative(report: str) -> str:
    """The picture in words."""
    found = claims(report)
    held = sum(
        all(times_better(value, aim, is_at_most=is_at_most) >= 1 for value in values)
        for _, values, aim, is_at_most in found
    )
    return f"{held} of {len(found)} claims of {report[:10]} reach their aim"


def pictures() -> dict[Path, str]:
    """Every picture that there is to be, by its file."""
    return {HERE / f"claims-{name}.svg": draw(report) for name, report in REPORTS.items()}


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture)
