"""A file that is written in place, in any order and on any thread, before it has a name.

Its memory is slots of slabs where the store has local tiers, so that saving it takes no copy; else it is private.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tierfs.errors import StoreError
from tierfs.flush.draft import SlotRef
from tierfs.flush.levels import Level
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row
from tierfs.store.chunks import store_chunk
from tierfs.store.save import Writer
from tierfs.store.store import Store
from tierfs.store.transfers import transfers

if TYPE_CHECKING:
    from tierfs.flush.chunkbuffer import ChunkBuffer
    from tierfs.local.slab import Slot

__all__ = ["Run", "StagedFile"]


@dataclass(slots=True, eq=False)
class _Chunk:
    """One chunk of a run."""

    view: memoryview
    buffer: ChunkBuffer | None = None
    slot: Slot | None = None  # once it is sealed
    row: Row | None = None


@dataclass(slots=True, eq=False)
class Run:
    """Chunks that follow each other in the file and lie side by side in memory.

    Attributes:
        view: All of them: writable until the run is sealed.
        length: Bytes.
    """

    view: memoryview
    length: int
    _chunks: list[_Chunk] = field(repr=False)


class StagedFile:
    """See the module. For one thread, but for what is written into the runs' memory.

    What is not committed is given back when nobody refers to the file any more, or at `abort`.

    Args:
        store: Where it is to be saved.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = store.tiers.writer if store.tiers is not None else None
        if self._writer is not None:
            self._writer.expect()
        self._taken: list[Slot] = []
        self._finalizer = weakref.finalize(self, _give_back, self._taken)
        self._finalizer.atexit = False

    def add_run(self, lengths: Sequence[int], *, wait: bool = True) -> Run:
        """Room for chunks side by side.

        Args:
            lengths: Of the chunks in bytes, each 1 to 16 MiB; all but the last are multiples of 4096.
            wait: Whether to wait for room.

        Raises:
            CapacityError: There is none, and none came in time, or never will in one piece.
        """
        total = sum(lengths)
        if self._writer is None:
            memory = np.empty(total, np.uint8).data
            ends = np.cumsum(lengths)
            return Run(
                memory, total, [_Chunk(memory[end - size : end]) for end, size in zip(ends, lengths, strict=True)]
            )
        buffers = self._writer.begin_run(lengths, wait=wait)
        slots = [buffer.slot for buffer in buffers]
        self._taken += slots
        whole = slots[0].segment.view(slots[0], slots[-1])
        return Run(
            whole, total, [_Chunk(slot.segment.view(slot), buffer) for slot, buffer in zip(slots, buffers, strict=True)]
        )

    def seal(self, runs: Sequence[Run]) -> None:
        """Hash and seal what was written into these runs, on as many threads as there are processors.

        Raises:
            StoreError, CapacityError, ReadOnlyError: The object tier failed, where there are no local tiers.
        """
        waiting = [chunk for run in runs for chunk in run._chunks if chunk.row is None]
        if self._writer is None:
            for chunk, row in zip(waiting, transfers().map(self._put, [chunk.view for chunk in waiting]), strict=True):
                chunk.row = row
            return
        transfers().share_out(self._seal_chunk, waiting)

    def _put(self, view: memoryview) -> Row:
        return store_chunk(self._store, view)

    def _seal_chunk(self, chunk: _Chunk) -> None:
        assert self._writer is not None
        assert chunk.buffer is not None
        chunk.buffer.accept()
        slot = self._writer.seal_chunk(chunk.buffer)
        chunk.slot, chunk.row = slot, Row(ChunkName(slot.name[1:]), slot.length, 0)

    def commit(
        self,
        path: str,
        runs: Sequence[Run],
        *,
        level: Level | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> Manifest:
        """Make these runs, in this order, the content of the file at ``path``. What is in no run of them is given back.

        Args:
            path: Relative to the store.
            runs: Sealed.
            level: What is waited for; by default the store's.
            metadata: See `Writer`.

        Raises:
            StoreError: It was committed or given up before.
            ConflictError, CapacityError, TimeoutError: See `Writer.commit`.
        """
        if not self._finalizer.alive:
            raise StoreError(f"{self._store.where(path)}: what was staged was saved or given up before: stage it again")
        chunks = [chunk for run in runs for chunk in run._chunks]
        rows = [chunk.row for chunk in chunks if chunk.row is not None]
        slots = [
            None if chunk.slot is None else SlotRef(chunk.slot.segment.id, chunk.slot.index, chunk.slot.serial)
            for chunk in chunks
        ]
        assert len(rows) == len(chunks), "not sealed"
        writer = Writer(self._store, path, metadata=metadata, level=level, staged=self._writer is not None)
        writer.adopt(rows, slots)
        try:
            return writer.commit()
        finally:
            if writer.is_done:
                # They are the file's now.
                kept = {
                    (slot.segment.id, slot.index, slot.serial) for chunk in chunks if (slot := chunk.slot) is not None
                }
                self._taken[:] = [
                    slot for slot in self._taken if (slot.segment.id, slot.index, slot.serial) not in kept
                ]
                self._finalizer()

    def abort(self) -> None:
        """Give everything back. May be called twice; does nothing to what was committed."""
        self._finalizer()


def _give_back(taken: list[Slot]) -> None:
    for slot in taken:
        if slot.segment.owned:  # not in a forked child
            slot.segment.give(slot)
    taken.clear()
