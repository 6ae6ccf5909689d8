"""Cut a file into chunks while it is written, and put them into the object tier, or into slabs for the flusher.

A file with a table of tensors (safetensors, ``torch.save``) is cut by that table. The bytes before the tensors have
their own chunks, so tensors do not move when these bytes grow. A large tensor begins a chunk and is cut every 16 MiB.
Small neighbours are packed. All other files are cut every 16 MiB, and so is the rest of a file that stops following its
table.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tierfs.buffers import buffers
from tierfs.codec.layout import Item, Steps
from tierfs.codec.layout.elements import Span, follow
from tierfs.digest import CHUNK_BYTES, local_name
from tierfs.errors import CapacityError
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.host.pending.record import SlotRef
from tierfs.store.chunks import rescue, store_chunk
from tierfs.store.encode.pipeline import Pressure
from tierfs.store.encode.tensors import ChunkContext, group_of, places, unknown_layout
from tierfs.store.store import Store
from tierfs.threads import processors, transfers

if TYPE_CHECKING:
    from tierfs.host.slab.segment import Slot
    from tierfs.host.tiers import Tiers
    from tierfs.host.write.writer import ChunkBuffer


LARGE_BYTES = 1 << 20
"""A tensor of this size or more has its own chunks."""
_PIECE_BYTES = 1 << 16
IN_FLIGHT_MAX = 4
SLOT_BYTES_MIN = 64 << 10
# Files that are written at the same time may fill the ram tier, and none of them is flushed before it is complete. So a
# file with chunks there waits for room no longer than this, and not at all beyond half of the tier.
WAITS_S = 5.0


class Cutter:
    """Finds where chunks end in a stream of bytes. The result does not depend on how calls split the stream.

    It buffers only bytes of the file's table.

    Args:
        at_start: Whether the stream begins at the start of the file. If not, it is cut every 16 MiB.
    """

    def __init__(self, *, at_start: bool = True) -> None:
        self._at = 0
        # Spans of the chunk being filled, and of the chunks that ended in the last `ends`.
        self._layout: deque[Span] = deque()
        self._filled = 0  # bytes in the chunk being filled
        self._alone = True  # whether that chunk must not be shared: it holds a header or a large tensor
        self._left = 0  # bytes until the next decision
        self._kept: bytearray | None = None  # the bytes collected for the parser, if it wants them
        self._mark = b""  # end of the wanted bytes; empty if their number is fixed
        self._steps: Steps | None = follow() if at_start else None
        self._ask()

    def ends(self, view: memoryview) -> list[int]:
        """Take the next bytes. Return, in order, how many of them come before each end of a chunk."""
        while self._layout and self._layout[0].stop <= self._at - self._filled:
            self._layout.popleft()
        ends: list[int] = []
        at = 0
        while at < len(view):
            count = min(self._left, CHUNK_BYTES - self._filled, len(view) - at)
            if self._kept is not None:
                count = self._keep(view[at : at + count])
            at += count
            self._at += count
            self._filled += count
            self._left -= count
            if self._filled == CHUNK_BYTES:
                self._filled = 0
                ends.append(at)
            while not self._left:
                if self._ask() and self._filled:
                    self._filled = 0
                    ends.append(at)
        return ends

    def layout(self, start: int, stop: int) -> list[Span]:
        """Return the elements from ``start`` to ``stop``, in order and without gaps.

        The range is a chunk that ended in the last call of `ends`, or the chunk being filled. Call this for one chunk
        after the other.
        """
        found: list[Span] = []
        at = start
        while self._layout and self._layout[0].start < stop:
            span = self._layout[0]
            found += unknown_layout(at, span.start)
            found.append(span)
            at = span.stop
            if at > stop:
                break
            self._layout.popleft()
        return found + unknown_layout(at, stop)

    def _keep(self, view: memoryview) -> int:
        """Collect wanted bytes and return their number. At the end mark, set ``_left`` to that number."""
        assert self._kept is not None
        if not self._mark:
            self._kept += view
            return len(view)
        before = len(self._kept)
        self._kept += view[:_PIECE_BYTES]
        end = self._kept.find(self._mark, max(0, before - len(self._mark) + 1))
        if end < 0:
            return len(self._kept) - before
        del self._kept[end + len(self._mark) :]
        self._left = len(self._kept) - before
        return self._left

    def _ask(self) -> bool:
        """Ask the parser for the next step. Return whether a chunk begins here."""
        kept, mark = self._kept, self._mark
        self._kept, self._mark, self._left = None, b"", sys.maxsize
        if self._steps is None or (kept is not None and not kept.endswith(mark)):
            return False
        try:
            request = self._steps.send(bytes(kept)) if kept is not None else next(self._steps)
        except StopIteration:
            return False
        if isinstance(request, Item):
            is_large = request.length >= LARGE_BYTES
            begins = is_large or self._alone or self._filled + request.length > CHUNK_BYTES
            self._left, self._alone = request.length, is_large
            if request.length:
                end = self._at + request.length
                self._layout.append(Span(self._at, end, request.element.width, request.name, request.element.kind))
            return begins
        if request is None:
            return True
        self._kept, self._mark, self._left = bytearray(), request.mark, request.length
        return False


class ObjectSink:
    """Puts the chunks of one file into the object tier while the next chunk is filled. At most four are in flight.

    The local tiers keep copies of the chunks if they keep copies of reads. Not for use by several threads at once.

    Args:
        cutter: Finds the ends of chunks, and the elements in them.
        unread: See `ChunkContext.unread`.
        pressure: See `tierfs.store.chunks.SendPlan`.
    """

    def __init__(
        self, store: Store, path: str, cutter: Cutter, unread: set[bytes] | None = None, *, pressure: Pressure = "none"
    ) -> None:
        self._store, self._path = store, store.where(path)
        self._refresh_at = store.clock.monotonic() + store.descriptor.grace_s / 4
        self._pressure: Pressure = pressure
        self._cutter = cutter
        self._unread = unread
        self._group = group_of(path)
        self._save = store.encoder.count_save(self._group)
        self._sent = 0
        self._rows: list[Row] = []
        self._under_way: deque[Future[Row]] = deque()
        self._chunk: memoryview | None = None
        self._filled = 0

    def write(self, view: memoryview) -> None:
        """Add bytes. They are copied.

        Raises:
            StoreError, CapacityError, ReadOnlyError: An earlier chunk could not be stored.
        """
        at = 0
        for end in self._cutter.ends(view):
            self._append(view[at:end])
            self._send()
            at = end
        if at < len(view):
            self._append(view[at:])

    def finish(self) -> list[Row]:
        """Store the last chunk, and return every chunk in order. Raises as `write` does."""
        if self._chunk is not None:
            self._send()
        while self._under_way:
            self._rows.append(self._under_way.popleft().result())
        return self._rows

    def abort(self) -> None:
        """Discard the file. Chunks already stored are left for garbage collection. May be called twice."""
        for future in self._under_way:
            future.cancel()
        while self._under_way:
            future = self._under_way.popleft()
            if not future.cancelled():
                future.exception()
        if self._chunk is not None:
            buffers().give(self._chunk)
            self._chunk = None

    def _append(self, view: memoryview) -> None:
        if self._chunk is None:
            self._chunk, self._filled = buffers().take(), 0
        self._chunk[self._filled : self._filled + len(view)] = view
        self._filled += len(view)

    def _refresh(self) -> None:
        """Store chunks again that gc has condemned. No record names them while the file is being written."""
        store = self._store
        self._refresh_at = store.clock.monotonic() + store.descriptor.grace_s / 4
        store.lease_cache.ensure()
        unsure = {row.name for row in store.lease_cache.unverified(self._rows)}
        self._rows = [rescue(store, row, self._path) if row.name in unsure else row for row in self._rows]

    def _send(self) -> None:
        assert self._chunk is not None
        while len(self._under_way) >= IN_FLIGHT_MAX:
            self._rows.append(self._under_way.popleft().result())
        buffer, filled = self._chunk, self._filled
        self._chunk = None
        if self._store.clock.monotonic() >= self._refresh_at:
            self._refresh()
        start, self._sent = self._sent, self._sent + filled
        layout = self._cutter.layout(start, self._sent)
        ((_, tensors),) = places(layout, [filled], self._group, start=start)
        context = ChunkContext(tensors, self._save, unread=self._unread)

        def store_it(buffer: memoryview) -> Row:
            raw, tiers = buffer[:filled], self._store.tiers
            cache = tiers.cache if tiers is not None and tiers.cache.keeps_reads else None
            try:
                row = store_chunk(
                    self._store, raw, context, into=raw if cache is None else None, pressure=self._pressure
                )
                if cache is not None:
                    cache.insert(local_name(self._store.descriptor.digest_kind, row.name.digest), raw)
                return row
            finally:
                buffers().give(buffer)

        self._under_way.append(transfers().send(store_it, buffer))


class SlabSink:
    """Puts the chunks of one file into slabs. Its methods are those of `ObjectSink`.

    Several chunks of a large write are copied at once. A chunk of small writes is hashed while the next one is filled.
    If the ram tier has no room for the whole file, its other chunks go to the disk of the state directory.

    Args:
        timeout_s: Seconds to wait for room. None waits without limit.
    """

    def __init__(self, tiers: Tiers, cutter: Cutter, *, timeout_s: float | None) -> None:
        self._cutter = cutter
        self._timeout_s = timeout_s
        self._writer = tiers.writer
        self._writer.expect()
        self._rows: list[Row | None] = []  # None for a chunk that is not sealed yet
        self._slots: list[Slot | None] = []  # None for a chunk that is not sealed yet
        self._sealing: deque[tuple[int, ChunkBuffer, Future[Slot]]] = deque()
        self._chunk: ChunkBuffer | None = None
        self._is_large = False  # whether its further chunks do not wait for room
        self._taken_bytes, self._large_bytes = 0, tiers.ram.budget_bytes // 2
        self._ahead = self._writer.ahead()

    @property
    def slots(self) -> list[SlotRef | None]:
        """The slot of each row."""
        return [None if slot is None else SlotRef.of(slot) for slot in self._slots]

    def write(self, view: memoryview) -> None:
        ends = self._cutter.ends(view)
        if self._chunk is not None and ends:
            self._append(view[: ends[0]])
            chunk, self._chunk = self._chunk, None
            self._sealing.append((self._extend(1), chunk, transfers().submit(self._seal_chunk, chunk)))
        elif ends:
            ends.insert(0, 0)
        if len(ends) > 1:
            self._write_chunks([view[begin:end] for begin, end in itertools.pairwise(ends)])
        rest = view[ends[-1] :] if ends else view
        if len(rest):
            self._append(rest)

    def finish(self) -> list[Row]:
        if self._chunk is not None:
            # Sealed on this thread, because a thread costs more than hashing a small file.
            slot = self._seal_chunk(self._chunk)
            self._chunk = None
            self._note(self._extend(1), slot)
        self._collect()
        self._ahead.end()
        return [row for row in self._rows if row is not None]

    def abort(self) -> None:
        self._ahead.end()
        unsealed = [] if self._chunk is None else [self._chunk.slot]
        self._chunk = None
        for _, chunk, future in self._sealing:
            error = future.exception()
            unsealed.append(chunk.slot if error is not None else future.result())
        self._sealing.clear()
        for slot in [*unsealed, *self._slots]:
            if slot is not None:
                self._writer.drop(slot)
        self._slots = []

    def _write_chunks(self, pieces: list[memoryview]) -> None:
        """Copy, hash and seal whole chunks: as many at once as there is room for, then one by one as room comes."""
        first = self._extend(len(pieces))

        def write_one(number: int) -> None:
            with contextlib.suppress(CapacityError):
                self._fill(first + number, self._writer.begin_chunk(len(pieces[number]), timeout_s=0), pieces[number])

        processors().share_out(write_one, range(len(pieces)))
        for number, piece in enumerate(pieces):
            if self._rows[first + number] is None:
                self._fill(first + number, self._begin(len(piece)), piece)

    def _fill(self, index: int, chunk: ChunkBuffer, piece: memoryview) -> None:
        try:
            chunk.fill(piece)
            self._note(index, self._seal_chunk(chunk))
        except BaseException:
            if self._slots[index] is None:
                self._writer.drop(chunk.slot)
            raise

    def _append(self, piece: memoryview) -> None:
        """Copy bytes into the chunk being filled. A file's first slot starts small, because most files are small."""
        chunk, self._chunk = self._chunk, None
        kept = b""
        if chunk is not None and chunk.room < len(piece):
            kept = bytes(chunk.view[: chunk.filled])
            self._writer.drop(chunk.slot)  # before reserving a larger one: there may be no room for both
            chunk = None
        if chunk is None:
            chunk = self._begin(None if self._rows else _slot_bytes(len(kept) + len(piece)))
        self._chunk = chunk
        chunk.append(memoryview(kept))
        chunk.append(piece)

    def _begin(self, length: int | None = None) -> ChunkBuffer:
        """Reserve room for a chunk: in the ram tier, or on the disk if this file's own chunks may take the room there."""
        begin, timeout_s = self._writer.begin_chunk, self._timeout_s
        self._taken_bytes += length or CHUNK_BYTES
        if not self._sealing and not any(self._slots):
            return begin(length, timeout_s=timeout_s)
        if self._is_large or self._taken_bytes > self._large_bytes:
            return begin(length, timeout_s=0, overflows=True)
        try:
            return begin(length, timeout_s=WAITS_S if timeout_s is None else min(timeout_s, WAITS_S))
        except CapacityError:
            self._is_large = True
            return self._begin(length)

    def _seal_chunk(self, chunk: ChunkBuffer) -> Slot:
        slot = self._writer.seal_chunk(chunk)
        self._ahead.add(slot)
        return slot

    def _collect(self) -> None:
        """Wait for the chunks that are being sealed."""
        while self._sealing:
            index, _, future = self._sealing[0]
            slot = future.result()
            self._sealing.popleft()
            self._note(index, slot)

    def _extend(self, count: int) -> int:
        """Add entries for this many chunks to the tables. Return the index of the first."""
        first = len(self._rows)
        self._rows += [None] * count
        self._slots += [None] * count
        return first

    def _note(self, index: int, slot: Slot) -> None:
        self._slots[index] = slot
        self._rows[index] = Row(ChunkName(slot.name[1:]), slot.length, 0)


def _slot_bytes(length: int) -> int:
    """Return the slot size for a first piece: the next power of two, from 64 KiB to a chunk. More bytes may follow."""
    return min(max(SLOT_BYTES_MIN, 1 << (length - 1).bit_length()), CHUNK_BYTES)
