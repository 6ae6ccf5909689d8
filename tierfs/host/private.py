"""A host's directories for its owner alone: making, listing, and the operating system's errors as ours."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from tierfs.errors import CapacityError, ReadOnlyError, StoreError, TierfsError

__all__ = ["NO_RIGHTS", "NO_ROOM", "entries_of", "explain", "make_private", "refused"]

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_RIGHTS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def make_private(directory: Path, *, follow_links: bool = True) -> None:
    """Make a directory for its owner alone where it is missing, and see that it is one.

    Args:
        directory: The directory; its parents are made, too.
        follow_links: Whether a link to such a directory will do.

    Raises:
        ReadOnlyError: It belongs to somebody else, or is open to others, or may not be made.
        CapacityError: There is no room for it.
        StoreError: It cannot be made for another reason.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = os.stat(directory, follow_symlinks=follow_links)
    except OSError as error:
        raise refused(error, directory, "cannot be made") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ReadOnlyError(
            f"{directory} must belong to you and be closed to others: chmod 700 {directory}", path=str(directory)
        )


def entries_of(directory: Path) -> list[os.DirEntry[str]]:
    """The entries of a directory; none where there is none.

    Raises:
        ReadOnlyError: This user may not.
        StoreError: It cannot be listed for another reason.
    """
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise refused(error, directory, "cannot be listed") from error


def refused(error: OSError, path: Path, what: str, *, tier: str | None = None) -> TierfsError:
    """The error of ours that says what the operating system refused.

    Args:
        error: The operating system's.
        path: The file or directory concerned.
        what: The failed action, as ``cannot be made``.
        tier: The tier concerned.
    """
    problem = f"{path} {what}: {explain(error)}"
    if error.errno in NO_ROOM:
        return CapacityError(
            f"{problem}: free some room, or files where it has as many as it may, and try again",
            path=str(path),
            tier=tier,
        )
    if error.errno in NO_RIGHTS:
        return ReadOnlyError(f"{problem}: check the rights of its directory", path=str(path), tier=tier)
    return StoreError(problem, path=str(path), tier=tier)


def explain(error: OSError) -> str:
    """The operating system's words, and the next step where that is known."""
    problem = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"{problem}: this process has as many as it may, which `ulimit -n` raises"
    return problem
