"""``tierfs probe``: test which promises an endpoint keeps."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import asdict

from tierfs.cli.arguments import add_url_argument
from tierfs.cli.terminal.output import align, print_result
from tierfs.cli.terminal.progress import Progress
from tierfs.session import parse_url
from tierfs.session.descriptor import ProbeReport, probe_store

HELP = "test which conditions and checksums an endpoint supports, and record the result in its store"
EXAMPLES = """\
tierfs probe s3://bucket/run
tierfs probe tierfs://NAME --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    with Progress("probe"):
        report = probe_store(parse_url(arguments.url))
    document = {
        "url": report.url,
        "has_store": report.before is not None,
        "noted": report.before not in (None, report.endpoint),
        "single_writer": report.endpoint.single_writer,
        "cannot_promise": report.endpoint.missing,
        "checksums": list(report.endpoint.checksums),
        "tests": [asdict(test) for test in report.tests],
    }
    return print_result(arguments, document, *_lines(report))


def _lines(report: ProbeReport) -> Iterator[str]:
    rows = [("kept" if test.kept else "not kept", test.name, test.detail) for test in report.tests]
    yield from align(rows, states=(0,))
    endpoint = report.endpoint
    yield f"writers   {'one process at a time' if endpoint.single_writer else 'any number'}"
    if not endpoint.host_local:
        yield f"writes    {f'verified by the server, {endpoint.checksums[0]}' if endpoint.checksums else 'read back'}"
    if report.before is None:
        yield f"store     none at {report.url}: make one with: tierfs init {shlex.quote(report.url)}"
    elif report.before == endpoint:
        yield f"store     {report.url}, with the same result recorded"
    else:
        yield (
            f"store     {report.url}, with the new result recorded; processes that have it open use the result after they reopen it"
        )
