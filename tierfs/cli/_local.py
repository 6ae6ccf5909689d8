"""Local files as the source and target of copies."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import BinaryIO, cast

from tierfs.errors import InvalidInputError

__all__ = ["default_mode", "known_size", "replacing", "walk"]


def known_size(path: str) -> int | None:
    """Bytes of a file, or ``None`` for a pipe or a device, which tells only when it ends."""
    status = os.stat(path)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def walk(root: str) -> Iterator[tuple[str, int | None]]:
    """Relative path and size of everything below a directory, sorted, links followed; ``None`` for a directory.

    Raises:
        InvalidInputError: A link back to a directory above it, or something that is no file.
        OSError: It cannot be read.
    """
    yield from _walk(root, "", (_identity(root),))


def _walk(root: str, inside: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int | None]]:
    with os.scandir(os.path.join(root, inside)) as scan:
        items = sorted(scan, key=lambda item: item.name)
    for item in items:
        relative = f"{inside}/{item.name}" if inside else item.name
        status = item.stat()
        if stat.S_ISDIR(status.st_mode):
            identity = _identity(item.path)
            if identity in above:
                raise InvalidInputError(
                    f"{item.path} is a link back to a directory above it: remove it", path=item.path
                )
            yield relative, None
            yield from _walk(root, relative, (*above, identity))
        elif stat.S_ISREG(status.st_mode):
            yield relative, status.st_size
        else:
            raise InvalidInputError(
                f"{item.path} is a pipe, socket or device: copy it by itself, or remove it", path=item.path
            )


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is complete: what is there stays as it is until then, and on an error.

    A link is followed, and what is no regular file, like ``/dev/null``, is written to as it is. Parents are made.
    """
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG | default_mode(0o666)
    if stat.S_ISDIR(mode):
        raise InvalidInputError(f"{path} is a directory, and a file cannot replace it", path=path)
    if not stat.S_ISREG(mode):
        with open(target, "wb") as file:
            yield file
        return
    directory = os.path.dirname(target)
    os.makedirs(directory, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".tierfs-cp-", delete=False) as temporary:
        try:
            yield cast("BinaryIO", temporary)
            temporary.flush()
            os.chmod(temporary.name, stat.S_IMODE(mode))
            os.replace(temporary.name, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary.name)
            raise


def default_mode(wanted: int) -> int:
    """The rights that something new has by this process's umask."""
    return wanted & ~_UMASK


def _read_umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


# Read once: it can only be read by setting it, which other threads would notice.
_UMASK = _read_umask()
