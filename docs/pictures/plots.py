"""Draws the figures of the benchmarks' reports as SVG. Run it after a new report.

A report is a file in ``integration/bench/history/``, which `harness.py` there reads. Of several runs the last is drawn.

- ``claims-NAME.svg``: each claim against its aim. Further to the right is better: a claim at 2x needs half of what it may
  need, or is twice as fast as it must be.
- ``waits.svg``: the seconds for which training waits for a save. ``timeline.svg``: one save on its way through the tiers.
- ``stored.svg``: the bytes in the store against those of the checkpoints, save by save.
"""

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BENCH = HERE.parents[1] / "integration" / "bench"
sys.path.insert(0, str(HERE))

from svg import MARGIN, WIDTH, picture, text, wrapped  # noqa: E402 - it lies beside this script

REPORTS = {  # the name of the picture, and the report
    "dcp": "2026-11-26-dcp",
    "object": "2026-11-25-object",
    "growth-host": "2026-11-28-growth-host",
    "device": "2026-11-27-device-h200-20GB",
}
SAVES, OBJECT, STORED = "2026-11-29-dcp-blocks", "2026-11-29-object-checkpoints", "2026-11-29-stored"
LEFT, RIGHT, TOP = MARGIN + 6, 262, 40
LEAST, MOST = 1 / 4, 16  # of the scale; a mark beyond stands at its end

_spec = importlib.util.spec_from_file_location("harness", BENCH / "harness.py")
assert _spec is not None
assert _spec.loader is not None
harness = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(harness)


def report_of(name: str) -> Any:
    return json.loads((BENCH / "history" / f"{name}.json").read_text())


# -- claims ------------------------------------------------------------------------------------------------------------


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


def draw_claims(report: str) -> str:
    """Each claim against its aim."""
    scale = (RIGHT - LEFT) / math.log2(MOST / LEAST)

    def x_of(ratio: float) -> float:
        return LEFT + scale * math.log2(min(max(ratio, LEAST), MOST) / LEAST)

    parts, grid, y = [], [], float(TOP)
    for what, values, aim, is_at_most in claims(report):
        lines = wrapped(what, WIDTH - 2 * MARGIN)
        parts += [text(MARGIN, y + 14 + 15 * number, line) for number, line in enumerate(lines)]
        middle = y + 15 * len(lines) + 12
        grid += [f'<line class="{kind}" {line}/>' for kind, line in _grid(x_of, middle)]
        for value in values:
            ratio = times_better(value, aim, is_at_most=is_at_most)
            x = x_of(ratio)
            shape = f'd="M{x - 6:.1f} {middle:.0f} l6 -6 l6 6 l-6 6 z"'
            round_ = f'cx="{x:.1f}" cy="{middle:.0f}" r="4.5"'
            parts.append(f'<circle class="blue" {round_}/>' if ratio >= 1 else f'<path class="red" {shape}/>')
        figures = ", ".join(f"{value:.3g}" for value in values)
        bound = f"{figures} ({'at most' if is_at_most else 'at least'} {aim:g})"
        parts.append(text(WIDTH - MARGIN, middle + 4, bound, "small", anchor="end"))
        y = middle + 12
    for ratio, name in ((LEAST, "1/4"), (0.5, "1/2"), (1, "aim"), (2, "2x"), (4, "4x"), (8, "8x"), (MOST, "16x")):
        parts.append(text(x_of(ratio), TOP - 14, name, "small", anchor="middle"))
    return picture(y + MARGIN, [*grid, *parts], alternative(report))


def _grid(x_of: Any, y: float) -> list[tuple[str, str]]:
    """The scale behind the marks of one claim, as classes and ends of lines."""
    ratios = [LEAST * 2**power for power in range(1 + round(math.log2(MOST / LEAST)))]
    ends = [
        (ratio, f'x1="{x_of(ratio):.1f}" y1="{y - 7:.0f}" x2="{x_of(ratio):.1f}" y2="{y + 7:.0f}"') for ratio in ratios
    ]
    across = f'x1="{LEFT}" y1="{y:.0f}" x2="{RIGHT}" y2="{y:.0f}"'
    return [("line", across), *(("aim" if ratio == 1 else "line", line) for ratio, line in ends)]


