"""Write downloaded data to files of this host."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the file's name to an error about a full disk. Python's own error does not name the file."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and error.filename is None:
            error.filename = path
        raise


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` when the block ends. Until then, and on an error, ``path`` is unchanged.

    Symbolic links are followed, and an existing file keeps its mode. A target that is no regular file, like
    ``/dev/null``, is written to directly. Missing parent directories are made.

    Raises:
        IsADirectoryError: ``path`` is a directory.
        OSError: The file cannot be written.
    """
    # A link like ``/dev/stdout`` may point to a pipe, which has no name of its own: open the link itself.
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
    # A new file gets the default mode, so that the kernel applies the umask: no thread can read the umask without
    # changing it for the whole process. A replacement gets 0600 until it is complete, because the old file may not be
    # readable by others.
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
    """Write all bytes to a file whose ``write`` may write only some, like an unbuffered stdout.

    Raises:
        BlockingIOError: The file is non-blocking and cannot take bytes now.
    """
    while len(piece):
        count: int | None = file.write(piece)
        if count is None and not isinstance(file, io.RawIOBase):
            return  # a user-defined file whose write takes everything and returns None
        if not count:
            raise BlockingIOError(
                errno.EAGAIN, "the file is non-blocking and accepts no more bytes now: open it in blocking mode"
            )
        piece = piece[count:]
