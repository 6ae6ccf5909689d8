"""The chunk objects of a content, looked up again and again in the order of their keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tierfs.format.keys import ChunkName
from tierfs.store.read.lookup import names_beside
from tierfs.store.store import Store

__all__ = ["ChunkNames"]


class ChunkNames:
    """The names of the chunk objects of one store. Safe for use by many threads.

    The listing of the last prefix is kept, so lookups in the order of their keys list each prefix once. Others may delete
    what it names, and what they store meanwhile is not in it.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listed: tuple[bytes, dict[bytes, list[ChunkName]]] = (b"", {})

    def find(self, content: bytes) -> Sequence[ChunkName]:
        """The names of all chunk objects of one content.

        Raises:
            StoreError, ReadOnlyError: The object tier failed.
        """
        first, names = self._listed
        if first != content[:1]:
            names = defaultdict(list)
            for name in names_beside(self._store, content):
                names[name.digest].append(name)
            self._listed = content[:1], names
        return tuple(names.get(content, ()))

    def add(self, name: ChunkName) -> None:
        """Note an object that was stored."""
        first, names = self._listed
        if first == name.digest[:1] and name not in names[name.digest]:
            names[name.digest].append(name)
