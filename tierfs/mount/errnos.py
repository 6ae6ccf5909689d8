"""Translate exceptions into the errno that a program sees."""

from __future__ import annotations

import errno
import logging

from tierfs.errors import ConflictError, InvalidInputError, TierfsError

# Errors that programs cause and handle in normal use. They are not logged, except conflicts.
_ORDINARY = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENODATA, errno.EOPNOTSUPP, errno.ESTALE, errno.EPERM}
_ORDINARY |= {errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EACCES, errno.ENAMETOOLONG, errno.ENOSYS}
_ORDINARY |= {errno.EILSEQ, errno.ERANGE, errno.EBADF, errno.EBUSY}
_logger = logging.getLogger("tierfs.mount")


def refusal(number: int, words: str = "") -> OSError:
    """Return an `OSError` with this errno."""
    return OSError(number, words)


def errno_of(error: BaseException, what: str) -> int:
    """Return the errno of an error. Log conflicts, and errors that programs do not cause in normal use.

    Args:
        error: The exception of a handler.
        what: The operation, for the log.
    """
    number = _number(error)
    if number not in _ORDINARY or isinstance(error, ConflictError):
        if isinstance(error, (TierfsError, OSError)):
            _logger.error("%s: %s (%s)", what, errno.errorcode.get(number, str(number)), error)
        else:
            _logger.error("%s: unexpected error: %r", what, error, exc_info=error)
    return number


def _number(error: BaseException) -> int:
    if isinstance(error, ConflictError):
        return errno.ESTALE
    if isinstance(error, InvalidInputError):
        return errno.EINVAL
    if isinstance(error, UnicodeError):
        return errno.EILSEQ
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return error.errno or errno.EIO
    return errno.ENOMEM if isinstance(error, MemoryError) else errno.EIO
