"""In which order a host publishes: as its files were closed, directory by directory.

A draft waits for every draft that was closed before it and lies in its directory or below that. So ``run/latest``
never appears before what was saved under ``run/`` until then, a checkpoint's metadata never before its shards, and
checkpoints side by side do not wait for each other. A draft that cannot be published holds up those behind it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import TypeAlias

__all__ = ["ClosingOrder", "Turn"]

Turn: TypeAlias = tuple[int, int, int]
"""When a file was closed, as something to compare: see `Draft.turn`."""


class ClosingOrder:
    """Which of the pending drafts may be published now. Not thread-safe."""

    def __init__(self) -> None:
        self._below: dict[str, list[Turn]] = {}

    def __repr__(self) -> str:
        return f"ClosingOrder({len(self._below.get('', []))} pending)"

    def add(self, path: str, turn: Turn) -> None:
        """Note a pending draft."""
        for directory in _ancestors(path):
            bisect.insort(self._below.setdefault(directory, []), turn)

    def remove(self, path: str, turn: Turn) -> None:
        """Note that it is pending no more."""
        for directory in _ancestors(path):
            turns = self._below[directory]
            del turns[bisect.bisect_left(turns, turn)]
            if not turns:
                del self._below[directory]

    def first(self, path: str) -> Turn:
        """The draft to publish before the draft at ``path``, or that draft: the first that was closed in or below its directory."""
        return self._below[path.rpartition("/")[0]][0]

    def firsts(self, path: str) -> Iterator[Turn]:
        """The drafts that come first in the directories above ``path``; one may come several times."""
        for directory in _ancestors(path):
            turns = self._below.get(directory)
            if turns:
                yield turns[0]


def _ancestors(path: str) -> Iterator[str]:
    """Every directory above ``path``, the root (``""``) last."""
    while path:
        path = path.rpartition("/")[0]
        yield path
