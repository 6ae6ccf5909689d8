"""``tierfs mount``: mount a store on a directory of this host, for tools that need a path."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from tierfs.cli.arguments import LEVELS, add_url_argument, require_seconds, require_url
from tierfs.cli.terminal.output import add_json_argument, print_json
from tierfs.mount.mounting import start
from tierfs.mount.process import MountOptions, serve

HELP = "mount a store, or a directory in one, on a directory of this host"
EXAMPLES = """\
tierfs mount tierfs::s3://bucket/run /mnt/run
tierfs mount tierfs::s3://bucket/run/step_1000 /mnt/model --read-only
tierfs mount tierfs://NAME /mnt/store --foreground --ack object   # in a container"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument("directory", metavar="DIR", help="where to mount it: an existing directory")
    parser.add_argument("--read-only", action="store_true", help="refuse every change")
    parser.add_argument(
        "--allow-other", action="store_true", help="let other users of the host access it, as the files' modes allow"
    )
    parser.add_argument(
        "--ack",
        choices=LEVELS,
        help="how safe a file is when close or fsync returns (default: as the store is configured)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long a program waits for the object tier before it gets EIO (default: 30). Storing a whole file may take 600 s, or ten times this "
        "if it is below 30 or above 60",
    )
    parser.add_argument(
        "--foreground",
        action="store_true",
        help="serve in this process, until unmount or SIGTERM; exit code 1 if a change could not be published",
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Mount. In the background, return when the mount is usable; in the foreground, return 1 if changes remain."""
    require_url(arguments.url)
    require_url(arguments.directory)
    given = {}
    if arguments.timeout is not None:
        require_seconds("--timeout", arguments.timeout, over_0=True, may_be_infinite=True)
        given = {"timeout_s": arguments.timeout}
    options = MountOptions(arguments.read_only, arguments.allow_other, arguments.ack, **given)
    directory = Path(arguments.directory).absolute()
    if not arguments.foreground:
        process = start(arguments.url, directory, options)
        process.returncode = 0  # it outlives this process: keep subprocess from warning about it
        if arguments.json:
            print_json({"url": arguments.url, "directory": str(directory), "pid": process.pid})
        return 0
    logger = logging.getLogger("tierfs.mount")
    left = serve(arguments.url, directory, options, lambda: logger.info("%s is mounted", directory))
    if arguments.json:
        print_json({"url": arguments.url, "directory": str(directory), "left": left})
    return 1 if left else 0
