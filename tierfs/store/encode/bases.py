"""Chunks that others are encoded against."""

from __future__ import annotations

from tierfs import digest
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.format.manifest import Row
from tierfs.store.encode.contexts import ReadRow
from tierfs.store.encode.pipeline import blocks_of

__all__ = ["AbsentError", "LocalBase", "read_verified"]


class AbsentError(Exception):
    """A chunk is not on this host, or not any more."""


class LocalBase:
    """A copy of a chunk on this host. Of use once, and to one thread.

    Bytes other than a reader will have make a difference that nobody can undo: so all of it is verified before anything is
    encoded against it, or remembered of it.

    Args:
        kind: The store's digests.
        row: The chunk.
        read: Gets at it; ``None`` where the memory holds its verified bytes.
        memory: Where it is read to, as long as the chunk.
    """

    def __init__(self, kind: DigestKind, row: Row, read: ReadRow | None, memory: memoryview) -> None:
        self._kind = kind
        self._row = row
        self._read = read
        self._memory = memory

    def __repr__(self) -> str:
        return f"LocalBase({self._row.name}, is_verified={self.is_verified})"

    @property
    def is_verified(self) -> bool:
        """Whether all of it was read, and found to be the chunk."""
        return self._read is None

    def whole(self) -> memoryview:
        """All of it, verified. Raises `AbsentError`."""
        if self._read is not None:
            if not read_verified(self._kind, self._row, self._memory, self._read):
                raise AbsentError
            self._read = None
        return self._memory

    def part(self, start: int, count: int) -> memoryview:
        """A part of it, verified only where all of it is. Raises `AbsentError`."""
        out = self._memory[start : start + count]
        if self._read is not None and not self._read(self._row, start, out):
            raise AbsentError
        return out


def read_verified(kind: DigestKind, row: Row, out: memoryview, read: ReadRow) -> bool:
    """Read a whole chunk from this host into ``out``, and say whether that holds its bytes now."""
    digests = []
    for number, block in enumerate(blocks_of(out)):
        if not read(row, number * BLOCK_BYTES, block):
            return False
        digests.append(digest.hash_bytes(kind, block))  # while it is in the caches
    return digest.combine(kind, row.raw_length, digests) == row.name.digest
