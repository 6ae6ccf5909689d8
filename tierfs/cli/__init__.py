"""The command line: ``tierfs COMMAND``. One file per command, in `tierfs.cli.commands`."""

from tierfs.cli.app import main

__all__ = ["main"]
