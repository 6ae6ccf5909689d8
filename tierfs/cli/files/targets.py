"""Choose files by patterns, as a shell does; find where they go; check and remove for commands that change a store.

The sources of ``cp`` and ``mv`` end up where those of the Unix commands of these names do.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tierfs.cli.files.places import IN_STORE, FilePlace, LocalPlace, StorePlace, any_place, store_place
from tierfs.errors import AlreadyExistsError, InvalidInputError, NotFoundError, ReadOnlyError
from tierfs.format.keys import is_at_or_below
from tierfs.store import Entry, Store, find, remove_directory
from tierfs.store.tree.kind import Kind

_ONLY = "PATTERN, like '*.bin' or 'logs/*'; one without / matches a name at any depth, a directory stands for all in it; may be given several times"
SELECTION = {
    "--include PATTERN...": f"only files that match {_ONLY}",
    "--exclude PATTERN...": f"no files that match {_ONLY}",
    "--dry-run": "change nothing; print what would be done",
}


class Selection(NamedTuple):
    """The files that ``--include`` and ``--exclude`` choose. Without patterns, these are all."""

    include: list[str]
    exclude: list[str]

    @property
    def is_all(self) -> bool:
        return not self.include and not self.exclude

    def takes(self, relative: str) -> bool:
        """Return whether a file is chosen, by its path relative to the directory that the command works on."""
        parts = relative.split("/")
        paths = ["/".join(parts[: count + 1]) for count in range(len(parts))]  # its directories, and itself

        def matches(patterns: list[str]) -> bool:
            return any(
                fnmatch.fnmatchcase(path if "/" in pattern else path.rpartition("/")[2], pattern)
                for path in paths
                for pattern in patterns
            )

        return (not self.include or matches(self.include)) and not matches(self.exclude)


def sources_of(texts: list[str]) -> Iterator[FilePlace]:
    """Yield the places that arguments name, which may be local. Raises as `any_place` and `places_of` do."""
    for text in texts:
        if text.startswith(IN_STORE):
            yield from places_of([text])
        elif glob.has_magic(text) and not os.path.exists(text):
            yield from map(LocalPlace, sorted(glob.glob(text)) or [text])
        else:
            yield any_place(text)


def places_of(texts: list[str]) -> Iterator[StorePlace]:
    """Yield the places in stores that arguments name. A pattern names all that match it, unless it is itself a name.

    Raises:
        NotFoundError: Nothing matches a pattern.
        InvalidInputError, StoreNotFoundError, TierfsError: As in `store_place`.
    """
    for text in texts:
        parts = text.rstrip("/").split("/")
        first = next((number for number, part in enumerate(parts) if glob.has_magic(part)), None)
        if first is None:
            yield store_place(text)
            continue
        above, wanted = store_place("/".join(parts[:first])), parts[first:]
        literal = above.child("/".join(wanted))
        if literal.kind() is not None:
            yield literal
            continue
        names = [above.relative(entry.path) for entry in find(above.store, above.path, detail=False)]
        found = [name for name in names if _matches(name.split("/"), wanted)]
        if not found:
            raise NotFoundError(f"nothing in {above.url} matches {text}", path=text)
        yield from map(above.child, found)


def _matches(names: list[str], patterns: list[str]) -> bool:
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


TARGET = {
    "target TARGET": "the new name; or a directory to put the sources into, if it exists or ends with /",
    "-T --no-target-directory": "TARGET is the new name even if it is a directory: the content of SOURCE is added to it, so the command can be repeated",
}


def target_of(target: FilePlace, arguments: argparse.Namespace) -> tuple[Kind | None, bool]:
    """Return the kind of the entry at the target argument, or None, and whether to put sources into the target.

    Raises:
        AlreadyExistsError: A file is in place of a directory above the target.
    """
    kind = target.kind()
    if kind is None:
        refuse_below_file(target)
    return kind, not arguments.no_target_directory and (arguments.target.endswith("/") or kind == "directory")


def final_place(
    source: FilePlace, kind: Kind, target: FilePlace, target_kind: Kind | None, *, into: bool, alone: bool
) -> FilePlace:
    """Return the place where one source, perhaps the only one (``alone``), ends up.

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


def refuse_below_file(target: FilePlace) -> None:
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
