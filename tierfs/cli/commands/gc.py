"""``tierfs gc``: delete objects of a store that no record needs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tierfs.cli.arguments import add_url_argument
from tierfs.cli.files.places import named_path, store_place, whole_store
from tierfs.cli.terminal.output import add_json_argument, align, print_json, printable
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import InvalidInputError
from tierfs.units import format_bytes

if TYPE_CHECKING:
    from tierfs.store.maintenance.gc import GcReport, Tally

HELP = "delete objects that nothing in a store needs"
EXAMPLES = """\
tierfs gc s3://bucket/run --dry-run
tierfs gc s3://bucket/run
tierfs gc /data/checkpoints --wait
tierfs gc /data/checkpoints --exclusive"""
BLOCKED_EXIT_CODE = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="change nothing; print what would be done, by reason")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait until the objects that this run condemns may be deleted, and delete them (default: the next run does)",
    )
    parser.add_argument(
        "--exclusive",
        action="store_true",
        help="delete at once, if no other process writes; refused if a writer has a live lease",
    )
    parser.add_argument(
        "--reencode",
        action="store_true",
        help="first encode chunks that were sent raw under pressure; gc deletes the raw ones later",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="ROOT",
        help="a path in the store, or its URL, below which unreadable and vanished records are ignored; needs --yes; may be given several times",
    )
    parser.add_argument(
        "--yes", action="store_true", help="confirm --without: chunks that those files need may be deleted"
    )
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="requests at once (default: 16)")
    parser.add_argument(
        "--rate", type=float, default=3000, metavar="N", help="most objects deleted per second (default: 3000)"
    )
    add_progress_argument(parser)
    add_json_argument(parser)


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
    if arguments.json:
        print_json({"url": store.url, "runs": [report.as_dict() for report in reports]})
    else:
        for report in reports:
            _print(report, store.descriptor.grace_s)
    return BLOCKED_EXIT_CODE if any(report.is_blocked for report in reports) else 0


def _print(report: GcReport, grace_s: int) -> None:
    from tierfs.store.maintenance.gc.record_losses import VANISHED  # noqa: PLC0415 - it loads NumPy

    for each in report.unreadable:
        print(f"{'vanished' if each.kind == VANISHED else 'unreadable'}  {printable(each.path or each.key)}")
        print(f"  key      {printable(each.key)}")
        print(f"  problem  {printable(each.problem)}")
    if report.is_blocked:
        print(
            f"nothing was condemned or deleted: {len(report.unreadable)} records cannot be read or have vanished, so gc does not know "
            "what they need. Restore or delete them, or let gc ignore them: tierfs gc --without PATH --yes"
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
    print("\n".join(align(cells, right=(1, 2))))
    if report.missing:
        print(f"{report.missing} chunks that files need are missing: `tierfs repair` restores them or names the files")
    if report.next_s is not None and not report.dry_run:
        print(f"run gc again in {report.next_s} s to delete the condemned objects")
    elif report.young.count and not report.dry_run:
        print(
            f"gc condemns young chunks a grace ({grace_s} s) after they were written, and a later run deletes them after another grace; "
            "--exclusive does both at once, while no other process writes"
        )
