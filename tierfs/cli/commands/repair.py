"""``tierfs repair``: mend a store from its sound parts and replicas, and list the losses."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tierfs.cli.arguments import add_options, add_replicas_argument, add_url_argument
from tierfs.cli.files.places import store_place, whole_store
from tierfs.cli.terminal.output import print_result, printable
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import CorruptionError, InvalidInputError
from tierfs.session import parse_url
from tierfs.session.descriptor import mend_descriptor
from tierfs.store import Store

if TYPE_CHECKING:
    from tierfs.checkpoint.verify import CheckpointLoss
    from tierfs.store.maintenance.repair_report import RepairReport

HELP = "repair a store from sound parts and copies, move aside what stays damaged, and list the losses"
EXAMPLES = """\
tierfs repair s3://bucket/run --dry-run
tierfs repair s3://bucket/run
tierfs repair s3://bucket/run --read-data --from s3://other-region/run"""
NAMES_MAX = 10
_logger = logging.getLogger("tierfs.repair")

_OPTIONS = {
    "--read-data": "read all chunks first, as `tierfs scrub` does; by default, repair uses the damage that scrub found"
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="change nothing; print what would be done")
    add_options(parser, _OPTIONS)
    add_replicas_argument(parser)
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="requests at once (default: 16)")
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Repair, and return the exit code of damage if a file lost data."""
    from tierfs.store.maintenance.repair import repair  # noqa: PLC0415 - it loads NumPy
    from tierfs.store.maintenance.scrub import ScrubOptions, scrub  # noqa: PLC0415

    if arguments.concurrency < 1:
        raise InvalidInputError("--concurrency must be at least 1")
    replicas = [store_place(url, bare=True).store for url in arguments.replicas]
    descriptor = mend_descriptor(parse_url(arguments.url), replicas, dry_run=arguments.dry_run)
    if descriptor and arguments.dry_run:
        document: dict[str, object] = {"url": arguments.url, "dry_run": True, "descriptor": descriptor}
        what = f"would mend  .tierfs/store.json ({descriptor})"
        return print_result(arguments, document, f"{what}: a run without --dry-run mends it, then checks the rest")
    store = whole_store(arguments.url, "repair")
    with Progress("repair", wanted=arguments.progress) as progress:
        damaged = []
        if arguments.read_data:
            options = ScrubOptions(
                heal=False, concurrency=arguments.concurrency, dry_run=arguments.dry_run, look_age_s=None
            )
            damaged = [each.key for each in scrub(store, options, progress=progress.advance).damage]
        report = repair(
            store,
            replicas=replicas,
            damaged=damaged,
            dry_run=arguments.dry_run,
            concurrency=arguments.concurrency,
            progress=lambda what, count: progress.note(f"{what} +{count}"),
        )
    losses = _checkpoint_losses(store, report)
    checkpoints = None if losses is None else [asdict(each) for each in losses]
    document = {"url": store.url, "descriptor": descriptor, **report.as_dict(), "checkpoints": checkpoints}
    lines = [f"mended  .tierfs/store.json ({descriptor})"] if descriptor else []
    code = 0 if report.is_whole else CorruptionError.exit_code
    return print_result(arguments, document, *lines, *_lines(report, losses or ()), code=code)


def _checkpoint_losses(store: Store, report: RepairReport) -> list[CheckpointLoss] | None:
    """List the checkpoints that lost data; None if torch, which reads them, cannot be imported."""
    if report.is_whole:
        return []
    try:
        from tierfs.checkpoint.verify import checkpoint_losses  # noqa: PLC0415 - it loads torch
    except Exception as error:  # noqa: BLE001 - the repair must be reported even if torch is broken
        _logger.warning("lost files are listed without their checkpoints, because torch cannot be imported: %s", error)
        return None
    lost = {each.path: each.ranges for each in report.lost}
    return checkpoint_losses(store.without_local_tiers(), lost, report.lost_files)


def _lines(report: RepairReport, losses: Sequence[CheckpointLoss]) -> Iterator[str]:
    would = "would be " if report.dry_run else ""
    for what, items in ((f"{would}mended", report.mended), (f"{would}moved", report.moved), ("left", report.left)):
        for each in items:
            yield f"{what}  {printable(each.key)}"
            yield f"  problem  {printable(each.problem)}"
            if each.how:
                yield (
                    f"  {'to' if 'moved' in what else 'from' if 'mended' in what else 'because'}  {printable(each.how)}"
                )
    for path in report.lost_files:
        yield f"lost  {printable(path)}: its record"
    for path in report.vanished:
        yield f"lost  {printable(path)}: its record vanished without a tombstone; restore it, or run gc --without"
    for loss in report.lost:
        count = sum(length for _, length in loss.ranges)
        yield f"lost  {printable(loss.path)}: {count} bytes in {len(loss.ranges)} places"
    for each_loss in losses:
        if each_loss.is_whole:
            yield f"checkpoint {printable(each_loss.path)} is lost: its metadata cannot be read"
            continue
        names = ", ".join(map(printable, each_loss.names[:NAMES_MAX]))
        more = f" and {len(each_loss.names) - NAMES_MAX} more" if len(each_loss.names) > NAMES_MAX else ""
        yield f"checkpoint {printable(each_loss.path)} lost {len(each_loss.names)} tensors: {names}{more}"
    count = len(report.lost) + len(report.lost_files) + len(report.vanished)
    state = "nothing is lost" if report.is_whole else f"{count} files lost something"
    yield (
        f"checked {report.records} records and {report.chunks} chunks: {len(report.mended)} {would}mended, "
        f"{len(report.moved)} {would}moved aside, {len(report.left)} left; {state}"
    )
