"""Look up the chunk objects of contents, in the order of their keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tierfs.format.keys import ChunkName
from tierfs.store.read.lookup import names_beside
from tierfs.store.store import Store


class ChunkNames:
    """The names of the chunk objects of one store. Safe for use by many threads.

    The listing of the last prefix is cached, so lookups in the order of keys list each prefix once. Other processes may
    delete objects of a cached listing, and objects that they store meanwhile are not in it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listed: tuple[bytes, dict[bytes, list[ChunkName]]] = (b"", {})

    def find(self, content: bytes) -> Sequence[ChunkName]:
        """Return the names of all chunk objects with this content's digest.

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
        """Add an object that was stored to the cached listing."""
        first, names = self._listed
        if first == name.digest[:1] and name not in names[name.digest]:
            names[name.digest].append(name)
