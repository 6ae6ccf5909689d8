"""``tierfs version``: show versions, without importing the packages."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

from tierfs import __version__, kernels
from tierfs.cli.terminal.output import align, print_result
from tierfs.format.header import VERSION

HELP = "show the versions of tierfs, the store format and the packages that tierfs uses"
EXAMPLES = """\
tierfs version
tierfs version --json"""


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Declare nothing: the command has no arguments of its own."""


def run(arguments: argparse.Namespace) -> int:
    versions = {
        "tierfs": __version__,
        "format": VERSION,
        "python": platform.python_version(),
        "fsspec": installed_version("fsspec"),
        "torch": installed_version("torch"),
        "kernels": kernels.status(),
    }
    rows = [(name, "not installed" if version is None else str(version)) for name, version in versions.items()]
    return print_result(arguments, versions, *align(rows))


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