def alternative(report: str) -> str:
    """The picture of a report's claims in words."""
    found = claims(report)
    held = sum(
        all(times_better(value, aim, is_at_most=is_at_most) >= 1 for value in values)
        for _, values, aim, is_at_most in found
    )
    return f"{held} of {len(found)} claims of {report[:10]} reach their aim"


# -- a save ------------------------------------------------------------------------------------------------------------


def waits() -> dict[str, float]:
    """The seconds for which training waits for one save, by the way to save."""
    saves = report_of(SAVES)["saves"]["blocks"]
    to_s3 = report_of(OBJECT)["servers"]["ministack"]["checkpoints"]["rows"]
    assert report_of(SAVES)["bytes"] == report_of(OBJECT)["bytes"]
    return {
        "tierfs: TierWriter": saves["tierfs"]["blocked"],
        "torch: async_save, with a stager that is kept": saves["stock async_save, kept stager, 2 threads"]["blocked"],
        "torch: async_save to the disk": saves["stock async_save"]["blocked"],
        "torch.save to the disk": saves["torch.save"]["blocked"],
        "s3fs: torch's FsspecWriter to S3, 4 threads": to_s3["FsspecWriter over s3fs, 4 threads"]["save"],
    }


def draw_waits() -> str:
    """A bar for each way to save."""
    found = waits()
    scale = (WIDTH - 2 * MARGIN - 60) / max(found.values())
    parts = [text(MARGIN, 24, f"Seconds that training waits for a save of {_size()}", "strong")]
    for number, (name, seconds) in enumerate(found.items()):
        y = 38 + 40 * number
        kind = "grey" if number else "blue"
        parts.append(text(MARGIN, y + 12, name))
        parts.append(
            f'<rect class="{kind}" x="{MARGIN}" y="{y + 18}" width="{max(scale * seconds, 2):.1f}" height="12" rx="2"/>'
        )
        parts.append(text(MARGIN + scale * seconds + 8, y + 29, f"{seconds:.2f} s", "strong"))
    return picture(38 + 40 * len(found) + 8, parts, words_of_waits())


def words_of_waits() -> str:
    """The picture of the waits in words."""
    return f"Seconds that training waits for a save of {_size()}: " + ", ".join(
        f"{name.removesuffix(' to the disk').replace(': ', ' ')} {seconds:.2f}" for name, seconds in waits().items()
    )


def _size() -> str:
    return f"{report_of(SAVES)['bytes'] >> 20} MiB"


def timeline() -> tuple[dict[str, float], ...]:
    """The seconds of one save by tierfs, async_save and torch.save."""
    saves = report_of(SAVES)["saves"]["blocks"]
    return saves["tierfs"], saves["stock async_save"], saves["torch.save"]


def draw_timeline() -> str:
    """The way of one save through the tiers, and the same bytes by torch."""
    ours, theirs, plain = timeline()
    end = max(ours["object"], theirs["durable"], plain["durable"])
    lanes = [
        ("tierfs", "training waits", 0, ours["blocked"], "red", "staged: survives the process"),
        ("", "flusher writes the disk", ours["blocked"], ours["durable"], "blue", "local: survives the host's crash"),
        ("", "flusher fills the object tier", ours["durable"], ours["object"], "blue", "object"),
        ("async_save", "training waits", 0, theirs["blocked"], "red", "nothing is saved yet"),
        ("", "thread writes the disk", theirs["blocked"], theirs["durable"], "grey", "on disk"),
        ("torch.save", "training waits", 0, plain["blocked"], "red", "on disk"),
    ]
    scale = (WIDTH - 2 * MARGIN) / (end * 1.05)
    parts, y = [text(MARGIN, 24, f"One save of {_size()} on its way, in seconds", "strong")], 32.0
    for who, what, begin, until, kind, reached in lanes:
        if who:
            y += 8
            parts.append(text(MARGIN, y + 14, who, "strong"))
            y += 18
        parts.append(text(MARGIN, y + 12, f"{what} until {until:.2f}: {reached}", "small"))
        bar = f'x="{MARGIN + scale * begin:.1f}" y="{y + 17:.0f}" width="{max(scale * (until - begin), 2):.1f}" height="9"'
        parts.append(f'<rect class="{kind}" {bar} rx="2"/>')
        y += 30
    return picture(y + MARGIN, parts, words_of_timeline())


