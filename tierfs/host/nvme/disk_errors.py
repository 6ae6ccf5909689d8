"""Translate errors of the local disk to tierfs errors that name the file and the next step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tierfs.errors import CapacityError, ReadOnlyError, StoreError, TierfsError
from tierfs.gc_pause import untied
from tierfs.host.private import NO_RIGHTS, NO_ROOM, explain


@contextlib.contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Translate errors of the operating system to tierfs errors.

    Raises:
        CapacityError: The disk or the user's quota is full.
        ReadOnlyError: The user may not access or write the file.
        StoreError: Any other error.
    """
    try:
        yield
    except TierfsError:
        raise
    except OSError as error:
        raise _translated(error, os.fspath(path)) from untied(error)


def _translated(error: OSError, path: str) -> TierfsError:
    text = f"{path}: {explain(error)}"
    if error.errno in NO_ROOM:
        advice = "free some room and try again; earlier data is intact"
        return CapacityError(f"{text}: {advice}", path=path, tier="nvme")
    if error.errno in NO_RIGHTS:
        return ReadOnlyError(f"{text}: check the rights of the directory", path=path, tier="nvme")
    return StoreError(text, path=path, tier="nvme")
