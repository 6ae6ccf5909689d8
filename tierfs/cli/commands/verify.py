"""``tierfs verify``: read all data back and list damage."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

from tierfs.cli.arguments import add_url_argument
from tierfs.cli.executors import add_executor_argument, open_executor
from tierfs.cli.files.places import store_place
from tierfs.cli.terminal.output import print_result, printable
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.clock import Pace
from tierfs.errors import CorruptionError, InvalidInputError, StoreError
from tierfs.store import Damage, VerifyReport, verify
from tierfs.store.read.verify import ChunkJob, verify_chunks
from tierfs.units import format_bytes, parse_share, parse_size

HELP = "read every byte of a file, a directory or a store back, and list damage"
EXAMPLES = """\
tierfs verify tierfs::s3://bucket/run/step_1000
tierfs verify /data/checkpoints --json
tierfs verify s3://bucket/run --sample 5% --bandwidth 200MB
tierfs verify s3://bucket/run --executor processes:8"""
WHOLE = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument("--sample", metavar="SHARE", help="read this share of the chunks, drawn at random, like 5%%")
    parser.add_argument(
        "--bandwidth", metavar="BYTES", help="most bytes read per second by all workers together, like 50MB"
    )
    add_executor_argument(parser)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Verify, and return the exit code of damage if there is any."""
    sample = arguments.sample or "100%"
    share = parse_share(sample, WHOLE) / WHOLE if sample.endswith("%") else 0.0
    bandwidth = None if arguments.bandwidth is None else parse_size(arguments.bandwidth)
    if not share or bandwidth == 0:
        raise InvalidInputError("--sample and --bandwidth must be more than 0: write a share like 5%, a size like 50MB")
    place = store_place(arguments.url, bare=True)
    with (
        open_executor(arguments.executor) as found,
        Progress("verify", wanted=arguments.progress) as progress,
        place.must_exist(),
    ):
        executor, workers = (None, 1) if found is None else found
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
    lines = _lines(report, place.url, is_sample=share < 1)
    return print_result(arguments, {"url": place.url, **asdict(report)}, *lines, code=code)


def run_verify_batch(url: str, bandwidth: float | None, jobs: Sequence[ChunkJob]) -> list[Damage]:
    """Verify some chunks of the store at ``url`` in another process: see `verify_chunks`."""
    store = store_place(url, bare=True).store
    return verify_chunks(store, jobs, pace=Pace(store.clock, bandwidth))


def _lines(report: VerifyReport, url: str, *, is_sample: bool) -> Iterator[str]:
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
