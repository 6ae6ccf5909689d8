"""``tierfs wait``: wait until the files that this host wrote have reached a level."""

from __future__ import annotations

import argparse
import concurrent.futures

from tierfs.cli.arguments import LEVELS, add_options, add_url_argument, require_seconds
from tierfs.cli.files.places import StorePlace, store_place
from tierfs.cli.terminal.output import print_result
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.host.pending.levels import Level
from tierfs.store import wait
from tierfs.store.local_changes import tiers_below
from tierfs.store.offline import begin
from tierfs.units import format_bytes

HELP = "wait until everything that this host wrote at or below a path has reached a level"
EXAMPLES = """\
tierfs wait tierfs::s3://bucket/run
tierfs wait tierfs::s3://bucket/run/step_1000 --level local
tierfs wait tierfs::s3://bucket/run --timeout 600"""

LOOK_S = 0.25
_OPTIONS = {
    f"--level {LEVELS}=object": "staged is in this host's memory, local on its disk, peer on other hosts, object (default) in the object tier",
    "--timeout SECONDS:float": "give up after this time (default: never)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_options(parser, _OPTIONS)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Wait. An error says why a file cannot reach the level."""
    timeout_s: float | None = arguments.timeout
    if timeout_s is not None:
        require_seconds("--timeout", timeout_s)
    place, level = store_place(arguments.url), Level.parse(arguments.level)
    tiers_below(place.store, place.path)  # raises if changes are pending that this process does not reach
    pending = _pending(place, level)
    if not pending and (place.store.tiers is None or place.store.tiers.drafts.is_settled(place.path)):
        # Raise if nothing is there: a wrong path must not look like a safe file.
        place.entry()
    total = sum(pending.values())
    progress = Progress("wait", total_bytes=total, wanted=arguments.progress)
    _show(progress, total, pending)
    with progress:
        # On a daemon thread, so that Ctrl-C ends the command.
        waiting = begin(lambda: wait(place.store, place.path, level, timeout_s))
        while not concurrent.futures.wait([waiting], LOOK_S).done:
            # Count only files that were pending at the start: the command does not wait for later writes.
            left = _pending(place, level)
            still = {name: size for name, size in pending.items() if name in left}
            _show(progress, total, still)
        waiting.result()
        _show(progress, total, {})
    return print_result(arguments, {"url": place.url, "level": level.label, "files": len(pending), "bytes": total})


def _pending(place: StorePlace, level: Level) -> dict[bytes, int]:
    """Return the write id and length of each file that has not reached the level."""
    if place.store.tiers is None:
        return {}
    found = place.store.tiers.drafts.pending_below(place.path).values()
    return {item.draft.write_id: item.draft.length for item in found if item.level < level}


def _show(progress: Progress, total: int, still: dict[bytes, int]) -> None:
    left = sum(still.values())
    progress.advance(total - left - progress.bytes)
    progress.note(f"{len(still)} files, {format_bytes(left)} pending")
