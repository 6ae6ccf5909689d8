"""``tierfs evict``: drop clean copies from a local tier."""

from __future__ import annotations

import argparse

from tierfs.cli.arguments import add_tier_argument, add_url_argument
from tierfs.cli.files.places import store_place
from tierfs.cli.terminal.output import print_result, printable
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.store import evict
from tierfs.units import format_bytes

HELP = "drop clean copies of a file, or of everything below a directory, from a local tier"
EXAMPLES = """\
tierfs evict tierfs::s3://bucket/run/step_1000
tierfs evict tierfs::s3://bucket/run --tier ram"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_tier_argument(parser)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> int:
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
