"""Files of this host's that what is read goes into."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["naming", "replacing", "write_all"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Have an error that a write has no room say of which file, which Python's does not."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and error.filename is None:
            error.filename = path
        raise


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is complete: what is there stays as it is until then, and on an error.

    A link is followed, a file keeps its rights, and what is no regular file, like ``/dev/null``, is written to as it is.
    Parents are made.

    Raises:
        IsADirectoryError: A directory is there.
        OSError: It cannot be written.
    """
    # A pipe may have no name of its own, but only links to it, like ``/dev/stdout``.
    target = path if os.path.exists(path) and not os.path.isfile(path) else os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a directory, and a file cannot replace it")
    if mode is not None and not stat.S_ISREG(mode):
        with naming(path), open(target, "wb") as file:
            yield file
        return
    directory = os.path.dirname(target)
    os.makedirs(directory, exist_ok=True)
    temporary = os.path.join(directory, f".tierfs-get-{secrets.token_hex(8)}")
    # As any new file, so that the kernel applies the umask, which no thread can read without changing it for all. Not so
    # where it takes the place of one that others may not read.
    rights = 0o666 if mode is None else 0o600
    try:
        with naming(path), open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, rights)) as file:
            yield file
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_all(file: BinaryIO, piece: memoryview) -> None:
    """Write a piece to a file that may take a part of it, as one without a buffer does, stdout where Python runs unbuffered.

    Raises:
        BlockingIOError: It takes nothing now, and does not wait.
    """
    while len(piece):
        count: int | None = file.write(piece)
        if count is None and not isinstance(file, io.RawIOBase):
            return  # one of somebody's own, which takes all and does not say so
        if not count:
            raise BlockingIOError(errno.EAGAIN, "the file takes no more bytes now: open it so that it waits")
        piece = piece[count:]
