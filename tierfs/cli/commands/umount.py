"""``tierfs umount``: unmount once every written file has reached the mount's level."""

from __future__ import annotations

import argparse

from tierfs.cli.arguments import add_options, require_seconds
from tierfs.cli.terminal.output import print_result
from tierfs.cli.terminal.progress import Progress
from tierfs.mount.mounting import unmount
from tierfs.mount.process import FLUSH_S

HELP = "unmount a store, after all written files have reached the level of the mount"
EXAMPLES = """\
tierfs umount /mnt/run
tierfs umount /mnt/run --timeout 600
tierfs umount /mnt/run --force     # unpublished changes are lost"""

_OPTIONS = {
    f"--timeout SECONDS:float={FLUSH_S}": f"how long publishing may take (default: {FLUSH_S:g})",
    "--force": "unmount even if files are open; unpublished changes are lost",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the directory where the store is mounted")
    add_options(parser, _OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Unmount. An error names the obstacle, and the mount stays as it was."""
    require_seconds("--timeout", arguments.timeout, over_0=True)
    with Progress("umount"):
        unmount(arguments.directory, timeout=arguments.timeout, force=arguments.force)
    return print_result(arguments, {"directory": arguments.directory})
