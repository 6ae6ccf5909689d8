"""``tierfs verify``, ``scrub`` and ``repair``: find damage, and mend it."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from tierfs.cli.arguments import (
    EXECUTOR,
    URL,
    command,
    open_executor,
    progress_option,
    replicas_option,
    require_seconds,
    suggested,
)
from tierfs.cli.files.places import store_place, whole_store
from tierfs.cli.terminal.output import print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.clock import Pace
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, StoreError, without_passwords
from tierfs.session import parse_url
from tierfs.session.descriptor import mend_descriptor
from tierfs.store import Damage, Store, VerifyReport, verify
from tierfs.store.read.verify import ChunkJob, verify_chunks
from tierfs.units import format_bytes, parse_share, parse_size

if TYPE_CHECKING:
    from tierfs.checkpoint.verify import CheckpointLoss
    from tierfs.store.maintenance.repair_records import RepairReport
    from tierfs.store.maintenance.scrub import ScrubReport
    from tierfs.store.maintenance.scrub_local import LocalReport
    from tierfs.store.maintenance.scrub_piece import ScrubPart, ScrubPiece


WHOLE = 1_000_000
NAMES_MAX = 10
_logger = logging.getLogger("tierfs.repair")


@command(
    "verify",
    "read every byte of a file, a directory or a store back, and list damage",
    """
    tierfs verify tierfs::s3://bucket/run/step_1000
    tierfs verify /data/checkpoints --json
    tierfs verify s3://bucket/run --sample 5% --bandwidth 200MB
    tierfs verify s3://bucket/run --executor processes:8
    """,
    URL,
    {
        "--sample SHARE": "read this share of the chunks, drawn at random, like 5%%",
        "--bandwidth BYTES": "most bytes read per second by all workers together, like 50MB",
    },
    EXECUTOR,
    progress_option,
)
def run_verify(arguments: argparse.Namespace) -> int:
    """Verify, and return the exit code of damage if there is any."""
    sample = arguments.sample or "100%"
    share = parse_share(sample, WHOLE) / WHOLE if sample.endswith("%") else 0.0
    bandwidth = None if arguments.bandwidth is None else parse_size(arguments.bandwidth)
    if not share or bandwidth == 0:
        raise InvalidInputError("--sample and --bandwidth must be more than 0: write a share like 5%, a size like 50MB")
    place = store_place(arguments.url, bare=True)
    with (
        open_executor(arguments.executor) as (executor, workers),
        Progress("verify", wanted=arguments.progress) as progress,
        place.must_exist(),
    ):
        each = None if bandwidth is None else bandwidth / workers
        report = verify(
            place.store,
            place.path,
            sample=share,
            bandwidth=bandwidth,
            workers=workers,
            executor=executor,
            run_batch=None if executor is None else partial(run_verify_batch, arguments.url, each),
            progress=progress.advance,
        )
    unread = StoreError.exit_code if report.unread else 0
    code = CorruptionError.exit_code if report.damage or report.vanished else unread
    lines = _verify_lines(report, place.url, is_sample=share < 1)
    return print_result(arguments, {"url": place.url, **asdict(report)}, *lines, code=code)


def run_verify_batch(url: str, bandwidth: float | None, jobs: Sequence[ChunkJob]) -> list[Damage]:
    """Verify some chunks of the store at ``url`` in another process: see `verify_chunks`."""
    store = store_place(url, bare=True).store
    return verify_chunks(store, jobs, pace=Pace(store.clock, bandwidth))


def _verify_lines(report: VerifyReport, url: str, *, is_sample: bool) -> Iterator[str]:
    for what, damage in [
        *(("damaged", each) for each in report.damage),
        *(("vanished", each) for each in report.vanished),
        *(("unread", each) for each in report.unread),
    ]:
        yield f"{what}  {printable(damage.path)}"
        yield f"  key      {printable(damage.key)}"
        yield f"  kind     {damage.kind}"
        yield f"  problem  {printable(damage.problem)}"
    drawn = "a sample of " if is_sample else ""
    checked = f"{report.files} records, {drawn}{report.chunks} chunks, {format_bytes(report.raw_bytes)} below {printable(url)}"
    found = f"{len(report.damage)} damaged" if report.damage or report.vanished else "all sound"
    if report.vanished:
        found += f", {len(report.vanished)} vanished"
    if report.unread:
        found = f"{len(report.damage)} damaged, {len(report.unread)} could not be read: try again"
    yield f"checked {checked}: {found}"


@command(
    "scrub",
    "verify every chunk of a store, the least recently verified first, and heal what is damaged",
    """
    tierfs scrub s3://bucket/run
    tierfs scrub s3://bucket/run --max-seconds 3600 --bandwidth 200MB
    tierfs scrub s3://bucket/run --from s3://other-region/run
    tierfs scrub /data/checkpoints --tier nvme
    tierfs scrub s3://bucket/run --executor processes:8
    """,
    URL,
    {
        "--tier {object,ram,nvme}=object": "object (default), or the copies in a local tier of this host",
        "--max-seconds N:float": "start no chunk after N seconds; the next run continues there (default: verify all chunks once)",
        "--bandwidth BYTES": "most bytes read per second by all workers together, like 50MB",
        "--no-heal": "heal nothing; list the damage and record the progress",
        "--concurrency N:int=8": "objects that each worker reads at once (default: 8)",
    },
    replicas_option,
    EXECUTOR,
    progress_option,
)
def run_scrub(arguments: argparse.Namespace) -> int:
    """Scrub, and return the exit code of damage if any remains."""
    bandwidth = None if arguments.bandwidth is None else parse_size(arguments.bandwidth)
    if arguments.max_seconds is not None:
        require_seconds("--max-seconds", arguments.max_seconds, may_be_infinite=True)
    if arguments.concurrency < 1 or bandwidth == 0:
        raise InvalidInputError("--concurrency and --bandwidth must be more than 0")
    is_local = arguments.tier != "object"
    if is_local and (arguments.replicas or arguments.executor or arguments.no_heal):
        raise InvalidInputError("--from, --executor and --no-heal are for the object tier")
    store = whole_store(arguments.url, "scrub", as_configured=is_local)
    if is_local:
        return _scrub_local_tier(arguments, store, bandwidth)
    from tierfs.store.maintenance.scrub import ScrubOptions, scrub  # noqa: PLC0415 - it loads NumPy

    options = ScrubOptions(arguments.max_seconds, bandwidth, arguments.concurrency, not arguments.no_heal)
    replicas = [store_place(url, bare=True).store for url in arguments.replicas]
    elsewhere = partial(run_scrub_piece, arguments.url, tuple(arguments.replicas))
    with (
        open_executor(arguments.executor) as (executor, workers),
        Progress("scrub", wanted=arguments.progress) as progress,
    ):
        report = scrub(
            store,
            options,
            replicas=replicas,
            executor=executor,
            workers=workers,
            run_piece=None if executor is None else elsewhere,
            progress=progress.advance,
        )
    return _shown(arguments, store, report, _scrub_lines(report, store.url))


def run_scrub_piece(url: str, replicas: tuple[str, ...], piece: ScrubPiece) -> ScrubPart:
    """Verify and heal one piece of the store at ``url`` in another process: see `scrub_piece`."""
    from tierfs.store.maintenance.scrub_piece import scrub_piece  # noqa: PLC0415 - it loads NumPy

    others = [store_place(replica, bare=True).store for replica in replicas]
    return scrub_piece(store_place(url).store, piece, replicas=others)


def _scrub_local_tier(arguments: argparse.Namespace, store: Store, bandwidth: int | None) -> int:
    from tierfs.store.maintenance.scrub_local import scrub_local  # noqa: PLC0415 - it loads NumPy

    with Progress("scrub", wanted=arguments.progress) as progress:
        report = scrub_local(
            store,
            arguments.tier,
            max_seconds=arguments.max_seconds,
            bandwidth=bandwidth,
            progress=progress.advance,
        )
    return _shown(arguments, store, report, _scrub_local_lines(report))


def _shown(arguments: argparse.Namespace, store: Store, report: ScrubReport | LocalReport, lines: Iterator[str]) -> int:
    code = 0 if report.is_sound else CorruptionError.exit_code
    return print_result(arguments, {"url": store.url, **report.as_dict()}, *lines, code=code)


def _scrub_lines(report: ScrubReport, url: str) -> Iterator[str]:
    for each in report.damage:
        yield f"{'healed' if each.healed else 'damaged'}  {printable(each.key)}"
        yield f"  problem  {printable(each.problem)}"
        if each.healed:
            yield f"  from     {printable(each.healed)}"
    for key, problem in report.known.items():
        yield f"damaged  {printable(key)}"
        yield f"  problem  {printable(problem)} (found by an earlier run)"
    for each_record in report.unreadable:
        yield f"unreadable  {printable(each_record.path)}"
        yield f"  problem  {printable(each_record.problem)}"
    if report.missing:
        yield f"missing  {report.missing} chunks that files need"
    left = (
        report.missing
        + len(report.unreadable)
        + len(report.known)
        + sum(1 for each in report.damage if not each.healed)
    )
    found = f"{left} damaged or missing: {suggested('repair', url)} lists the affected files" if left else "all sound"
    yield (
        f"verified {report.chunks} chunks, {format_bytes(report.bytes)}, in {report.seconds:.1f} s: {found}; "
        f"{report.prefixes_done} of 256 prefixes are done"
    )


def _scrub_local_lines(report: LocalReport) -> Iterator[str]:
    for each in report.damage:
        yield f"quarantined  {each.digest}"
        yield f"  problem  {printable(each.problem)}"
        yield f"  the object tier {'has it' if each.elsewhere else 'does not have it: what needs it is lost'}"
    yield (
        f"verified {report.chunks} chunks, {format_bytes(report.bytes)}, of the {report.tier} tier in {report.seconds:.1f} s: "
        f"{len(report.damage)} damaged"
    )


@command(
    "repair",
    "repair a store from sound parts and copies, move aside what stays damaged, and list the losses",
    """
    tierfs repair s3://bucket/run --dry-run
    tierfs repair s3://bucket/run
    tierfs repair s3://bucket/run --read-data --from s3://other-region/run
    """,
    URL,
    {
        "--dry-run": "change nothing; print what would be done",
        "--read-data": "read all chunks first, as `tierfs scrub` does; by default, repair uses the damage that scrub found",
    },
    replicas_option,
    {"--concurrency N:int=16": "requests at once (default: 16)"},
    progress_option,
)
def run_repair(arguments: argparse.Namespace) -> int:
    """Repair, and return the exit code of damage, or of the format if only a newer tierfs may read what is left."""
    from tierfs.store.maintenance.repair import repair  # noqa: PLC0415 - it loads NumPy
    from tierfs.store.maintenance.repair_records import NEWER  # noqa: PLC0415
    from tierfs.store.maintenance.scrub import ScrubOptions, scrub  # noqa: PLC0415

    if arguments.concurrency < 1:
        raise InvalidInputError("--concurrency must be at least 1")
    replicas = [store_place(url, bare=True).store for url in arguments.replicas]
    descriptor = mend_descriptor(parse_url(arguments.url), replicas, dry_run=arguments.dry_run)
    if descriptor and arguments.dry_run:
        document: dict[str, object] = {
            "url": without_passwords(arguments.url),
            "dry_run": True,
            "descriptor": descriptor,
        }
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
    is_newer = not report.losses and all(each.how == NEWER for each in report.unread)
    code = 0 if report.is_whole else FormatError.exit_code if is_newer else CorruptionError.exit_code
    return print_result(arguments, document, *lines, *_repair_lines(report, losses or ()), code=code)


def _checkpoint_losses(store: Store, report: RepairReport) -> list[CheckpointLoss] | None:
    """List the checkpoints that lost data; None if torch, which reads them, cannot be imported."""
    if not report.losses:
        return []
    try:
        from tierfs.checkpoint.verify import checkpoint_losses  # noqa: PLC0415 - it loads torch
    except Exception as error:  # noqa: BLE001 - the repair must be reported even if torch is broken
        _logger.warning("lost files are listed without their checkpoints, because torch cannot be imported: %s", error)
        return None
    lost = {each.path: each.ranges for each in report.lost}
    return checkpoint_losses(store.without_local_tiers(), lost, report.lost_files)


def _repair_lines(report: RepairReport, losses: Sequence[CheckpointLoss]) -> Iterator[str]:
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
    states = [f"{report.losses} files lost something"] if report.losses else []
    if report.unread:
        states.append(f"{len(report.unread)} records could not be read, so what their files lost is not known")
    state = "; ".join(states) or "nothing is lost"
    yield (
        f"checked {report.records} records and {report.chunks} chunks: {len(report.mended)} {would}mended, "
        f"{len(report.moved)} {would}moved aside, {len(report.left)} left; {state}"
    )
