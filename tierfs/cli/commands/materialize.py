"""``tierfs materialize``: make a local directory equal to a directory in a store."""

from __future__ import annotations

import argparse
import dataclasses

from tierfs.cli.arguments import add_url_argument, require_url
from tierfs.cli.files.places import store_place
from tierfs.cli.mirror.down import materialize
from tierfs.cli.terminal.output import add_json_argument, print_json
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import InvalidInputError

HELP = "make a local directory equal to one in a store, for programs that want a path"
EXAMPLES = """\
tierfs materialize tierfs::s3://bucket/run/step_1000 /data/model
tierfs materialize tierfs://NAME/model /data/model --delete"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument("directory", metavar="DIR", help="a local directory; created if it is missing")
    parser.add_argument(
        "--delete", action="store_true", help="delete files, links and directories in DIR that the store does not have"
    )
    add_progress_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    require_url(arguments.directory)
    place = store_place(arguments.url)
    if not place.entry().is_directory:
        raise InvalidInputError(f"{place.url} is a file: `tierfs cp` copies it", path=place.url)
    with Progress("materialize", wanted=arguments.progress) as progress:
        done = materialize(place, arguments.directory, progress, deletes=arguments.delete)
    if arguments.json:
        print_json(dataclasses.asdict(done))
    return 0
