"""The memory that a chunk takes on its way to the object tier: that of one chunk, also when it is encoded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tierfs.buffers import buffers

__all__ = ["Room", "lend_room"]


class Room:
    """Memory of 16 MiB, of which what is needed is touched. A chunk that lies there makes way for what comes of it, if it is encoded."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    @property
    def memory(self) -> memoryview:
        """Where it is now, of undefined content at first. It is taken when it is first asked for."""
        if self._memory is None:
            self._memory = buffers().take()
        return self._memory

    def holds(self, raw: memoryview) -> bool:
        """Whether bytes lie there."""
        return self._memory is not None and raw.obj is self._memory.obj

    def exchange(self, memory: memoryview) -> memoryview:
        """Be other memory, as large, from now on. Returns what it was, which is the caller's now."""
        before = self.memory
        self._memory = memory
        return before

    def _end(self) -> None:
        if self._memory is not None:
            buffers().give(self._memory)


@contextlib.contextmanager
def lend_room() -> Iterator[Room]:
    """One, for the time of a ``with`` block."""
    room = Room()
    try:
        yield room
    finally:
        room._end()
