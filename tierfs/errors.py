"""The tree of errors, grouped by what the caller does next.

``CorruptionError`` and ``ConflictError`` are deliberately no ``OSError``: fsspec and many callers treat an
``OSError`` during a walk as "skip this entry", and damage must never be skipped silently.
"""

from __future__ import annotations

import errno
import re
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


_PASSWORD = re.compile(r"(://[^/\s:]*):[^/\s]*@")  # compiled here: an exiting interpreter compiles none


def without_passwords(text: str) -> str:
    """Return a text for people, with ``***`` for the password in each URL such as ``sftp://user:password@host``."""
    return _PASSWORD.sub(lambda found: f"{found[1]}:***@", text)


class TierfsError(Exception):
    """Base of every error that tierfs raises on purpose.

    Args:
        message: The problem, its place, and the next step. Passwords in its URLs, and in that of ``path``, are hidden.
        path: The path, key or URL concerned.
        tier: ``ram``, ``nvme`` or ``object``.

    Attributes:
        kind: Stable, machine-readable category.
        exit_code: The command line's exit code for this category.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    error_number: ClassVar[int] = errno.EIO

    def __init__(self, message: str = "", *, path: str | None = None, tier: str | None = None) -> None:
        super().__init__(without_passwords(message))
        self.path = None if path is None else without_passwords(path)
        self.tier = tier
        if isinstance(self, OSError):
            # OSError only sets errno when it is given two arguments, which would also change the message.
            OSError.__setattr__(self, "errno", self.error_number)


class InvalidInputError(TierfsError, ValueError):
    """An argument is invalid, and nothing was done: correct the call."""

    kind = "invalid-input"
    exit_code = 2


class NotFoundError(TierfsError, FileNotFoundError):
    """Nothing is at this path."""

    kind = "not-found"
    exit_code = 3
    error_number = errno.ENOENT


class StoreNotFoundError(NotFoundError):
    """No store holds this path: the message has the command that makes one."""

    kind = "store-not-found"


class AlreadyExistsError(TierfsError, FileExistsError):
    """An exclusive create found that the path exists, and left it unchanged: pick another name."""

    kind = "already-exists"
    exit_code = 4
    error_number = errno.EEXIST


class ConflictError(TierfsError):
    """Another writer changed the path or object first, and that change stands: reload and retry."""

    kind = "conflict"
    exit_code = 5


class CorruptionError(TierfsError):
    """Stored bytes are wrong, cut short or missing. Retrying does not help: repair them.

    Args:
        message: The problem, its place, and the next step.
        path: The path, key or URL concerned.
        tier: The tier that the bytes were read from.
        block: The index of the damaged block in the chunk, if only one is damaged.
    """

    kind = "corruption"
    exit_code = 6

    def __init__(
        self, message: str = "", *, path: str | None = None, tier: str | None = None, block: int | None = None
    ) -> None:
        super().__init__(message, path=path, tier=tier)
        self.block = block


class FormatError(TierfsError, ValueError):
    """Another version of tierfs or another program wrote the data: it breaks a rule of FORMAT.md."""

    kind = "format"
    exit_code = 7


class StoreError(TierfsError, OSError):
    """The object tier failed. If ``transient`` is set, look first, then retry: the failed write may have taken effect.

    Args:
        message: The problem, its place, and the next step.
        transient: Whether the same request may succeed if it is sent again.
        throttled: Whether the endpoint asks for fewer requests; then the error is transient.
        retry_after_s: Pause in seconds that the endpoint asks for; ``None`` if it does not say.
        refused: Whether other credentials or options may be accepted. The flusher then tries others that clients sent
            it.
        path: The key concerned.
        tier: The tier that failed.
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
    """No room is left: free some; if ``tier`` is ``ram`` or ``nvme``, raise that budget, or wait for the flusher."""

    kind = "capacity"
    exit_code = 9
    error_number = errno.ENOSPC


class ReadOnlyError(TierfsError, PermissionError):
    """The path or store is read-only, or access was denied.

    Args:
        message: The problem, its place, and the next step.
        refused: Whether other credentials or options may be accepted. The flusher then tries others that clients sent
            it.
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
