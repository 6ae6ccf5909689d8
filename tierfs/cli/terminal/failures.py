"""Turn an error into the command line's report: a category, a message, a path and an exit code."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    TierfsError,
)
from tierfs.format.keys import DESCRIPTOR

_BY_NUMBER: dict[int, type[TierfsError]] = {
    errno.ENOSPC: CapacityError,
    errno.EDQUOT: CapacityError,
    errno.EROFS: ReadOnlyError,
    errno.ENAMETOOLONG: InvalidInputError,
    errno.ELOOP: InvalidInputError,
}
_VERIFY = "`tierfs verify`"
_REPAIR = "`tierfs repair URL --from COPY` restores it"
TIMEOUT_KIND = "timeout"
TIMEOUT_EXIT_CODE = 11
_NEXT_STEP: dict[type[TierfsError], str] = {
    NotFoundError: "check the path",
    AlreadyExistsError: "choose another name, or remove it",
    ReadOnlyError: "check the rights of the file and its directory",
    InvalidInputError: "check the path",
    CapacityError: "free some room and try again",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The report of an error.

    Attributes:
        kind: Category, as in `tierfs.errors`, or ``timeout``.
        message: What went wrong, where, and what to do next.
        path: The affected path, or None.
        exit_code: Exit code of the process.
    """

    kind: str
    message: str
    path: str | None
    exit_code: int


def describe(error: TierfsError | OSError) -> Failure:
    """Describe an error. An `OSError` gets the category of the matching tierfs error."""
    if isinstance(error, TierfsError):
        message = str(error)
        if isinstance(error, CorruptionError) and _VERIFY not in message and "tierfs repair" not in message:
            is_descriptor = f"{DESCRIPTOR}: " in message  # without it, no other command opens the store
            message += f": {_REPAIR}" if is_descriptor else f": {_VERIFY} lists all damage"
        return Failure(error.kind, message, error.path, error.exit_code)
    if isinstance(error, TimeoutError) and error.errno is None:
        # A wait timed out and the work goes on: nothing failed, but the command did not do its task.
        return Failure(TIMEOUT_KIND, str(error), None, TIMEOUT_EXIT_CODE)
    category = _category(error)
    name = error.filename2 if error.filename2 is not None else error.filename
    path = None if name is None or isinstance(name, int) else os.fsdecode(name)
    words = [path, error.strerror or str(error) or type(error).__name__, _NEXT_STEP.get(category)]
    return Failure(category.kind, ": ".join(word for word in words if word), path, category.exit_code)


def _category(error: OSError) -> type[TierfsError]:
    if error.errno in _BY_NUMBER:
        return _BY_NUMBER[error.errno]
    match error:
        case FileNotFoundError():
            return NotFoundError
        case FileExistsError():
            return AlreadyExistsError
        case PermissionError():
            return ReadOnlyError
        case IsADirectoryError() | NotADirectoryError():
            return InvalidInputError
    return TierfsError
