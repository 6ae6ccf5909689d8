"""``tierfs verify``: read all data back and list damage."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tierfs.cli.arguments import add_url_argument
from tierfs.cli.files.places import store_place
from tierfs.cli.terminal.output import add_json_argument, print_json, printable
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import CorruptionError
from tierfs.store import VerifyReport, verify
from tierfs.units import format_bytes

HELP = "read every byte of a file, a directory or a store back, and list damage"
EXAMPLES = """\
tierfs verify tierfs::s3://bucket/run/step_1000
tierfs verify /data/checkpoints --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_progress_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Verify, and return the exit code of damage if there is any."""
    place = store_place(arguments.url, bare=True)
    with Progress("verify", wanted=arguments.progress) as progress, place.must_exist():
        report = verify(place.store, place.path, progress=progress.advance)
    if arguments.json:
        print_json({"url": place.url, **asdict(report)})
    else:
        _print(report, place.url)
    return CorruptionError.exit_code if report.damage else 0


def _print(report: VerifyReport, url: str) -> None:
    for damage in report.damage:
        print(f"damaged  {printable(damage.path)}")
        print(f"  key      {printable(damage.key)}")
        print(f"  kind     {damage.kind}")
        print(f"  problem  {printable(damage.problem)}")
    checked = f"{report.files} records, {report.chunks} chunks, {format_bytes(report.raw_bytes)} below {printable(url)}"
    print(f"checked {checked}: {f'{len(report.damage)} damaged' if report.damage else 'all sound'}")
