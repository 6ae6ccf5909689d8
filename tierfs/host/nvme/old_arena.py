"""The nvme tier of earlier versions: one file ``nvme.arena``, with an index in SQLite. It is removed, never read."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import quote

from tierfs.errors import FormatError
from tierfs.host.nvme.disk_errors import disk_errors

_ARENA, _INDEX = "nvme.arena", "nvme.db"


def check_old_arena(store: Path) -> bool:
    """Return whether the directory of a store has files of an earlier version, which hold nothing that is needed.

    Raises:
        FormatError: They hold changes that are not in the object tier, or cannot be read.
    """
    if not (store / _ARENA).exists():
        return (store / _INDEX).exists()
    try:
        # Only the earlier version may roll back what a crash has left, so the database is not opened for writing.
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(store / _INDEX))}?mode=ro", uri=True)) as index:
            if not index.execute("SELECT 1 FROM drafts UNION ALL SELECT 1 FROM refs LIMIT 1").fetchall():
                return True
            problem = "holds changes that are pending"
    except sqlite3.Error as error:
        problem = f"may hold changes that are pending, but its index cannot be read ({error})"
    raise FormatError(
        f"{store / _ARENA} is of an earlier version of tierfs, and {problem}: run `tierfs wait URL` with that version, "
        "and then use this one",
        path=str(store / _ARENA),
        tier="nvme",
    )


def remove_old_arena(store: Path) -> None:
    """Remove the files of an earlier version, unless they hold something that is needed. Raises as `check_old_arena`."""
    if check_old_arena(store):
        with disk_errors(store):
            # The index last: without it, the arena would look damaged.
            for file in sorted(store.glob("nvme.*"), key=lambda each: each.name.startswith(_INDEX)):
                file.unlink(missing_ok=True)
