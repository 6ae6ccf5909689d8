"""Translate the operating system's errors, for tiers that reach their bytes through system calls."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from tierfs.errors import AlreadyExistsError, CapacityError, NotFoundError, ReadOnlyError, StoreError, TierfsError
from tierfs.gc_pause import untied

_TRANSIENT = frozenset({
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
})  # fmt: skip


@contextlib.contextmanager
def translated(key: str) -> Iterator[None]:
    """Translate the operating system's errors into those of tierfs, with the key and what to do next."""
    try:
        yield
    except TierfsError:
        raise
    except OSError as error:
        raise translate_os_error(error, key) from untied(error)


def translate_os_error(error: OSError, key: str, reason: str = "") -> TierfsError:
    """Return the error of tierfs for an `OSError`, which may come from a library and have no error number.

    ``reason`` replaces the error's own text.
    """
    reason = reason or error.strerror or str(error) or type(error).__name__
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return CapacityError(f"{key}: {reason}: free some room and try again; nothing was changed", path=key)
        case errno.EROFS:
            return ReadOnlyError(f"{key}: {reason}: check the rights of the directory", path=key)
        case errno.ENOENT:  # some libraries set this number on a plain OSError
            return NotFoundError(f"{key} is not there", path=key)
        case errno.ENAMETOOLONG:
            return StoreError(f"{key}: {reason}: choose a shorter path", path=key)
    match error:
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
            return NotFoundError(f"{key} is not there", path=key)
        case FileExistsError():
            return AlreadyExistsError(f"{key} exists", path=key)
        case PermissionError():
            refused = error.errno != errno.EPERM  # the kernel's answer for an immutable file
            return ReadOnlyError(f"{key}: {reason}: check the rights of the directory", refused=refused, path=key)
    transient = error.errno in _TRANSIENT or isinstance(error, TimeoutError | ConnectionError)
    return StoreError(f"{key}: {reason}", transient=transient, path=key)
