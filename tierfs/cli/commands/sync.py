"""``tierfs sync``: make a directory in a store equal to a local directory."""

from __future__ import annotations

import argparse
import dataclasses
import os

from tierfs.cli.arguments import add_url_argument, require_url
from tierfs.cli.files.places import store_place
from tierfs.cli.files.targets import refuse_below_file
from tierfs.cli.mirror.up import sync
from tierfs.cli.terminal.output import add_json_argument, print_json
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import InvalidInputError, NotFoundError

HELP = "make a directory in a store equal to a local one; bytes that the store has are not stored again"
EXAMPLES = """\
tierfs sync /data/model tierfs::s3://bucket/models/first
tierfs sync /data/model tierfs://NAME/models/first --delete"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a local directory")
    add_url_argument(parser)
    parser.add_argument(
        "--delete",
        action="store_true",
        help="delete files and directories in the store that DIR does not have, if tierfs wrote all of them",
    )
    add_progress_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    directory = arguments.directory
    require_url(directory)
    if not os.path.exists(directory):
        raise NotFoundError(f"{directory} does not exist on this host", path=directory)
    if not os.path.isdir(directory):
        raise InvalidInputError(f"{directory} is not a directory: `tierfs cp` copies a file", path=directory)
    place = store_place(arguments.url, write=True)
    kind = place.kind()
    if kind == "file":
        raise InvalidInputError(f"{place.url} is a file: name a directory", path=place.url)
    if kind is None:
        refuse_below_file(place)
    with Progress("sync", wanted=arguments.progress) as progress:
        done = sync(place, directory, progress, deletes=arguments.delete)
    if arguments.json:
        print_json(dataclasses.asdict(done))
    return 0
