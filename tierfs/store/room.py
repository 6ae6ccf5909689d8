"""The memory that a chunk takes on its way to the object tier: as much as one has, whatever is made of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tierfs.buffers import buffers

__all__ = ["Room", "lend_room"]


class Room:
    """Memory of 16 MiB, a chunk's size. A chunk that lies there is gone when it was encoded: what came of it lies there then.

    Attributes:
        memory: Where it is now, which changes as that does.
    """

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory


@contextlib.contextmanager
def lend_room() -> Iterator[Room]:
    """One, of undefined content, for the time of a ``with`` block."""
    room = Room(buffers().take())
    try:
        yield room
    finally:
        buffers().give(room.memory)
