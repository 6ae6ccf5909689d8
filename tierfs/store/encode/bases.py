"""Chunks that others are encoded against: those of this host, of which only what is needed is read, and fetched ones."""

from __future__ import annotations

from typing import Protocol

from tierfs import digest
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.format.manifest import Row
from tierfs.store.encode.contexts import ReadRow
from tierfs.store.encode.desks import BASES_HELD, Desk
from tierfs.store.encode.pipeline import blocks_of

__all__ = ["AbsentError", "FetchedBase", "LocalBase", "Reference", "read_verified"]


class AbsentError(Exception):
    """A chunk is not on this host, or not any more."""


class Reference(Protocol):
    """What a chunk may be encoded against."""

    def part(self, start: int, count: int) -> memoryview:
        """At most a sample's bytes. They count until the next ones are asked for. Raises `AbsentError`."""

    def block(self, number: int) -> memoryview:
        """One block. It counts until four others were asked for, one behind the other. Raises `AbsentError`."""


class FetchedBase:
    """A chunk in memory, verified.

    Args:
        raw: Its bytes. Borrowed.
    """

    def __init__(self, raw: memoryview) -> None:
        self._raw = raw

    def part(self, start: int, count: int) -> memoryview:
        """See `Reference.part`."""
        return self._raw[start : start + count]

    def block(self, number: int) -> memoryview:
        """See `Reference.block`."""
        return self._raw[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


class LocalBase:
    """A chunk of this host, of which as much is read as is asked for. Of use once, and to one thread.

    Bytes other than a reader will have make a difference that nobody can undo: what was encoded against them, or is to be
    remembered of them, counts only if the chunk turns out to be sound; unless they are verified as they are read.

    Args:
        kind: The store's digests.
        row: The chunk.
        read: Gets at it.
        desk: Where it is read to.
        is_verified: Whether ``read`` verifies what it reads: then the chunk is sound.
    """

    def __init__(self, kind: DigestKind, row: Row, read: ReadRow, desk: Desk, *, is_verified: bool = False) -> None:
        self._kind = kind
        self._row = row
        self._read = read
        self._desk = desk
        self._is_verified = is_verified
        self._digests: dict[int, bytes] = {}
        self._held: dict[int, tuple[int, memoryview]] = {}  # the last blocks, by their places in memory

    def __repr__(self) -> str:
        return f"LocalBase({self._row.name}, {len(self._digests)} blocks read)"

    def part(self, start: int, count: int) -> memoryview:
        """See `Reference.part`. Nobody has verified them, unless that is done as they are read."""
        return self._get(start, self._desk.take().base_sample[:count])

    def block(self, number: int) -> memoryview:
        """See `Reference.block`."""
        place = number % BASES_HELD
        held, found = self._held.get(place, (-1, memoryview(b"")))
        if held != number:
            memory = self._desk.take().bases[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
            start = number * BLOCK_BYTES
            self._held.pop(place, None)
            found = self._get(start, memory[: self._row.raw_length - start])
            if not self._is_verified:
                self._digests[number] = digest.hash_bytes(self._kind, found)
            self._held[place] = number, found
        return found

    def is_sound(self) -> bool:
        """Whether the blocks that were read are the chunk's; for that the others are read, too. Raises `AbsentError`."""
        if self._is_verified:
            return True
        count = -(-self._row.raw_length // BLOCK_BYTES)
        for number in range(count):
            if number not in self._digests:
                self.block(number)
        return _is(self._kind, self._row, [self._digests[number] for number in range(count)])

    def _get(self, start: int, out: memoryview) -> memoryview:
        if not self._read(self._row, start, out):
            raise AbsentError
        return out


def read_verified(kind: DigestKind, row: Row, out: memoryview, read: ReadRow) -> bool:
    """Read a whole chunk from this host into ``out``, and say whether that holds its bytes now."""
    return read(row, 0, out) and _is(kind, row, [digest.hash_bytes(kind, block) for block in blocks_of(out)])


def _is(kind: DigestKind, row: Row, digests: list[bytes]) -> bool:
    return digest.combine(kind, row.raw_length, digests) == row.name.digest
