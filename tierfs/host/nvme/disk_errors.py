"""Translate errors of the local disk and of SQLite to tierfs errors that name the file and the next step."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator

from tierfs.errors import CapacityError, CorruptionError, ReadOnlyError, StoreError, TierfsError
from tierfs.gc_pause import untied
from tierfs.host.private import NO_RIGHTS, NO_ROOM, explain

# Descriptors that one look-up needs: the database, its journal, their directory, and a temporary one.
_SQLITE_FILES = 4


@contextlib.contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Translate errors of the operating system and of SQLite to tierfs errors.

    Raises:
        CapacityError: The disk or the user's quota is full.
        CorruptionError: The file is damaged, or is not a database.
        ReadOnlyError: The user may not access or write the file.
        StoreError: Any other error. ``transient`` if another process or thread held a lock for too long.
    """
    try:
        yield
    except TierfsError:
        raise
    except sqlite3.Error as error:
        raise _from_sqlite(error, os.fspath(path)) from untied(error)
    except OSError as error:
        raise _from_system(error, os.fspath(path)) from untied(error)


def _from_system(error: OSError, path: str) -> TierfsError:
    reason = error.strerror or str(error)
    if error.errno in NO_ROOM:
        return _full(path, reason)
    if error.errno in NO_RIGHTS:
        return ReadOnlyError(f"{path}: {reason}: check the rights of the directory", path=path, tier="nvme")
    return StoreError(f"{path}: {reason}", path=path, tier="nvme")


def _from_sqlite(error: sqlite3.Error, path: str) -> TierfsError:
    reason = str(error)
    # Error codes need Python 3.11 or later. The messages are part of SQLite's interface.
    if "disk is full" in reason:
        return _full(path, reason)
    if "malformed" in reason or "not a database" in reason:
        return CorruptionError(f"{path}: {reason}", path=path, tier="nvme")
    if "readonly" in reason:
        return ReadOnlyError(f"{path}: {reason}: check the rights of the directory", path=path, tier="nvme")
    shortage = _shortage() if "unable to open" in reason or "disk I/O" in reason else ""
    # Not transient otherwise: a caller that asks the object tier treats a transient error as an unreachable tier.
    return StoreError(f"{path}: {reason}{shortage}", transient="locked" in reason, path=path, tier="nvme")


def _shortage() -> str:
    """Return an error text if the process lacks descriptors, which SQLite does not report; empty otherwise."""
    opened: list[int] = []
    try:
        for _ in range(_SQLITE_FILES):
            opened.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - closed below also after an error
    except OSError as error:
        return f": {explain(error)}"
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return ""


def _full(path: str, reason: str) -> CapacityError:
    message = f"{path}: {reason}: free some room and try again; earlier data is intact"
    return CapacityError(message, path=path, tier="nvme")
