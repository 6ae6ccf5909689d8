"""What the benchmarks share: claims with their aims, medians of rounds, costs of processes, reports, and past figures.

    python integration/bench/harness.py [--only dcp]

lists the figures of past runs, claim by claim. A file in ``history/`` is the ``--json`` report of a benchmark, whose
aims have one ``value`` each, or several runs, whose aims have ``values``. To keep a report:
``python integration/bench/dcp.py --json > integration/bench/history/DATE-dcp.json``. `docs/pictures/plots.py` draws it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).parent / "history"
SEED = 1


# -- claims and medians ------------------------------------------------------------------------------------------------


class Aims:
    """Figures that must stay at most, or at least, at a limit.

    Attributes:
        found: One dict of plain values for each aim.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def at_most(self, what: str, value: float, limit: float) -> None:
        self.found.append({"what": what, "value": value, "at most": limit, "holds": value <= limit})

    def at_least(self, what: str, value: float, limit: float) -> None:
        self.found.append({"what": what, "value": value, "at least": limit, "holds": value >= limit})


def timed(function: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


class Rows:
    """Figures by name, round by round."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {}

    def note(self, name: str, **values: float) -> None:
        for key, value in values.items():
            self._values.setdefault(name, {}).setdefault(key, []).append(value)

    def clear(self) -> None:
        self._values.clear()

    def ratio(self, key: str, one: str, other: str, make: Callable[[float], float] = float) -> float:
        """Return the median, over rounds, of `one` divided by ``make(other)``. A slow phase of the host is in both."""
        pairs = zip(self._values[one][key], self._values[other][key], strict=True)
        return statistics.median(value / make(beside) for value, beside in pairs)

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            name: {key: statistics.median(values) for key, values in row.items()} for name, row in self._values.items()
        }


# -- processes ---------------------------------------------------------------------------------------------------------


def proc_number(pid: int | str, file: str, name: str) -> int:
    """Return a number from a process's file in /proc, in bytes if the file has kB."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            number, *unit = value.split()
            return int(number) * (1024 if unit == ["kB"] else 1)
    raise KeyError(name)


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


@contextlib.contextmanager
def peaks(every_s: float = 0.002, /, **probes: Callable[[], int]) -> Iterator[dict[str, int]]:
    """Sample each probe every ``every_s``, and keep the highest values. A process of a probe may end meanwhile."""
    highest = {name: probe() for name, probe in probes.items()}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            for name, probe in probes.items():
                with contextlib.suppress(OSError):
                    highest[name] = max(highest[name], probe())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        ended.set()
        thread.join()


def end_flusher(status: dict[str, Any]) -> None:
    """Stop a store's flusher, which would otherwise run until it has been idle for long."""
    pid = status["flusher"].get("pid")
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


@contextlib.contextmanager
def private_slabs() -> Iterator[None]:
    """Keep slabs in a directory that is removed at the end, even after an error."""
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir="/dev/shm", ignore_cleanup_errors=True) as shared:
        os.environ["TIERFS_SHM_DIR"] = shared
        try:
            yield
        finally:
            del os.environ["TIERFS_SHM_DIR"]


# -- reports -----------------------------------------------------------------------------------------------------------


def parser(doc: str | None, directory: str = "directory on the disk to measure") -> argparse.ArgumentParser:
    """Return a parser with the module's docstring as its help, ``--directory`` and ``--json``."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--directory", help=directory)
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    return made


def machine(**more: str) -> dict[str, Any]:
    return {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), **more}


def say(report: dict[str, Any], *, as_json: bool) -> None:
    """Print a report, as JSON with the command and the date, or in lines."""
    if as_json:
        run = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
        print(json.dumps(run | report, indent=1))
    else:
        show(report)


def show(report: dict[str, Any], indent: str = "") -> None:
    """Print a report line by line. A dict of plain values takes one line, and the aims come last."""
    for name, value in report.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            print(f"{indent}{name}:")
            show(value, f"{indent}  ")
        elif name != "aims":
            items = value.items() if isinstance(value, dict) else [("", value)]
            print(f"{f'{indent}{name}':48} " + ", ".join(f"{key} {_short(item)}".strip() for key, item in items))
    for aim in report.get("aims", ()):
        limit = f"at most {aim['at most']}" if "at most" in aim else f"at least {aim['at least']}"
        print(f"{'yes' if aim['holds'] else 'NO ':3} {aim['value']:7.3f}  {limit:14} {aim['what']}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- past figures ------------------------------------------------------------------------------------------------------


def runs_of(path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the runs in a file with their aims, oldest first."""
    report = json.loads(path.read_text())
    if "runs" in report:
        for run in report["runs"]:
            yield run.get("label", path.stem[:10]), run.get("aims", [])
    else:
        yield report.get("date", path.stem)[:10], report.get("aims", [])


def main() -> None:
    """Print the claims of past runs. A star marks a figure that misses its aim."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", default="", help="use only files with this in their names")
    only = arguments.parse_args().only
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for path in sorted(HISTORY.glob("*.json")):
        for label, aims in runs_of(path) if only in path.name else ():
            for aim in aims:
                found.setdefault(aim["what"], []).append((label, aim))
    for what, points in found.items():
        print(what)
        for label, aim in points:
            most, least = aim.get("at most", float("inf")), aim.get("at least", float("-inf"))
            values = aim["values"] if "values" in aim else [aim["value"]]
            limit = (
                f" (at most {most:g})" if "at most" in aim else f" (at least {least:g})" if "at least" in aim else ""
            )
            figures = (f"{value:g}{'' if least <= value <= most else '*'}" for value in values)
            print(f"    {label:36} {', '.join(figures)}{limit}")


if __name__ == "__main__":
    main()
