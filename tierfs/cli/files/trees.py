"""List a directory of a store with everything below it, for commands that move or remove it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierfs.errors import NotFoundError, ReadOnlyError
from tierfs.store import Entry, Store, find, remove_directory


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything below a directory.

    Attributes:
        path: The directory's path.
        files: At any depth.
        directories: At any depth, without the directory itself.
    """

    path: str
    files: Sequence[Entry]
    directories: Sequence[Entry]

    @property
    def empty_directories(self) -> list[str]:
        """Paths of the directories without entries, which may include the directory itself."""
        implied = {entry.path.rpartition("/")[0] for entry in (*self.files, *self.directories)}
        return [path for path in (self.path, *(entry.path for entry in self.directories)) if path not in implied]


def read_tree(store: Store, path: str) -> Listing:
    """List everything below a directory without reading records."""
    entries = find(store, path, detail=False)
    files = [entry for entry in entries if not entry.is_directory]
    return Listing(path, files, [entry for entry in entries if entry.is_directory])


def refuse_foreign_files(store: Store, files: Iterable[Entry]) -> None:
    """Check that tierfs wrote all these files. Call it before changing any of them.

    Raises:
        ReadOnlyError: Another tool wrote one of them.
    """
    for entry in files:
        if entry.foreign is not None:
            raise ReadOnlyError(
                f"{store.where(entry.path)} was not written by tierfs and can only be read: use the tool that wrote it; "
                "nothing was changed",
                path=entry.path,
            )


def remove_directories(store: Store, paths: Iterable[str]) -> None:
    """Remove directories that have become empty, deepest first."""
    for path in sorted(set(paths), key=len, reverse=True):
        # A directory without a record of its own existed only through its entries, and is gone already.
        with contextlib.suppress(NotFoundError):
            remove_directory(store, path)
