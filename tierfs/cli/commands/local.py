"""``tierfs wait``, ``prefetch``, ``evict`` and ``forget``: work on what this host keeps of a store."""

from __future__ import annotations

import argparse
import concurrent.futures

from tierfs.cli.arguments import LEVELS, TIER, URL, command, progress_option, require_seconds
from tierfs.cli.files.places import StorePlace, store_place
from tierfs.cli.terminal.output import print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import InvalidInputError, NotFoundError, TierfsError, without_passwords
from tierfs.host.host import state_directory
from tierfs.host.local_state import finish_removals, forget, local_stores
from tierfs.host.pending.levels import Level
from tierfs.session.compose import local_store
from tierfs.store import evict, find, prefetch, wait
from tierfs.store.local_changes import tiers_below
from tierfs.store.looks import begin
from tierfs.units import format_bytes

LOOK_S = 0.25


@command(
    "wait",
    "wait until everything that this host wrote at or below a path has reached a level",
    """
    tierfs wait tierfs::s3://bucket/run
    tierfs wait tierfs::s3://bucket/run/step_1000 --level local
    tierfs wait tierfs::s3://bucket/run --timeout 600
    """,
    URL,
    {
        f"--level {LEVELS}=object": "staged is in this host's memory, local on its disk, peer on other hosts, object (default) in the object tier",
        "--timeout SECONDS:float": "give up after this time (default: never)",
    },
    progress_option,
)
def run_wait(arguments: argparse.Namespace) -> int:
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


@command(
    "prefetch",
    "copy a file, or everything below a directory, to this host's disk",
    """
    tierfs prefetch tierfs::s3://bucket/run/step_1000
    tierfs prefetch tierfs::s3://bucket/data --progress
    """,
    URL,
    TIER,
    progress_option,
)
def run_prefetch(arguments: argparse.Namespace) -> int:
    if arguments.tier == "ram":
        raise InvalidInputError(
            "copies in the ram tier would be dropped when this command ends: omit --tier to copy to the nvme tier, or call "
            "fs.prefetch(path) in the process that reads the files"
        )
    place = store_place(arguments.url)
    with Progress("prefetch", wanted=arguments.progress) as progress:
        if progress.is_shown:
            progress.expect(_copied_bytes(place))
        with place.must_exist():
            count = prefetch(place.store, place.path, arguments.tier, progress=progress.advance)
    return print_result(
        arguments, {"bytes": count}, f"{format_bytes(count)} of {printable(place.url)} in the {arguments.tier} tier"
    )


def _copied_bytes(place: StorePlace) -> int:
    """Count the bytes that a prefetch copies. Files that lie in their manifests need no copy."""
    top = place.entry()
    entries = find(place.store, place.path) if top.is_directory else [top]
    files = (entry for entry in entries if not entry.is_directory)
    return sum(entry.length for entry in files if entry.manifest is None or entry.manifest.inline is None)


@command(
    "evict",
    "drop clean copies of a file, or of everything below a directory, from a local tier",
    """
    tierfs evict tierfs::s3://bucket/run/step_1000
    tierfs evict tierfs::s3://bucket/run --tier ram
    """,
    URL,
    TIER,
    progress_option,
)
def run_evict(arguments: argparse.Namespace) -> int:
    place = store_place(arguments.url)
    with Progress("evict", wanted=arguments.progress) as progress:
        with place.must_exist():
            count = evict(place.store, place.path, arguments.tier)
        progress.advance(count)
    return print_result(
        arguments,
        {"bytes": count},
        f"{format_bytes(count)} of {printable(place.url)} dropped from the {arguments.tier} tier",
    )


@command(
    "forget",
    "remove what this host keeps of a store: copies, nvme tier and state; the store itself stays",
    """
    tierfs forget --gone
    tierfs forget --gone --yes
    tierfs forget tierfs::s3://bucket/old --yes
    """,
    {
        "url URL?": "the root of a store, or its id",
        "--gone": "every store that is no longer in its local directory",
        "--state-dir DIRECTORY": "state directory of this host (default: TIERFS_STATE_DIR)",
        "--yes": "remove it (default: show what would be removed)",
    },
)
def run_forget(arguments: argparse.Namespace) -> int:
    """Forget stores. Return the exit code of the first one that must stay."""
    if (arguments.url is None) != arguments.gone:
        raise InvalidInputError("name a store, or give --gone")
    state, code = state_directory(arguments.state_dir), 0
    if arguments.gone:
        stores = [store for store in local_stores(state) if store.is_gone]
    else:
        stores = [local_store(state, arguments.url)._replace(place=without_passwords(arguments.url))]
    if arguments.yes:
        finish_removals(state)
    would = "" if arguments.yes else "would be "
    lines, document = [], []
    for store in stores:
        size, problem = 0, None
        try:
            size = forget(state, store, dry_run=not arguments.yes)
            lines.append(f"{would}removed  {printable(store.place)}: {format_bytes(size)}")
        except TierfsError as error:
            if not arguments.gone:
                raise
            if isinstance(error, NotFoundError):
                continue  # another call removed it meanwhile
            problem, code = str(error), code or error.exit_code
            lines.append(f"kept  {printable(problem)}")
        document.append({"uuid": store.uuid, "place": store.place, "bytes": size, "problem": problem})
    if not arguments.yes and code == 0 and document:
        lines.append("nothing was removed: add --yes to remove it")
    if not document:
        lines.append("every store of this host is in its place: nothing to remove")
    return print_result(arguments, {"dry_run": not arguments.yes, "stores": document}, *lines, code=code)
