"""Find directories that code made by taking a tierfs URL for a local path: ``./tierfs::file:`` and the like.

``pathlib.Path(url)`` and ``os.makedirs(url)`` succeed. Files saved there are in no store, and no error is
raised. So tierfs warns about such directories when the process ends, and ``tierfs status`` lists them.
"""

from __future__ import annotations

import atexit
import itertools
import os

ENTRIES_MAX = 100_000
_PREFIX = "tierfs:"


def misplaced(directory: str | None = None) -> list[str]:
    """Return the paths of such entries in a directory, by default the working directory; none if it is unreadable."""
    try:
        where = os.getcwd() if directory is None else directory
        with os.scandir(where) as entries:
            looked_at = itertools.islice(entries, ENTRIES_MAX)
            return sorted(entry.path for entry in looked_at if entry.name.startswith(_PREFIX))
    except OSError:  # the directory was removed or is unreadable
        return []


def warn_at_exit() -> None:
    """Warn at exit about such directories in the current working directory and in the one at exit."""
    try:
        begun_in = [os.getcwd()]
    except OSError:
        begun_in = []
    atexit.register(_warn, os.getpid(), begun_in)


def do_not_warn() -> None:
    """Disable the warning at exit, for commands: ``tierfs status`` lists the directories."""
    atexit.unregister(_warn)


def _warn(process: int, begun_in: list[str]) -> None:
    # One rank per host is enough. A forked process has a parent that warns.
    if process != os.getpid() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    found = {*misplaced(), *(path for directory in begun_in for path in misplaced(directory))}
    if found:
        import logging  # noqa: PLC0415 - `import tierfs` is cheap

        for path in sorted(found):
            logging.getLogger("tierfs").warning(
                "%s was created by code that took a tierfs URL for a local path: its files are in no store. Move "
                "them into one with `tierfs cp -r` or fs.put, and remove it. Give such code a local directory, or "
                "open the URL with fsspec",
                path,
            )
