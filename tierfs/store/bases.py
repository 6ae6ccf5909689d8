"""Chunks of this host that others are encoded against."""

from __future__ import annotations

from collections.abc import Iterator

from tierfs import digest
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.flush.publisher import ReadRow
from tierfs.format.manifest import Row
from tierfs.store.encoding import blocks_of, scratch

__all__ = ["AbsentError", "LocalBase", "read_verified"]


class AbsentError(Exception):
    """A chunk is not on this host, or not any more."""


class LocalBase:
    """A chunk of this host, read block by block and hashed on the way. Of use once, and to one thread.

    Bytes other than a reader will have make a difference that nobody can undo: what was encoded against them counts only if
    the chunk turns out to be sound.

    Args:
        kind: The store's digests.
        row: The chunk.
        read: Gets at it.
    """

    def __init__(self, kind: DigestKind, row: Row, read: ReadRow) -> None:
        self._kind = kind
        self._row = row
        self._read = read
        self._digests: list[bytes] = []

    def __repr__(self) -> str:
        return f"LocalBase({self._row.name}, {len(self._digests)} blocks read)"

    def __iter__(self) -> Iterator[memoryview]:
        """Its blocks; each counts until the next one is asked for. Raises `AbsentError`."""
        buffer = scratch("base", BLOCK_BYTES)
        for start in range(0, self._row.raw_length, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, self._row.raw_length - start)]
            if not self._read(self._row, start, block):
                raise AbsentError
            self._digests.append(digest.hash_bytes(self._kind, block))
            yield block

    def is_sound(self) -> bool:
        """Whether what was read was all of it, and its bytes."""
        return _is(self._kind, self._row, self._digests)


def read_verified(kind: DigestKind, row: Row, out: memoryview, read: ReadRow) -> bool:
    """Read a whole chunk from this host into ``out``, and say whether that holds its bytes now."""
    return read(row, 0, out) and _is(kind, row, [digest.hash_bytes(kind, block) for block in blocks_of(out)])


def _is(kind: DigestKind, row: Row, digests: list[bytes]) -> bool:
    return digest.combine(kind, row.raw_length, digests) == row.name.digest
