"""Memory that chunks are encoded in: of as many at a time as there are processors, however many are on their way."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tierfs._fork import PerProcess
from tierfs.buffers import buffers, fresh
from tierfs.codec.choice import SAMPLE_BYTES
from tierfs.digest import BLOCK_BYTES
from tierfs.store.encode.room import Room

__all__ = ["BASES_HELD", "Desk", "Desks", "desks"]

# As many blocks as are encoded together.
BASES_HELD = 4


@dataclass(slots=True)
class _Memory:
    """What encoding one chunk takes beside the chunk. Only what is needed of it is touched.

    Attributes:
        out: A chunk's memory, for what comes of its blocks; exchanged for another one's when it is to stay there.
        bases: That of four blocks, for those that others are encoded against.
        sample: For what comes of a part of a block that is tried.
        base_sample: For the part of another chunk that it is tried against.
    """

    out: memoryview
    bases: memoryview
    sample: memoryview
    base_sample: memoryview


class Desk:
    """Memory to encode one chunk in, which is waited for when it is first asked for: what is not encoded needs none."""

    def __init__(self, owner: Desks) -> None:
        self._owner = owner
        self._has_turn = False
        self._memory: _Memory | None = None

    def take(self) -> _Memory:
        """What there is, of undefined content, until the ``with`` block ends in which it was lent. Waits for it the first time."""
        if self._memory is None:
            if not self._has_turn and threading.current_thread() is not threading.main_thread():
                self._owner._turns.acquire()
                self._has_turn = True
            self._memory = self._owner._take()
        return self._memory

    def exchange(self, room: Room) -> None:
        """Leave ``out`` in a room, and have what was there for the next who comes."""
        memory = self.take()
        self._memory = None  # an interrupt from here on loses memory, and gives none to two
        memory.out = room.exchange(memory.out)
        self._memory = memory


class Desks:
    """All of this process. Safe for use by many threads: they encode there by turns, and send without.

    The main thread does not wait, and does not count: an interrupt could have it leave without giving its turn back.
    """

    def __init__(self) -> None:
        self._turns = threading.Semaphore(len(os.sched_getaffinity(0)))
        self._free: list[_Memory] = []

    def __repr__(self) -> str:
        return f"Desks({len(self._free)} free)"

    @contextlib.contextmanager
    def lend(self) -> Iterator[Desk]:
        """A desk for one chunk, in a ``with`` block; it is waited for in there.

        Who has one must not wait for another one, nor for a network.
        """
        desk = Desk(self)
        try:
            yield desk
        finally:
            memory, desk._memory = desk._memory, None
            if memory is not None:
                self._free.append(memory)
            if desk._has_turn:
                self._turns.release()

    def _take(self) -> _Memory:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        memory = fresh(BASES_HELD * BLOCK_BYTES + 2 * SAMPLE_BYTES)
        bases, samples = memory[: BASES_HELD * BLOCK_BYTES], memory[BASES_HELD * BLOCK_BYTES :]
        return _Memory(buffers().take(), bases, samples[:SAMPLE_BYTES], samples[SAMPLE_BYTES:])


desks = PerProcess(Desks)
"""This process's `Desks`."""
