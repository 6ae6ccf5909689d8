"""The chunk objects that files need, with their lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from tierfs.format.envelope import BaseRange
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.store.maintenance.repair_chunks import Healer


class NeededChunks:
    """The chunk objects that the files of one store need.

    Args:
        healer: Reads envelopes.
    """

    def __init__(self, healer: Healer) -> None:
        self._healer = healer
        self._rows: dict[ChunkName, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ChunkName]:
        return iter(self._rows)

    def add(self, row: Row) -> None:
        """Add a chunk of a file, and every chunk object that it is encoded against."""
        self._rows[row.name] = row
        for base in row.bases:
            self._rows.setdefault(base, Row(base, 0, 0))

    def is_base_only(self, name: ChunkName) -> bool:
        """Return whether others are encoded against this object, and no file names it as one of its chunks."""
        row = self._rows.get(name)
        return row is not None and not row.stored_length

    def fits(self, name: ChunkName, size: int | None) -> bool:
        """Return whether an object of ``size`` bytes may be this chunk object. ``None`` stands for a missing object."""
        return size is not None and self._rows[name].stored_length in (0, size)

    def find(self, name: ChunkName) -> Row:
        """Return the row of a chunk object. Call this when all are added.

        If no file names the object as a chunk, no row has its lengths. They come from the envelope of an object that is
        encoded against it.

        Returns:
            A row with lengths of 0 if no such envelope can be read.

        Raises:
            StoreError, ReadOnlyError: An object tier failed.
        """
        if self.is_base_only(name):
            for row in self._dependents[name]:
                for base in self._bases_below(row.name, row.stored_length):
                    if base.name == name:
                        bases = dict.fromkeys(each.name for each in self._healer.bases_of(name, base.stored_length))
                        return Row(name, base.raw_length, base.stored_length, tuple(bases))
        return self._rows[name]

    @cached_property
    def _dependents(self) -> dict[ChunkName, list[Row]]:
        found = defaultdict(list)
        for row in self._rows.values():
            for base in row.bases:
                found[base].append(row)
        return found

    def _bases_below(self, name: ChunkName, size: int) -> Iterator[BaseRange]:
        for base in self._healer.bases_of(name, size):
            yield base
            yield from self._bases_below(base.name, base.stored_length)
