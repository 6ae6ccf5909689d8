"""Checks and removals that commands share which change a store.

The sources of ``cp`` and ``mv`` end up where those of the Unix commands of these names do.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable

from tierfs.cli.files.places import Place, StorePlace
from tierfs.errors import AlreadyExistsError, InvalidInputError, NotFoundError, ReadOnlyError
from tierfs.format.keys import is_at_or_below
from tierfs.store import Entry, Store, remove_directory
from tierfs.store.tree.kind import Kind

TARGET = {
    "target TARGET": "the new name; or a directory to put the sources into, if it exists or ends with /",
    "-T --no-target-directory": "TARGET is the new name even if it is a directory: the content of SOURCE is added to it, so the command can be repeated",
}


def target_of(target: Place, arguments: argparse.Namespace) -> tuple[Kind | None, bool]:
    """Return the kind of the entry at the target argument, or None, and whether to put sources into the target.

    Raises:
        AlreadyExistsError: A file is in place of a directory above the target.
    """
    kind = target.kind()
    if kind is None:
        refuse_below_file(target)
    return kind, not arguments.no_target_directory and (arguments.target.endswith("/") or kind == "directory")


def final_place(
    source: Place, kind: Kind, target: Place, target_kind: Kind | None, *, into: bool, alone: bool
) -> Place:
    """Return the place where one source ends up.

    Args:
        source: The place to copy or move.
        kind: The source's kind.
        target: The target argument's place.
        target_kind: As `target_of` returns it.
        into: As `target_of` returns it.
        alone: Whether this is the only source.

    Raises:
        InvalidInputError: There are several sources and the target is not a directory, or the source would end up at
            its own path or below it.
        AlreadyExistsError: A file and a directory would have the same name.
    """
    if into and target_kind == "file":
        raise AlreadyExistsError(f"{target.url} is a file: omit the / at its end to replace it", path=target.url)
    if not into and not alone:
        raise InvalidInputError(
            f"{target.url} is not a directory, so it cannot hold several sources: end it with / to create it",
            path=target.url,
        )
    final = target.child(source.name) if into else target
    if isinstance(source, StorePlace) and isinstance(final, StorePlace) and source.store is final.store:
        if source.path == final.path:
            raise InvalidInputError(f"{source.url} and {final.url} are the same: nothing was done", path=source.url)
        if kind == "directory" and is_at_or_below(final.path, source.path):
            raise InvalidInputError(f"{source.url} cannot go into itself: choose another target", path=source.url)
    there = target_kind if final is target else final.kind()
    if there is not None and there != kind:
        raise clash(final.url, there)
    return final


def refuse_below_file(target: Place) -> None:
    """Check that no file is in place of a directory above a target where nothing is yet.

    An object store accepts such a target, but its files could not be copied to a local directory. A local filesystem
    refuses it by itself.

    Raises:
        AlreadyExistsError: There is such a file.
    """
    above = target.file_above() if isinstance(target, StorePlace) else None
    if above is not None:
        raise clash(above, "file")


def clash(url: str, there: Kind) -> AlreadyExistsError:
    """Return the error for a file and a directory that would have the same name."""
    other = "directory" if there == "file" else "file"
    return AlreadyExistsError(f"{url} is a {there}, and a {other} cannot replace it: choose another name", path=url)


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
