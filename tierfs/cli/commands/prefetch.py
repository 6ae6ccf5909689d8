"""``tierfs prefetch``: copy files to a local tier before they are read."""

from __future__ import annotations

import argparse

from tierfs.cli.arguments import add_tier_argument, add_url_argument
from tierfs.cli.files.places import StorePlace, store_place
from tierfs.cli.terminal.output import print_result, printable
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import InvalidInputError
from tierfs.store import find, prefetch
from tierfs.units import format_bytes

HELP = "copy a file, or everything below a directory, to this host's disk"
EXAMPLES = """\
tierfs prefetch tierfs::s3://bucket/run/step_1000
tierfs prefetch tierfs::s3://bucket/data --progress"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_tier_argument(parser)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.tier == "ram":
        raise InvalidInputError(
            "copies in the ram tier would be dropped when this command ends: omit --tier to copy to the nvme tier, or call "
            "fs.prefetch(path) in the process that reads the files"
        )
    place = store_place(arguments.url)
    with Progress("prefetch", wanted=arguments.progress) as progress:
        if progress.is_shown:
            progress.expect(_size(place))
        with place.must_exist():
            count = prefetch(place.store, place.path, arguments.tier, progress=progress.advance)
    return print_result(
        arguments, {"bytes": count}, f"{format_bytes(count)} of {printable(place.url)} in the {arguments.tier} tier"
    )


def _size(place: StorePlace) -> int:
    """Count the bytes that a prefetch copies. Files that lie in their manifests need no copy."""
    top = place.entry()
    entries = find(place.store, place.path) if top.is_directory else [top]
    files = (entry for entry in entries if not entry.is_directory)
    return sum(entry.length for entry in files if entry.manifest is None or entry.manifest.inline is None)
