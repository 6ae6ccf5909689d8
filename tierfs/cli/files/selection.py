"""Choose files: patterns in arguments, ``--include``, ``--exclude`` and ``--dry-run``. Patterns are those of a shell."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator
from typing import NamedTuple

from tierfs.cli.files.places import IN_STORE, LocalPlace, Place, StorePlace, any_place, store_place
from tierfs.errors import NotFoundError
from tierfs.store import find

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


def sources_of(texts: list[str]) -> Iterator[Place]:
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
