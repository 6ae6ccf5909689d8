"""``tierfs cat``: write the bytes of a file to stdout."""

from __future__ import annotations

import argparse
import sys

from tierfs.cli.arguments import add_url_argument, suggested
from tierfs.cli.files.places import store_place
from tierfs.cli.files.transfer import StreamTarget, read_pieces
from tierfs.errors import InvalidInputError
from tierfs.store import open_entry
from tierfs.units import parse_size

HELP = "write the bytes of a file, or a range of them, to stdout"
EXAMPLES = """\
tierfs cat tierfs::s3://bucket/run/config.json
tierfs cat --offset 8 --length 4KiB /data/checkpoints/run/model.safetensors | xxd"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument("--offset", type=_size, default=0, metavar="N", help="first byte, counted from 0 (default: 0)")
    parser.set_defaults(json=False)
    parser.add_argument("--length", type=_size, metavar="N", help="number of bytes at most (default: to the end)")


def run(arguments: argparse.Namespace) -> int:
    """Write the bytes. Each is verified before it is written."""
    place = store_place(arguments.url)
    entry = place.entry()
    if entry.is_directory:
        raise InvalidInputError(f"{place.url} is a directory: {suggested('ls', place.url)} lists it", path=place.url)
    reader = open_entry(place.store, entry)
    start = min(arguments.offset, reader.length)
    stop = reader.length if arguments.length is None else min(start + arguments.length, reader.length)
    StreamTarget(sys.stdout.buffer).fill(read_pieces(reader, start, stop), None)
    return 0


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
