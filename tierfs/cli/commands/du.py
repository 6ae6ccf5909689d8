"""``tierfs du``: logical, stored and shared bytes, and the bytes that deleting frees."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tierfs.cli.arguments import add_url_argument
from tierfs.cli.files.places import requests_of, store_place
from tierfs.cli.terminal.output import align, print_result
from tierfs.cli.terminal.progress import Progress
from tierfs.store import usage
from tierfs.units import format_bytes

HELP = "show logical, stored and shared bytes, and the bytes that deleting frees"
EXAMPLES = """\
tierfs du tierfs::s3://bucket/run
tierfs du /data/checkpoints --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    place = store_place(arguments.url)
    with place.must_exist(), Progress("du"):
        counts = {name: count for name, count in asdict(usage(place.store, place.path)).items() if count is not None}
    rows = [
        (name.replace("_", " "), format_bytes(count) if name.endswith("bytes") else str(count), _exactly(name, count))
        for name, count in counts.items()
    ]
    document = {**counts, "requests": requests_of(place.store)}
    return print_result(arguments, document, *align(rows, right=(1,)))


def _exactly(name: str, count: int) -> str:
    return f"({count})" if name.endswith("bytes") and count >= 1024 else ""  # noqa: PLR2004 - a smaller count is shown exactly
