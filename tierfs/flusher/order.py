"""The order in which a host publishes drafts: closing order, directory by directory.

A draft waits for every draft that was closed earlier and lies in or below its directory. So ``run/latest`` never
appears before the files that were saved under ``run/`` until then, and a checkpoint's metadata never before its shards.
Checkpoints in sibling directories do not wait for each other. A draft that cannot be published delays the drafts that
wait for it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import TypeAlias

Turn: TypeAlias = tuple[int, int, int]
"""The sort key of the closing order: see `Draft.turn`."""


class ClosingOrder:
    """The pending drafts of each directory in closing order. Not thread-safe."""

    def __init__(self) -> None:
        self._below: dict[str, list[Turn]] = {}

    def __repr__(self) -> str:
        return f"ClosingOrder({len(self._below.get('', []))} pending)"

    def add(self, path: str, turn: Turn) -> None:
        for directory in _ancestors(path):
            bisect.insort(self._below.setdefault(directory, []), turn)

    def remove(self, path: str, turn: Turn) -> None:
        for directory in _ancestors(path):
            turns = self._below[directory]
            del turns[bisect.bisect_left(turns, turn)]
            if not turns:
                del self._below[directory]

    def first(self, path: str) -> Turn:
        """Return the turn of the earliest pending draft in or below the directory of ``path``."""
        return self._below[path.rpartition("/")[0]][0]

    def firsts(self, path: str) -> Iterator[Turn]:
        """Yield the turn of the earliest pending draft of each directory above ``path``. A turn may repeat."""
        for directory in _ancestors(path):
            turns = self._below.get(directory)
            if turns:
                yield turns[0]


def _ancestors(path: str) -> Iterator[str]:
    """Yield every directory above ``path``; the root (``""``) comes last."""
    while path:
        path = path.rpartition("/")[0]
        yield path
