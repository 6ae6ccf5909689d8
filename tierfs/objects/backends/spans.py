"""Fetch ranges of an object: choose few requests, since a request costs more than some unwanted bytes, and pass on bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tierfs.digest import Buffer
from tierfs.errors import StoreError
from tierfs.objects.protocol import Range, Take

GAP_BYTES_MAX = (1 << 20) - 1
"""One request fetches ranges that are at most this far apart.

So many unwanted bytes cost less than another request. A whole unwanted block is skipped.
"""
PIECE_BYTES = 64 << 10


@dataclass(slots=True)
class RequestRange:
    """The ranges that one request fetches: sorted, with small gaps. They may overlap."""

    start: int
    end: int
    parts: list[Range] = field(default_factory=list)

    def take(self, at: int, piece: Buffer) -> None:
        """Copy into each part its share of ``piece``, which begins at ``at`` in the object."""
        end = at + len(piece)
        view = memoryview(piece)
        for offset, out in self.parts:
            if offset >= end:
                break
            first, last = max(offset, at), min(offset + len(out), end)
            if first < last:
                out[first - offset : last - offset] = view[first - at : last - at]

    def _is_disjoint(self) -> bool:
        """Return whether no byte goes to two parts."""
        return all(offset + len(out) <= later for (offset, out), (later, _) in pairwise(self.parts))

    def fill(self, at: int, read_into: Callable[[memoryview], int]) -> int:
        """Read the bytes from ``at`` on into the parts. Return where the bytes end, which may be early."""
        unwanted = memoryview(b"")
        if not self._is_disjoint():
            piece = memoryview(bytearray(PIECE_BYTES))
            while at < self.end and (count := read_into(piece[: self.end - at])):
                self.take(at, piece[:count])
                at += count
            return at
        for offset, out in self.parts:
            while at < offset:
                unwanted = unwanted or memoryview(bytearray(PIECE_BYTES))
                if not (count := read_into(unwanted[: offset - at])):
                    return at
                at += count
            end = offset + len(out)
            while at < end:
                if not (count := read_into(out[at - offset :])):
                    return at
                at += count
        return at


def spans_of(ranges: Sequence[Range]) -> list[RequestRange]:
    """Return the requests that fetch these ranges."""
    found: list[RequestRange] = []
    for offset, out in sorted((each for each in ranges if len(each[1])), key=lambda each: each[0]):
        end = offset + len(out)
        if not found or offset > found[-1].end + GAP_BYTES_MAX:
            found.append(RequestRange(offset, end))
        found[-1].end = max(found[-1].end, end)
        found[-1].parts.append((offset, out))
    return found


def taking(whole: memoryview) -> Take:
    """Return a `Take` of the bytes in memory."""
    at = 0

    def take(count: int) -> memoryview:
        nonlocal at
        assert at + count <= len(whole), "more is taken than was asked for"
        at += count
        return whole[at - count : at]

    return take


def taking_from(read_into: Callable[[memoryview], int | None], length: int, memory: memoryview, key: str) -> Take:
    """Return a `Take` that reads each piece into ``memory``.

    Args:
        read_into: Fills a buffer, or only its beginning, with the next bytes, and returns how many; 0 at the end.
        length: How many bytes there are, for errors.
        memory: Long enough for each piece.
        key: The object's key, for errors.
    """
    taken = 0

    def take(count: int) -> memoryview:
        nonlocal taken
        assert count <= len(memory), "a piece is larger than may be taken at once"
        at = 0
        while at < count:
            read = read_into(memory[at:count])
            if not read:
                raise StoreError(
                    f"{key}: the answer broke off at byte {taken + at} of {length}", transient=True, path=key
                )
            at += read
        taken += count
        return memory[:count]

    return take
