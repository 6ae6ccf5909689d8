"""The one tree of errors, grouped by what the caller does next.

::

    TierfsError
    ├── NotFoundError        (FileNotFoundError)   there is nothing at this path
    │   └── StoreNotFoundError                     no store holds this path: run ``tierfs init``
    ├── AlreadyExistsError   (FileExistsError)     an exclusive create lost: pick another name
    ├── ConflictError                              somebody else changed it: reload and retry
    ├── CorruptionError                            stored bytes are wrong or missing: repair; never retried
    ├── FormatError          (ValueError)          written by another version, or not by tierfs
    ├── StoreError           (OSError)             the object tier failed; ``transient`` says if retrying helps
    ├── CapacityError        (OSError, ENOSPC)     no room: free some or raise the budget
    ├── ReadOnlyError        (PermissionError)     this may be read but not changed
    └── InvalidInputError    (ValueError)          the argument is wrong: correct the call

``CorruptionError`` and ``ConflictError`` are on purpose no ``OSError``: fsspec and many callers treat an
``OSError`` during a walk as "skip this entry", and damage must never be skipped silently.
"""

from __future__ import annotations

import errno
from typing import ClassVar

__all__ = [
    "AlreadyExistsError",
    "CapacityError",
    "ConflictError",
    "CorruptionError",
    "FormatError",
    "InvalidInputError",
    "NotFoundError",
    "ReadOnlyError",
    "StoreError",
    "StoreNotFoundError",
    "TierfsError",
]


class TierfsError(Exception):
    """Base of every error that tierfs raises on purpose.

    Args:
        message: The problem, its place, and the next step.
        path: The path, key or URL concerned.
        tier: The tier that the bytes were read from or written to.

    Attributes:
        kind: Stable, machine-readable category.
        exit_code: The command line's exit code for this category.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    error_number: ClassVar[int] = errno.EIO

    def __init__(self, message: str = "", *, path: str | None = None, tier: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.tier = tier
        if isinstance(self, OSError):
            # OSError only sets errno when it is given two arguments, which would also change the message.
            OSError.__setattr__(self, "errno", self.error_number)


class InvalidInputError(TierfsError, ValueError):
    """An argument is wrong; nothing was done."""

    kind = "invalid-input"
    exit_code = 2


class NotFoundError(TierfsError, FileNotFoundError):
    """There is nothing at this path."""

    kind = "not-found"
    exit_code = 3
    error_number = errno.ENOENT


class StoreNotFoundError(NotFoundError):
    """No store holds this path. The message names the command that makes one."""

    kind = "store-not-found"


class AlreadyExistsError(TierfsError, FileExistsError):
    """An exclusive create found something in its place; what was there is untouched."""

    kind = "already-exists"
    exit_code = 4
    error_number = errno.EEXIST


class ConflictError(TierfsError):
    """Somebody else changed the object since it was observed; theirs stands. Reload and retry."""

    kind = "conflict"
    exit_code = 5


class CorruptionError(TierfsError):
    """Stored bytes are wrong, cut short or missing. Retrying does not help; repairing may.

    Args:
        message: The problem, its place, and the next step.
        path: The path, key or URL concerned.
        tier: The tier that the bytes were read from.
        block: Which block of the chunk that was read it is, where it is one alone.
    """

    kind = "corruption"
    exit_code = 6

    def __init__(
        self, message: str = "", *, path: str | None = None, tier: str | None = None, block: int | None = None
    ) -> None:
        super().__init__(message, path=path, tier=tier)
        self.block = block


class FormatError(TierfsError, ValueError):
    """The object was written by another format version, or breaks a rule of FORMAT.md."""

    kind = "format"
    exit_code = 7


class StoreError(TierfsError, OSError):
    """The object tier failed.

    Args:
        message: The problem, its place, and the next step.
        transient: Whether the same request may succeed if it is sent again.
        throttled: Whether the endpoint asks for fewer requests; it is transient then.
        retry_after_s: How many seconds the endpoint asks to wait before it is sent again; ``None`` if it does not say.
        refused: Whether other credentials or options may be accepted: it is about those, and not about this one object.
        path: The key concerned.
        tier: The tier concerned.
    """

    kind = "store"
    exit_code = 8

    def __init__(
        self,
        message: str = "",
        *,
        transient: bool = False,
        throttled: bool = False,
        retry_after_s: float | None = None,
        refused: bool = False,
        path: str | None = None,
        tier: str | None = None,
    ) -> None:
        super().__init__(message, path=path, tier=tier)
        self.transient = transient or throttled
        self.throttled = throttled
        self.retry_after_s = retry_after_s
        self.refused = refused


class CapacityError(TierfsError, OSError):
    """There is no room left; what was published before is untouched."""

    kind = "capacity"
    exit_code = 9
    error_number = errno.ENOSPC


class ReadOnlyError(TierfsError, PermissionError):
    """This may be read but not changed, or the credentials do not allow it.

    Args:
        message: The problem, its place, and the next step.
        refused: Whether other credentials or options may be accepted: it is about those, and not about this one object.
        path: The path, key or URL concerned.
        tier: The tier concerned.
    """

    kind = "read-only"
    exit_code = 10
    error_number = errno.EACCES

    def __init__(
        self, message: str = "", *, refused: bool = False, path: str | None = None, tier: str | None = None
    ) -> None:
        super().__init__(message, path=path, tier=tier)
        self.refused = refused
