"""Plot the report of `dcp.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"blocked": "#c0392b", "background": "#e6b0aa", "load": "#2471a3"}


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the seconds of saves and loads as bars.

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

    states = list(report["saves"])
    figure, axes = plt.subplots(2, len(states), figsize=(6.5 * len(states), 7), squeeze=False)
    for column, state in enumerate(states):
        _saves(axes[0][column], report["saves"][state])
        axes[0][column].set_title(f"{state}, {report['bytes_of'][state] / 2**20:.0f} MiB: save")
        _loads(axes[1][column], report["loads"].get(state, {}))
        axes[1][column].set_title(f"{state}: load")
    figure.suptitle(f"{report['machine']['cores']} cores, medians of {report['rounds']} rounds, seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _saves(axis: Any, saves: dict[str, dict[str, float]]) -> None:
    names = list(saves)[::-1]
    blocked = [saves[name]["blocked"] for name in names]
    background = [saves[name].get("durable", at) - at for name, at in zip(names, blocked, strict=True)]
    axis.barh(names, blocked, color=COLOURS["blocked"], label="training is blocked")
    axis.barh(names, background, left=blocked, color=COLOURS["background"], label="then until durable on disk")
    axis.legend(loc="lower right", fontsize=8)


def _loads(axis: Any, loads: dict[str, float]) -> None:
    names = list(loads)[::-1]
    axis.barh(names, [loads[name] for name in names], color=COLOURS["load"])
