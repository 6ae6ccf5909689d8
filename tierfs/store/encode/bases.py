"""Read the chunks on this host that others are encoded against."""

from __future__ import annotations

from tierfs import digest
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.format.manifest import Row
from tierfs.store.encode.contexts import ReadRow
from tierfs.store.encode.pipeline import blocks_of


class AbsentError(Exception):
    """A chunk is not, or no longer, on this host."""


class LocalBase:
    """A copy of a chunk on this host, as a base for one chunk. For one thread.

    A delta against wrong bytes cannot be decoded. So the whole base is verified before a chunk is encoded against it,
    or before a finding about it is remembered.

    Args:
        kind: The store's digests.
        row: The chunk.
        read: Reads the chunk from this host; ``None`` if ``memory`` holds its verified bytes.
        memory: Receives the bytes; as long as the chunk. Borrowed.
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
        """Whether the whole chunk was read and has its digest."""
        return self._read is None

    def whole(self) -> memoryview:
        """Return the whole chunk, verified. Raises `AbsentError`."""
        if self._read is not None:
            if not read_verified(self._kind, self._row, self._memory, self._read):
                raise AbsentError
            self._read = None
        return self._memory

    def part(self, start: int, count: int) -> memoryview:
        """Return a part of the chunk, verified only if the whole chunk is. Raises `AbsentError`."""
        out = self._memory[start : start + count]
        if self._read is not None and not self._read(self._row, start, out):
            raise AbsentError
        return out


def read_verified(kind: DigestKind, row: Row, out: memoryview, read: ReadRow) -> bool:
    """Read a whole chunk from this host into ``out``. Return whether ``out`` now holds the chunk's bytes."""
    digests = []
    for number, block in enumerate(blocks_of(out)):
        if not read(row, number * BLOCK_BYTES, block):
            return False
        digests.append(digest.hash_bytes(kind, block))  # while the block is in the CPU caches
    return digest.combine(kind, row.raw_length, digests) == row.name.digest
