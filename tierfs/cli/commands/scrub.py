"""``tierfs scrub``: verify every chunk, least recently verified first, and heal damaged ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from tierfs.cli.arguments import add_options, add_replicas_argument, add_url_argument, require_seconds, suggested
from tierfs.cli.executors import add_executor_argument, open_executor
from tierfs.cli.files.places import store_place, whole_store
from tierfs.cli.terminal.output import print_result, printable
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import CorruptionError, InvalidInputError
from tierfs.units import format_bytes, parse_size

if TYPE_CHECKING:
    from tierfs.store import Store
    from tierfs.store.maintenance.scrub import ScrubReport
    from tierfs.store.maintenance.scrub_local import LocalReport
    from tierfs.store.maintenance.scrub_piece import ScrubPart, ScrubPiece

HELP = "verify every chunk of a store, the least recently verified first, and heal what is damaged"
EXAMPLES = """\
tierfs scrub s3://bucket/run
tierfs scrub s3://bucket/run --max-seconds 3600 --bandwidth 200MB
tierfs scrub s3://bucket/run --from s3://other-region/run
tierfs scrub /data/checkpoints --tier nvme
tierfs scrub s3://bucket/run --executor processes:8"""


_OPTIONS = {
    "--tier {object,ram,nvme}=object": "object (default), or the copies in a local tier of this host",
    "--max-seconds N:float": "start no chunk after N seconds; the next run continues there (default: verify all chunks once)",
    "--bandwidth BYTES": "most bytes read per second by all workers together, like 50MB",
    "--no-heal": "heal nothing; list the damage and record the progress",
    "--concurrency N:int=8": "objects that each worker reads at once (default: 8)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_options(parser, _OPTIONS)
    add_replicas_argument(parser)
    add_executor_argument(parser)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> int:
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
        return _run_local(arguments, store, bandwidth)
    from tierfs.store.maintenance.scrub import ScrubOptions, scrub  # noqa: PLC0415 - it loads NumPy

    options = ScrubOptions(arguments.max_seconds, bandwidth, arguments.concurrency, not arguments.no_heal)
    replicas = [store_place(url, bare=True).store for url in arguments.replicas]
    with (
        open_executor(arguments.executor) as found,
        Progress("scrub", wanted=arguments.progress) as progress,
    ):
        if found is None:
            report = scrub(store, options, replicas=replicas, progress=progress.advance)
        else:
            run_piece = partial(run_scrub_piece, arguments.url, tuple(arguments.replicas))
            report = scrub(
                store,
                options,
                executor=found.executor,
                workers=found.workers,
                run_piece=run_piece,
                progress=progress.advance,
            )
    return _shown(arguments, store, report, _lines(report, store.url))


def run_scrub_piece(url: str, replicas: tuple[str, ...], piece: ScrubPiece) -> ScrubPart:
    """Verify and heal one piece of the store at ``url`` in another process: see `scrub_piece`."""
    from tierfs.store.maintenance.scrub_piece import scrub_piece  # noqa: PLC0415 - it loads NumPy

    others = [store_place(replica, bare=True).store for replica in replicas]
    return scrub_piece(store_place(url).store, piece, replicas=others)


def _run_local(arguments: argparse.Namespace, store: Store, bandwidth: int | None) -> int:
    from tierfs.store.maintenance.scrub_local import scrub_local  # noqa: PLC0415 - it loads NumPy

    with Progress("scrub", wanted=arguments.progress) as progress:
        report = scrub_local(
            store,
            arguments.tier,
            max_seconds=arguments.max_seconds,
            bandwidth=bandwidth,
            progress=progress.advance,
        )
    return _shown(arguments, store, report, _local_lines(report))


def _shown(arguments: argparse.Namespace, store: Store, report: ScrubReport | LocalReport, lines: Iterator[str]) -> int:
    code = 0 if report.is_sound else CorruptionError.exit_code
    return print_result(arguments, {"url": store.url, **report.as_dict()}, *lines, code=code)


def _lines(report: ScrubReport, url: str) -> Iterator[str]:
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


def _local_lines(report: LocalReport) -> Iterator[str]:
    for each in report.damage:
        yield f"quarantined  {each.digest}"
        yield f"  problem  {printable(each.problem)}"
        yield f"  the object tier {'has it' if each.elsewhere else 'does not have it: what needs it is lost'}"
    yield (
        f"verified {report.chunks} chunks, {format_bytes(report.bytes)}, of the {report.tier} tier in {report.seconds:.1f} s: "
        f"{len(report.damage)} damaged"
    )
