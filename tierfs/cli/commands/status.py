"""``tierfs status``: show a store's tiers on this host, its pending files, and its errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tierfs.cli.arguments import add_url_argument
from tierfs.cli.commands._status_prometheus import exposition
from tierfs.cli.commands._status_table import UploadRate, one_line, table
from tierfs.cli.files.places import store_place
from tierfs.cli.terminal.output import add_json_argument, print_json
from tierfs.errors import StoreError
from tierfs.store import Store, status
from tierfs.store.maintenance.condition import condition

HELP = "show a store's tiers, pending files, conflicts and errors on this host"
EXAMPLES = """\
tierfs status tierfs::s3://bucket/run
tierfs status tierfs::s3://bucket/run --watch
tierfs status tierfs::s3://bucket/run --prometheus | sponge /var/lib/node_exporter/tierfs.prom"""

WATCH_S = 2.0
WATCH_S_MIN = 0.1
WATCH_S_MAX = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=WATCH_S,
        metavar="SECONDS",
        help=f"repeat every SECONDS (default: {WATCH_S:g}) until Ctrl-C, in place on a terminal, else as one line each time; URL goes before it",
    )
    output.add_argument(
        "--prometheus",
        action="store_true",
        help="print it in Prometheus's text format, for example for node_exporter's textfile collector",
    )
    add_json_argument(output)


def run(arguments: argparse.Namespace) -> int:
    store = store_place(arguments.url, as_configured=True, resumes=False).store
    if arguments.watch is not None:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(store, arguments.watch)
        return 0
    report = status(store)
    report |= condition(store)
    if arguments.json:
        print_json(report)
    elif arguments.prometheus:
        print(exposition(report), end="")
    else:
        print("\n".join(table(report, UploadRate().sample(report, time.monotonic()))))
    return StoreError.exit_code if store.tiers is None and report["errors"] else 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; the URL goes before --watch") from None
    if not WATCH_S_MIN <= seconds <= WATCH_S_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not between {WATCH_S_MIN:g} and {WATCH_S_MAX:g} seconds")
    return seconds


def _watch(store: Store, interval_s: float) -> None:
    rate = UploadRate()
    with _painting() as paint:
        while True:
            report = status(store)
            paint(report, rate.sample(report, time.monotonic()))
            time.sleep(interval_s)


@contextlib.contextmanager
def _painting() -> Iterator[Callable[[Mapping[str, Any], float | None], None]]:
    """Return the function that shows a status repeatedly: in place on a terminal, else as one line each time."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda report, rate: print(one_line(report, rate), flush=True)
        return
    from rich.live import Live  # noqa: PLC0415 - 50 ms, for a terminal only
    from rich.text import Text  # noqa: PLC0415

    def paint(report: Mapping[str, Any], rate: float | None) -> None:
        lines = "\n".join(table(report, rate))
        live.update(Text.from_ansi(lines, no_wrap=True, overflow="crop"), refresh=True)

    # Do not redirect a log that goes to a file. Do not redirect stdout: `table` checks whether it is a terminal.
    is_terminal = sys.stderr.isatty()
    with Live(auto_refresh=False, vertical_overflow="crop", redirect_stdout=False, redirect_stderr=is_terminal) as live:
        yield paint
