"""A directory in a store with everything below it, for what is moved or removed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierfs.errors import NotFoundError, ReadOnlyError
from tierfs.store import Entry, Store, find, remove_directory

__all__ = ["Listing", "read_tree", "refuse_foreign_files", "remove_directories"]


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything below a directory.

    Attributes:
        path: The directory.
        files: At any depth.
        directories: At any depth, without the directory itself.
    """

    path: str
    files: Sequence[Entry]
    directories: Sequence[Entry]

    @property
    def empty_directories(self) -> list[str]:
        """Paths of the directories that nothing lies in, the directory itself included."""
        implied = {entry.path.rpartition("/")[0] for entry in (*self.files, *self.directories)}
        return [path for path in (self.path, *(entry.path for entry in self.directories)) if path not in implied]


def read_tree(store: Store, path: str) -> Listing:
    """List what is below a directory. No record is read."""
    entries = find(store, path, detail=False)
    files = [entry for entry in entries if not entry.is_directory]
    return Listing(path, files, [entry for entry in entries if entry.is_directory])


def refuse_foreign_files(store: Store, files: Iterable[Entry]) -> None:
    """Check that tierfs wrote all of these, before any of them is touched.

    Raises:
        ReadOnlyError: It did not.
    """
    for entry in files:
        if entry.foreign is not None:
            raise ReadOnlyError(
                f"{store.where(entry.path)} was not written by tierfs and can only be read: use the tool that wrote it; "
                "nothing was changed",
                path=entry.path,
            )


def remove_directories(store: Store, paths: Iterable[str]) -> None:
    """Remove directories that have become empty, the deepest first."""
    for path in sorted(set(paths), key=len, reverse=True):
        # One that was only implied by what lay in it is gone already.
        with contextlib.suppress(NotFoundError):
            remove_directory(store, path)
