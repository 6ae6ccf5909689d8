"""Directories with mode 0700: creation and listing; translation of the operating system's errors."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from tierfs.errors import CapacityError, ReadOnlyError, StoreError, TierfsError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_RIGHTS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def make_private(directory: Path, *, follow_links: bool = True) -> None:
    """Create a directory and its parents with mode 0700 if missing, and check its owner and mode.

    With ``follow_links``, a symbolic link to such a directory is accepted.

    Raises:
        ReadOnlyError: It belongs to another user, is open to others, or must not be created.
        CapacityError: There is no room for it.
        StoreError: It cannot be created for another reason.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = os.stat(directory, follow_symlinks=follow_links)
    except OSError as error:
        raise refused(error, directory, "cannot be made") from error
    _check(directory, status)


def check_private(directory: Path) -> None:
    """Check an existing directory as `make_private` does. Raises as it does."""
    try:
        status = os.stat(directory)
    except OSError as error:
        raise refused(error, directory, "cannot be used") from error
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{directory} is not a directory", path=str(directory))
    _check(directory, status)


def _check(directory: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ReadOnlyError(
            f"{directory} must belong to you and be closed to others: chmod 700 {directory}", path=str(directory)
        )


def entries_of(directory: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a directory; an empty list if it does not exist.

    Raises:
        ReadOnlyError: This user may not list it.
        StoreError: It cannot be listed for another reason.
    """
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise refused(error, directory, "cannot be listed") from error


def open_lock_file(path: Path) -> int:
    """Return a descriptor of a file to lock, made with mode 0600 if missing. Read-only where its disk has become so."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
    # The kernel makes a failed disk read-only. flock works without write access.
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def refused(error: OSError, path: Path, what: str, *, tier: str | None = None) -> TierfsError:
    """Translate an OSError into an error of tierfs. ``what`` is the failed action, as ``cannot be made``."""
    problem = f"{path} {what}: {explain(error)}"
    if error.errno in NO_ROOM:
        return CapacityError(
            f"{problem}: free some room, or delete files if their number is at its limit, and try again",
            path=str(path),
            tier=tier,
        )
    if error.errno in NO_RIGHTS:
        return ReadOnlyError(f"{problem}: check the rights of its directory", path=str(path), tier=tier)
    return StoreError(problem, path=str(path), tier=tier)


def explain(error: OSError) -> str:
    """Return the operating system's message, with the next step if it is known."""
    problem = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"{problem}: this process has reached its limit, which `ulimit -n` raises"
    return problem
