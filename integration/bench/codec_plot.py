"""Plot the report of `codec.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"tierfs": "#2471a3", "zipnn": "#b7950b", "zstd-3": "#b2babb"}
HEIGHT = 0.26


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the sizes as bars, and the seconds of a flush over the speed of the link, as far as the report has them.

    Args:
        report: The output of ``--json``.
        path: The PNG to write.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    parts = [part for part, name in ((_sizes, "sets"), (_links, "links")) if report.get(name)]
    if not parts:
        raise SystemExit("--plot has nothing to draw: sets and links were left out")
    figure, axes = plt.subplots(1, len(parts), figsize=(7 * len(parts), 6), squeeze=False)
    for axis, part in zip(axes[0], parts, strict=True):
        part(axis, report)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _sizes(axis: Any, report: dict[str, Any]) -> None:
    rows = [
        (f"{name}, {when}", saves[save])
        for name, saves in report["sets"].items()
        for save, when in (
            ("static", "first save"),
            ("delta", f"{saves['later']} step{'s' * (saves['later'] > 1)} later"),
        )
    ][::-1]
    for number, who in enumerate(("zstd-3", "zipnn", "tierfs")):
        places = [at + (number - 1) * HEIGHT for at in range(len(rows))]
        values = [row["stored" if who == "tierfs" else who] / row["raw"] for _, row in rows]
        axis.barh(places, values, HEIGHT, color=COLOURS[who], label=who)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axis.set_xlim(0, 1)
    axis.set_title("stored / raw")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.05), ncols=3, reverse=True, fontsize=8)


def _links(axis: Any, report: dict[str, Any]) -> None:
    links = report["links"]
    names = list(links["rows"])
    for way in links["rows"][names[0]]:
        seconds = [links["rows"][name][way]["seconds"] for name in names]
        kind, _, raw = way.partition(", ")
        colour, line = "#c0392b" if raw else "#2471a3", "-" if kind == "checkpoint" else "--"
        axis.plot(names, seconds, marker="o", color=colour, linestyle=line, label=way)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.grid(visible=True, which="both", alpha=0.3)
    axis.set_xlabel("link, MB/s")
    axis.set_title(f"seconds from staged to the object tier, {links['bytes'] / 2**20:.0f} MiB")
    axis.legend(fontsize=8)
