"""Where a writer's chunks go: straight to the object tier, or into slabs, from where the flusher takes them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError
from tierfs.flush.draft import SlotRef, local_name
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.store.chunks import store_chunk
from tierfs.store.store import Store
from tierfs.store.transfers import transfers

if TYPE_CHECKING:
    from tierfs.flush.chunkbuffer import ChunkBuffer
    from tierfs.flush.slabwriter import SlabWriter
    from tierfs.flush.tiers import Tiers
    from tierfs.local.slab import Slot

__all__ = ["ObjectSink", "Sink", "SlabSink"]

IN_FLIGHT_MAX = 4


class Sink(Protocol):
    """Takes the bytes of one file in order. Not for use by several threads at once."""

    def write(self, view: memoryview) -> None:
        """Add bytes; they are copied.

        Raises:
            StoreError, CapacityError, ReadOnlyError: An earlier chunk could not be stored.
        """

    def finish(self) -> list[Row]:
        """Store what is left, and return every chunk in order. Raises as `write` does."""

    def abort(self) -> None:
        """Give everything up. May be called twice."""


class ObjectSink:
    """Puts chunks into the object tier while the next one is being filled: one, and at most four on their way.

    The local tiers keep copies of them, as of what is read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: list[Row] = []
        self._under_way: deque[Future[Row]] = deque()
        self._chunk: bytearray | None = None
        self._filled = 0

    def write(self, view: memoryview) -> None:
        """See `Sink.write`."""
        at = 0
        while at < len(view):
            if self._chunk is None:
                self._chunk, self._filled = transfers().take_buffer(), 0
            count = min(CHUNK_BYTES - self._filled, len(view) - at)
            self._chunk[self._filled : self._filled + count] = view[at : at + count]
            self._filled += count
            at += count
            if self._filled == CHUNK_BYTES:
                self._send()

    def finish(self) -> list[Row]:
        """See `Sink.finish`."""
        if self._chunk is not None:
            self._send()
        while self._under_way:
            self._rows.append(self._under_way.popleft().result())
        return self._rows

    def abort(self) -> None:
        """See `Sink.abort`. Chunks already stored are left for garbage collection."""
        for future in self._under_way:
            future.cancel()
        while self._under_way:
            future = self._under_way.popleft()
            if not future.cancelled():
                future.exception()
        if self._chunk is not None:
            transfers().give_buffer(self._chunk)
            self._chunk = None

    def _send(self) -> None:
        assert self._chunk is not None
        while len(self._under_way) >= IN_FLIGHT_MAX:
            self._rows.append(self._under_way.popleft().result())
        buffer, filled = self._chunk, self._filled
        self._chunk = None

        def store_it(buffer: bytearray) -> Row:
            try:
                row = store_chunk(self._store, memoryview(buffer)[:filled])
                tiers = self._store.tiers
                if tiers is not None and tiers.cache.keeps_reads:
                    tiers.cache.insert(
                        local_name(self._store.descriptor.digest_kind, row.name.digest), memoryview(buffer)[:filled]
                    )
                return row
            finally:
                transfers().give_buffer(buffer)

        self._under_way.append(transfers().send(store_it, buffer))


class SlabSink:
    """Puts chunks into slabs. While one is being copied, the last is hashed and sealed, and room taken for the next.

    Where the ram tier has no room for the whole file, it goes through it in waves.

    Args:
        tiers: The local tiers.
        write_id: Of the file, so that the flusher knows whose chunks went ahead of it.
    """

    def __init__(self, tiers: Tiers, write_id: bytes) -> None:
        self._writer = tiers.writer
        self._holder = f"open:{tiers.ram.host.owner()}:{write_id.hex()}"
        self._rows: list[Row] = []
        self._slots: list[Slot | None] = []
        self._sealing: deque[tuple[ChunkBuffer, Future[Slot]]] = deque()
        self._chunk: ChunkBuffer | None = None
        self._ahead: Future[ChunkBuffer | None] | None = None
        self._spilled = False

    @property
    def slots(self) -> list[SlotRef | None]:
        """Per row, where it lies; ``None`` for a chunk that was taken down already."""
        return [None if slot is None else SlotRef(slot.segment.id, slot.index, slot.serial) for slot in self._slots]

    def write(self, view: memoryview) -> None:
        """See `Sink.write`."""
        at = 0
        while at < len(view):
            if self._chunk is None:
                self._chunk = self._begin()
            if self._ahead is None and len(view) - at > self._chunk.room:
                self._ahead = transfers().submit(_try_begin, self._writer)
            at += self._chunk.append(view[at:])
            if not self._chunk.room:
                self._seal()

    def finish(self) -> list[Row]:
        """See `Sink.finish`."""
        if self._chunk is not None:
            self._seal()
        self._drop_ahead()
        self._collect()
        return self._rows

    def abort(self) -> None:
        """See `Sink.abort`."""
        self._drop_ahead()
        unsealed = [] if self._chunk is None else [self._chunk.slot]
        self._chunk = None
        for chunk, future in self._sealing:
            error = future.exception()
            unsealed.append(chunk.slot if error is not None else future.result())
        self._sealing.clear()
        for slot in [*unsealed, *self._slots]:
            if slot is not None:
                self._writer.drop(slot)
        self._slots = []
        if self._spilled:
            self._spilled = False
            self._writer.unhold(self._holder)

    def _begin(self) -> ChunkBuffer:
        ahead, self._ahead = self._ahead, None
        taken = ahead.result() if ahead is not None else None
        if taken is not None:
            return taken
        if not self._sealing and not any(self._slots):
            return self._writer.begin_chunk()
        try:
            return self._writer.begin_chunk(wait=False)
        except CapacityError:
            # What this file holds itself is never freed by waiting for it.
            self._collect()
            self._spilled = True
            self._writer.spill(self._holder, [slot for slot in self._slots if slot is not None])
            self._slots = [None] * len(self._slots)
            return self._writer.begin_chunk()

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        taken = ahead.result() if ahead is not None else None
        if taken is not None:
            self._writer.drop(taken.slot)

    def _seal(self) -> None:
        assert self._chunk is not None
        chunk, self._chunk = self._chunk, None
        self._sealing.append((chunk, transfers().submit(self._writer.seal_chunk, chunk)))

    def _collect(self) -> None:
        """Wait for the chunks that are being sealed."""
        while self._sealing:
            slot = self._sealing[0][1].result()
            self._sealing.popleft()
            self._slots.append(slot)
            self._rows.append(Row(ChunkName(slot.name[1:]), slot.length, 0))


def _try_begin(writer: SlabWriter) -> ChunkBuffer | None:
    try:
        return writer.begin_chunk(wait=False)
    except CapacityError:
        return None  # whoever needs it frees some, or waits