def words_of_timeline() -> str:
    """The picture of the timeline in words."""
    ours, theirs, plain = timeline()
    return (
        f"A save of {_size()} blocks training for {ours['blocked']:.2f} s. It is on disk after {ours['durable']:.2f} s and "
        f"in the object tier after {ours['object']:.2f} s. A save by async_save blocks for {theirs['blocked']:.2f} s and is "
        f"on disk after {theirs['durable']:.2f} s. One by torch.save blocks for {plain['blocked']:.2f} s"
    )


# -- the store ---------------------------------------------------------------------------------------------------------


def draw_stored() -> str:
    """A panel for each run: the bytes of all checkpoints so far, and those in the store."""
    parts, y = [], 8.0
    for name, points in report_of(STORED)["curves"].items():
        parts.append(text(MARGIN, y + 18, f"{name[0].upper()}{name[1:]}", "strong"))
        top, bottom, left = y + 30, y + 150, MARGIN + 8
        across = (WIDTH - 2 * MARGIN - 130) / (len(points) - 1)
        most = points[-1]["logical"]
        parts.append(
            f'<line class="aim" x1="{left}" y1="{bottom}" x2="{left + across * (len(points) - 1):.1f}" y2="{bottom}"/>'
        )
        for key, label, kind, shape in (
            ("logical", "all checkpoints", "grey", "rect"),
            ("stored", "in the store", "blue", "circle"),
        ):
            for number, point in enumerate(points):
                x, at = left + across * number, bottom - (bottom - top) * point[key] / most
                mark = f'cx="{x:.1f}" cy="{at:.1f}" r="3.5"'
                square = f'x="{x - 3:.1f}" y="{at - 3:.1f}" width="6" height="6"'
                parts.append(f'<{shape} class="{kind}" {mark if shape == "circle" else square}/>')
            end = bottom - (bottom - top) * points[-1][key] / most
            parts.append(text(x + 10, end + 2, f"{points[-1][key] / 2**20:.0f} MiB", "strong"))
            parts.append(text(x + 10, end + 15, label, "small"))
        for number, point in enumerate(points):
            if number and point["step"] < points[number - 1]["step"]:
                x = left + across * (number - 0.5)
                parts.append(
                    f'<line class="aim" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke-dasharray="4 3"/>'
                )
                parts.append(text(x - 4, top + 6, "killed, two saves repeated", "small", anchor="end"))
        parts.append(text(left, bottom + 16, f"{len(points)} saves, one every {points[0]['step']} steps", "small"))
        y = bottom + 22
    return picture(y + 8, parts, words_of_stored())


def words_of_stored() -> str:
    """The picture of the stored bytes in words."""
    return ". ".join(
        f"{name[0].upper()}{name[1:]}: {len(points)} checkpoints of {points[-1]['logical'] / 2**20:.0f} MiB take "
        f"{points[-1]['stored'] / 2**20:.0f} MiB"
        for name, points in report_of(STORED)["curves"].items()
    )


def alternatives() -> dict[str, str]:
    """Each picture in words, by its name. A page that shows it has these words."""
    words = {f"claims-{name}": alternative(report) for name, report in REPORTS.items()}
    return words | {"waits": words_of_waits(), "timeline": words_of_timeline(), "stored": words_of_stored()}


def pictures() -> dict[Path, str]:
    """Every picture that there is to be, by its file."""
    drawn = {f"claims-{name}": draw_claims(report) for name, report in REPORTS.items()}
    drawn |= {"waits": draw_waits(), "timeline": draw_timeline(), "stored": draw_stored()}
    return {HERE / f"{name}.svg": svg for name, svg in drawn.items()}


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg)
