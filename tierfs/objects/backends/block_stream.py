"""Make the `Take` functions that pass on an object's bytes, from memory or while they arrive."""

from __future__ import annotations

from collections.abc import Callable

from tierfs.errors import StoreError
from tierfs.objects.protocol import Take


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
