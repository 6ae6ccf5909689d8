"""``tierfs mount``: mount a store on a directory of this host, for tools that need a path."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from tierfs.cli.arguments import LEVELS, add_options, add_url_argument, require_seconds
from tierfs.cli.files.places import names_checkpoint, store_place
from tierfs.cli.terminal.output import print_result
from tierfs.mount.mounting import start
from tierfs.mount.process import MountOptions, serve

HELP = "mount a store, or a directory in one, on a directory of this host"
EXAMPLES = """\
tierfs mount tierfs::s3://bucket/run /mnt/run
tierfs mount tierfs::s3://bucket/run/step_1000 /mnt/model --read-only
tierfs mount tierfs://NAME /mnt/store --foreground --ack object   # in a container"""


_OPTIONS = {
    "--read-only": "refuse every change",
    "--allow-other": "let other users of the host access it, as the files' modes allow",
    "--timeout SECONDS:float": "how long a program waits for the object tier before it gets EIO (default: 30). Storing a whole file may take 600 s, or ten times this if it is below 30 or above 60",
    "--foreground": "serve in this process, until unmount or SIGTERM; exit code 1 if a change could not be published",
    f"--ack {LEVELS}": "how safe a file is when close or fsync returns (default: as the store is configured)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument("directory", metavar="DIR", help="where to mount it: an existing directory")
    add_options(parser, _OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Mount. In the background, return when the mount is usable; in the foreground, return 1 if changes remain."""
    given = {}
    if arguments.timeout is not None:
        require_seconds("--timeout", arguments.timeout, over_0=True, may_be_infinite=True)
        given = {"timeout_s": arguments.timeout}
    # The mount stays on the checkpoint that is the latest or best one now.
    url = store_place(arguments.url).url if names_checkpoint(arguments.url) else arguments.url
    options = MountOptions(arguments.read_only, arguments.allow_other, arguments.ack, **given)
    directory = Path(arguments.directory).absolute()
    if not arguments.foreground:
        process = start(url, directory, options)
        process.returncode = 0  # it outlives this process: keep subprocess from warning about it
        return print_result(arguments, {"url": url, "directory": str(directory), "pid": process.pid})
    logger = logging.getLogger("tierfs.mount")
    left = serve(url, directory, options, lambda: logger.info("%s is mounted", directory))
    document = {"url": url, "directory": str(directory), "left": left}
    return print_result(arguments, document, code=1 if left else 0)
