"""``tierfs gc``: delete objects of a store that no record needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierfs.cli.arguments import add_options, add_url_argument, suggested
from tierfs.cli.files.places import named_path, store_place, whole_store
from tierfs.cli.terminal.output import align, print_result, printable
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import InvalidInputError
from tierfs.units import format_bytes

if TYPE_CHECKING:
    from tierfs.store import Store
    from tierfs.store.maintenance.gc import GcReport, Tally

HELP = "delete objects that nothing in a store needs"
EXAMPLES = """\
tierfs gc s3://bucket/run --dry-run
tierfs gc s3://bucket/run
tierfs gc /data/checkpoints --wait
tierfs gc /data/checkpoints --exclusive"""
BLOCKED_EXIT_CODE = 12


_OPTIONS = {
    "--dry-run": "change nothing; print what would be done, by reason",
    "--wait": "wait until the objects that this run condemns may be deleted, and delete them (default: the next run does)",
    "--exclusive": "delete at once, if no other process writes; refused if a writer has a live lease",
    "--reencode": "first encode chunks that were sent raw under pressure; gc deletes the raw ones later",
    "--without ROOT...": "a path in the store, or its URL, below which unreadable and vanished records are ignored; needs --yes; may be given several times",
    "--yes": "confirm --without: chunks that those files need may be deleted",
    "--concurrency N:int=16": "requests at once (default: 16)",
    "--rate N:float=3000": "most objects deleted per second (default: 3000)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_options(parser, _OPTIONS)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Collect garbage, and return the exit code of a blocked gc if a record cannot be read or has vanished."""
    from tierfs.store.maintenance.gc import GcOptions, collect  # noqa: PLC0415 - it loads NumPy

    if arguments.without and not arguments.yes:
        raise InvalidInputError(
            "--without may delete data that unreadable or vanished files need: check these files first, then add --yes"
        )
    if arguments.concurrency < 1 or not arguments.rate > 0:
        raise InvalidInputError("--concurrency must be at least 1 and --rate more than 0")
    if arguments.wait and arguments.dry_run:
        raise InvalidInputError("--wait and --dry-run exclude each other")
    store = whole_store(arguments.url, "gc")
    root = store_place(arguments.url)
    without = tuple(named_path(root, text) for text in arguments.without)
    if "" in without:
        raise InvalidInputError("--without names the whole store: name the paths that cannot be read")
    options = GcOptions(
        dry_run=arguments.dry_run,
        exclusive=arguments.exclusive,
        reencode=arguments.reencode,
        without=without,
        concurrency=arguments.concurrency,
        deletes_per_s=arguments.rate,
    )
    reports = []
    with Progress("gc", wanted=arguments.progress) as progress:
        counts: dict[str, int] = {}

        def note(what: str, count: int) -> None:
            counts[what] = counts.get(what, 0) + count
            progress.note(", ".join(f"{number} {word}" for word, number in counts.items()))

        reports.append(collect(store, options, note))
        if arguments.wait and not reports[0].is_blocked and reports[0].next_s is not None:
            store.clock.sleep(reports[0].next_s)
            reports.append(collect(store, options, note))
    document = {"url": store.url, "runs": [report.as_dict() for report in reports]}
    lines = [line for report in reports for line in _lines(report, store)]
    code = BLOCKED_EXIT_CODE if any(report.is_blocked for report in reports) else 0
    return print_result(arguments, document, *lines, code=code)


def _lines(report: GcReport, store: Store) -> Iterator[str]:
    from tierfs.store.maintenance.gc.record_losses import VANISHED  # noqa: PLC0415 - it loads NumPy

    for each in report.unreadable:
        yield f"{'vanished' if each.kind == VANISHED else 'unreadable'}  {printable(each.path or each.key)}"
        yield f"  key      {printable(each.key)}"
        yield f"  problem  {printable(each.problem)}"
    if report.is_blocked:
        yield (
            f"nothing was condemned or deleted: {len(report.unreadable)} records cannot be read or have vanished, so gc does not know "
            f"what they need. Restore or delete them, or ignore them: {suggested('gc', store.url, '--without', 'PATH', '--yes')}"
        )
        return
    would = "would be " if report.dry_run else ""
    rows: list[tuple[str, Tally, str]] = [
        (f"{would}re-encoded", report.reencoded, "sent raw under pressure"),
        (f"{would}deleted", report.deleted, "condemned a grace ago, and still needed by nothing"),
        (f"{would}condemned", report.condemned, "needed by nothing"),
        ("waiting", report.waiting, "condemned, until a grace has passed"),
        ("young", report.young, "needed by nothing, and younger than a grace"),
        ("kept", report.reached, f"needed by {report.files} files"),
        (f"{would}deleted", report.replaced, "shard files that no save has named for a grace"),
        (
            "kept",
            report.unfinished,
            "shard files that no checkpoint names: of saves under way, unfinished or just replaced",
        ),
        (f"{would}tidied", report.tombstones, "tombstones"),
        (f"{would}tidied", report.leases, "expired leases"),
        (f"{would}tidied", report.probes, "probes"),
        (f"{would}tidied", report.references, "reference lists of deleted checkpoints"),
    ]
    shown = [(what, tally, why) for what, tally, why in rows if tally.count or tally is report.reached]
    cells = [(what, str(tally.count), format_bytes(tally.bytes), why) for what, tally, why in shown]
    yield from align(cells, right=(1, 2))
    if report.missing:
        yield f"{report.missing} chunks that files need are missing: {suggested('repair', store.url)} restores them or names the files"
    if report.next_s is not None and not report.dry_run:
        yield f"run gc again in {report.next_s} s to delete the condemned objects"
    elif report.young.count and not report.dry_run:
        yield (
            f"gc condemns young chunks a grace ({store.descriptor.grace_s} s) after they were written, and a later run deletes them after another grace; "
            "--exclusive does both at once, while no other process writes"
        )
