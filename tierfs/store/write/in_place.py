"""A file that is written in place, in any order and on any thread, before it has a name.

Its memory is in slots of slabs if the store has local tiers, so that saving it needs no copy. Otherwise the memory is
private.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierfs._fork import PerProcess
from tierfs.codec.layout.safetensors import HeaderEntry
from tierfs.errors import StoreError, TierfsError
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import SlotRef
from tierfs.store.chunks import replaced_chunks, store_chunk
from tierfs.store.encode.pipeline import Pressure
from tierfs.store.encode.tensors import ChunkContext, group_of, layout_of, places
from tierfs.store.store import Store
from tierfs.store.write.writer import Writer
from tierfs.threads import processors, start_daemon, transfers

if TYPE_CHECKING:
    from tierfs.host.slab.segment import Segment, Slot
    from tierfs.host.write.ahead import Ahead
    from tierfs.host.write.writer import ChunkBuffer

_logger = logging.getLogger("tierfs.store")


class Run:
    """Chunks that follow each other in the file and are adjacent in memory.

    Args:
        view: The memory of all chunks, writable until the run is sealed.
        lengths: The length of each chunk in bytes. They add up to that of ``view``.
        buffers: The chunks in slabs; none without local tiers.

    Attributes:
        address: Of its first byte in this process.
        entries: What lies in it, in the order of offsets. For the caller.
    """

    def __init__(self, view: memoryview, lengths: Sequence[int], buffers: Sequence[ChunkBuffer] = ()) -> None:
        self.view = view
        self.address = int(np.frombuffer(view, np.uint8).ctypes.data)
        self.entries: Sequence[HeaderEntry] = ()
        self._begins: list[int] = []
        self._buffers = buffers
        self._lengths = lengths
        self._rows: list[Row | None] = [None] * len(lengths)
        self._slots: list[SlotRef | None] = [None] * len(lengths)  # set when a chunk is sealed

    def chunks(self) -> list[memoryview]:
        """Return the memory of each chunk."""
        ends = itertools.accumulate(self._lengths)
        return [self.view[end - length : end] for end, length in zip(ends, self._lengths, strict=True)]

    def find(self, inside: int) -> HeaderEntry:
        """Return the entry at an offset in the run, in bytes, or else the last one before it."""
        if not self._begins:
            self._begins = [entry.at for entry in self.entries]
        return self.entries[bisect_right(self._begins, inside) - 1]

    def digests(self) -> list[bytes]:
        """Return the digests of the chunks in order. A chunk that is not sealed has an empty one."""
        return [row.name.digest if row is not None else b"" for row in self._rows]


class StagedFile:
    """A file that is written in place. For one thread, except that any thread may write into the runs' memory.

    `abort` releases the memory that is not committed. If the file is garbage collected, another thread releases it soon
    after.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = store.tiers.writer if store.tiers is not None else None
        if self._writer is not None:
            _dropped().begin()
        self._taken: list[Slot] = []
        self._watch()

    def _watch(self) -> None:
        """Release the slots when the file is garbage collected."""
        self._finalizer = weakref.finalize(self, _dropped().put, self._taken)
        self._finalizer.atexit = False

    def add_runs(
        self, runs: Sequence[Sequence[int]], *, wait: bool = True, share_bytes: int | None = None
    ) -> list[Run]:
        """Reserve memory for runs of chunks.

        Args:
            runs: For each run, the lengths of its chunks in bytes, each from 1 byte to 16 MiB. All but a run's last are
                multiples of 4096.
            wait: Whether to wait for room, up to the store's ``timeout_s``. Runs that find none go to the disk of the
                state directory. Without it, they do not.
            share_bytes: See `SlabWriter.begin_runs`.

        Raises:
            CapacityError: There is no room. Nothing was reserved.
        """
        if self._writer is None:
            return [Run(np.empty(sum(lengths), np.uint8).data, lengths) for lengths in runs]
        found = []
        timeout_s = self._store.timeout_s if wait else 0
        begun = self._writer.begin_runs(runs, timeout_s=timeout_s, overflows=wait, share_bytes=share_bytes)
        for lengths, buffers in zip(runs, begun, strict=True):
            slots = [buffer.slot for buffer in buffers]
            self._taken += slots
            found.append(Run(slots[0].segment.view(slots[0], slots[-1]), lengths, buffers))
        return found

    def segments(self) -> set[Segment]:
        """Return the segments that hold the runs. Empty if the memory is private."""
        return {slot.segment for slot in self._taken}

    def seal(self, runs: Sequence[Run], *, threads_max: int | None = None) -> None:
        """Hash and seal the chunks of these runs, on one thread per processor or on at most ``threads_max``.

        The flusher may write the chunks to the nvme tier from now on.

        Without local tiers this does nothing. `commit` does the work, because a chunk's encoding depends on the chunks
        before it.
        """
        if self._writer is None:
            return
        if not self._finalizer.alive:
            raise self._gone(self._store.where(""))
        waiting = [(run, at) for run in runs for at, row in enumerate(run._rows) if row is None]
        # Not earlier: training waits for the copy into the runs, but not for this.
        self._writer.expect()
        ahead = self._writer.ahead()
        try:
            processors().share_out(partial(self._seal_chunk, ahead=ahead), waiting, threads_max=threads_max)
        finally:
            ahead.end()

    def _put(self, path: str, views: Sequence[memoryview], pressure: Pressure) -> list[Row]:
        """Put chunks into the object tier. The file's own table of tensors tells how to encode each chunk."""
        lengths, group = list(map(len, views)), group_of(path)
        save = self._store.encoder.count_save(group)
        layout = layout_of(partial(_read_from, views), sum(lengths))
        unread = replaced_chunks(self._store, path)
        contexts = [ChunkContext(tensors, save, unread=unread) for _, tensors in places(layout, lengths, group)]

        def put(number: int) -> Row:
            return store_chunk(self._store, views[number], contexts[number], pressure=pressure)

        return list(transfers().map(put, range(len(views))))

    def _seal_chunk(self, chunk: tuple[Run, int], ahead: Ahead) -> None:
        assert self._writer is not None
        run, at = chunk
        run._buffers[at].accept()
        slot = self._writer.seal_chunk(run._buffers[at])
        run._slots[at], run._rows[at] = SlotRef.of(slot), Row(ChunkName(slot.name[1:]), slot.length, 0)
        ahead.add(slot)

    def _gone(self, what: str) -> StoreError:
        return StoreError(f"{what}: the staged data was already saved or discarded: stage it again")

    def commit(
        self,
        path: str,
        runs: Sequence[Run],
        *,
        level: Level | None = None,
        metadata: Mapping[str, object] | None = None,
        is_new: bool = False,
    ) -> Manifest:
        """Publish these runs, in this order, as the file at ``path``. Release the memory of all other runs.

        With local tiers, the runs must be sealed. See `Writer` for the other arguments.

        Raises:
            StoreError: The file was committed or aborted before, or another thread is committing it.
            ReadOnlyError: There are no local tiers, and the object tier is read-only.
            ConflictError, CapacityError, TimeoutError: See `Writer.commit`.
        """
        if self._finalizer.detach() is None:
            raise self._gone(self._store.where(path))
        writer: Writer | None = None
        try:
            slots = [slot for run in runs for slot in run._slots]
            if self._writer is None:
                is_awaited = (self._store.ack if level is None else level) is Level.OBJECT
                chunks = [chunk for run in runs for chunk in run.chunks()]
                rows = self._put(path, chunks, "caller" if is_awaited else "none")
            else:
                rows = [row for run in runs for row in run._rows if row is not None]
            assert len(rows) == len(slots), "not sealed"
            staged = self._writer is not None
            writer = Writer(self._store, path, metadata=metadata, level=level, staged=staged, is_new=is_new)
            writer.adopt(rows, slots)
            return writer.commit()
        finally:
            if writer is not None and writer.is_done:
                # The committed slots belong to the draft now.
                kept = set(slots)
                self._taken[:] = [slot for slot in self._taken if SlotRef.of(slot) not in kept]
                _give_back(self._taken)
            else:
                self._watch()

    def abort(self) -> None:
        """Release all memory that is not committed. May be called twice.

        Does nothing to a file that is committed, or that another thread is committing.
        """
        if self._finalizer.detach() is not None:
            _give_back(self._taken)


