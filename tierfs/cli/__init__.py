"""The command line: ``tierfs COMMAND``. Related commands are in one file of `tierfs.cli.commands`."""

from tierfs.cli.app import main

__all__ = ["main"]
