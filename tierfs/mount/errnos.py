"""From an exception to the errno that a program sees."""

from __future__ import annotations

import errno
import logging

from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
    TierfsError,
)

__all__ = ["errno_of", "refusal"]

_BY_TYPE: tuple[tuple[type[TierfsError], int], ...] = (
    (NotFoundError, errno.ENOENT),
    (AlreadyExistsError, errno.EEXIST),
    (ConflictError, errno.ESTALE),
    (CapacityError, errno.ENOSPC),
    (ReadOnlyError, errno.EACCES),
    (InvalidInputError, errno.EINVAL),
)
# What programs cause and handle every day.
_ORDINARY = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENODATA, errno.EOPNOTSUPP, errno.ESTALE, errno.EPERM}
_ORDINARY |= {errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EACCES, errno.ENAMETOOLONG, errno.ENOSYS}
_ORDINARY |= {errno.EILSEQ, errno.ERANGE, errno.EBADF, errno.EBUSY}
_logger = logging.getLogger("tierfs.mount")


def refusal(number: int, words: str = "") -> OSError:
    """An error with this errno."""
    return OSError(number, words)


def errno_of(error: BaseException, what: str) -> int:
    """The errno of an error. One that a program does not cause by itself is logged, with what was being done."""
    number = _number(error)
    if number not in _ORDINARY or isinstance(error, ConflictError):
        if isinstance(error, (TierfsError, OSError)):
            _logger.error("%s: %s (%s)", what, errno.errorcode.get(number, str(number)), error)
        else:
            _logger.error("%s: an error that was not foreseen: %r", what, error, exc_info=error)
    return number


def _number(error: BaseException) -> int:
    for kind, number in _BY_TYPE:
        if isinstance(error, kind):
            return number
    if isinstance(error, StoreError):
        return error.errno or errno.EIO
    if isinstance(error, TierfsError):
        return errno.EIO
    if isinstance(error, UnicodeError):
        return errno.EILSEQ
    if isinstance(error, TimeoutError):
        return errno.EIO
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    return errno.ENOMEM if isinstance(error, MemoryError) else errno.EIO