def _read_from(views: Sequence[memoryview], start: int, out: memoryview) -> None:
    """Fill ``out`` from offset ``start`` of the concatenation of these views."""
    at = 0
    for view in views:
        piece = view[max(0, start) :][: len(out) - at]
        out[at : at + len(piece)] = piece
        at, start = at + len(piece), start - len(view)


class _Dropped:
    """Releases the slots of files that were garbage collected, on a thread that holds no lock.

    Garbage collection can run at any point, also on a thread that holds the lock of a segment. So a finalizer must not
    release slots itself.
    """

    def __init__(self) -> None:
        self._is_running = False
        self._lock = threading.Lock()
        self._slots: queue.SimpleQueue[list[Slot]] = queue.SimpleQueue()

    def begin(self) -> None:
        """Start the thread unless it runs."""
        with self._lock:
            if not self._is_running:
                self._is_running = start_daemon(_give_back_all, self._slots, name="dropped") is not None

    def put(self, taken: list[Slot]) -> None:
        """Queue slots for release. Takes no lock that the interrupted thread may hold."""
        self._slots.put(taken)


def _give_back_all(dropped: queue.SimpleQueue[list[Slot]]) -> None:
    while True:
        _try_to_give_back(dropped.get())


def _try_to_give_back(taken: list[Slot]) -> None:
    try:
        _give_back(taken)
    except (OSError, TierfsError) as error:
        _logger.warning("unused room in the ram tier stays reserved until this process ends: %s", error)


def _give_back(taken: list[Slot]) -> None:
    for slot in taken:
        if slot.segment.owned:  # false in a forked child
            slot.segment.give(slot)
    taken.clear()


_dropped = PerProcess(_Dropped)
