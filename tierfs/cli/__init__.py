"""The command line: ``tierfs COMMAND``. One file per command; what they share begins with ``_``."""

from tierfs.cli.frame import main

__all__ = ["main"]
