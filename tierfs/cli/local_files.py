"""Local files as the source of copies."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from tierfs.errors import InvalidInputError

__all__ = ["known_size", "walk"]


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
