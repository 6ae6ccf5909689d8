"""Folders that code for local paths made of a URL: ``./tierfs::file:`` and the like in the working directory.

``pathlib.Path(url)`` and ``os.makedirs(url)`` succeed. Files that are saved there are in no store, and nobody says so. It is
named when the process ends, and by ``tierfs status``.
"""

from __future__ import annotations

import atexit
import itertools
import os

__all__ = ["do_not_warn", "misplaced", "warn_at_exit"]

ENTRIES_MAX = 100_000
_PREFIX = "tierfs:"


def misplaced(directory: str | None = None) -> list[str]:
    """Full paths of such folders in a directory, by default the working directory; none where it cannot be read."""
    try:
        where = os.getcwd() if directory is None else directory
        with os.scandir(where) as entries:
            looked_at = itertools.islice(entries, ENTRIES_MAX)
            return sorted(entry.path for entry in looked_at if entry.name.startswith(_PREFIX))
    except OSError:  # it was removed, or may not be looked into
        return []


def warn_at_exit() -> None:
    """Look for such folders when this process ends, where it was when it loaded tierfs and where it is then."""
    try:
        begun_in = [os.getcwd()]
    except OSError:
        begun_in = []
    atexit.register(_warn, os.getpid(), begun_in)


def do_not_warn() -> None:
    """Say nothing at the end of this process: for commands, of which ``tierfs status`` names them."""
    atexit.unregister(_warn)


def _warn(process: int, begun_in: list[str]) -> None:
    # One of a job's ranks on a host is enough, and the process that was forked has a parent that looks.
    if process != os.getpid() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    found = {*misplaced(), *(path for directory in begun_in for path in misplaced(directory))}
    if found:
        import logging  # noqa: PLC0415 - `import tierfs` is cheap

        for path in sorted(found):
            logging.getLogger("tierfs").warning(
                "%s was made by code that took a tierfs URL for a local path: what is in it is in no store. Move it into one "
                "with `tierfs cp -r` or fs.put, and remove it. Give such code a local directory, or open the URL with fsspec",
                path,
            )
