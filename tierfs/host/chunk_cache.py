"""Clean copies of chunks in the host's local tiers: kept after a read or prefetch, dropped on request."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import CorruptionError, TierfsError
from tierfs.format.envelope import WHOLE_SHARE, Part, count_blocks
from tierfs.host.chunk_sources import ChunkRequest, ChunkSources
from tierfs.host.events import Counters
from tierfs.host.name_locks import NameLocks
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Slot
from tierfs.host.slab.table import SlotKind, SlotState
from tierfs.host.write.writer import NAMES_MAX, ChunkBuffer, SlabWriter
from tierfs.threads import processors, start_daemon

QUEUE_MAX = 256
BATCH_MAX = 64
# A file is read chunk by chunk, so a request for one would soon be followed by another. Nobody waits for the copies.
GATHER_S = 0.02
_logger = logging.getLogger("tierfs.flush")


class ChunkCache:
    """The local tiers as a cache of the object tier. Thread-safe.

    Attributes:
        keeps_reads: Whether to keep chunks that were read from the object tier. May be changed.
        shares_reads: Whether the chunks will be read again soon, perhaps by other processes of this host. If so, each
            is kept until the ram tier's budget is used up. If not, a chunk soon replaces an earlier one, because new
            memory takes longer than a copy. May be changed.
    """

    def __init__(
        self,
        ram: RamTier,
        sources: ChunkSources,
        writer: SlabWriter,
        flusher: FlusherClient,
        counters: Counters,
        *,
        kind: DigestKind,
        has_nvme: bool,
        keeps_reads: bool,
        shares_reads: bool = False,
    ) -> None:
        self.keeps_reads = keeps_reads
        self.shares_reads = shares_reads
        self._ram = ram
        self._sources = sources
        self._writer = writer
        self._flusher = flusher
        self._counters = counters
        self._kind = kind
        self._has_nvme = has_nvme
        self._fetching = NameLocks(ram.host.store_directory(ram.store) / "fetch.lock")
        self._backfill = Backfill(self.backfill)

    def read_through(
        self,
        chunk: ChunkRequest,
        parts: Sequence[Part],
        fetch: Callable[[Sequence[Part]], Sequence[bytes]],
        *,
        flight: bytes | None = None,
        share: float = WHOLE_SHARE,
    ) -> None:
        """Fill ``parts`` with verified bytes of a chunk that no tier of this host has a good copy of.

        If ``share`` or more of the chunk is wanted, all of it is fetched and kept, once for all threads and processes
        of the host that want it meanwhile. If that finds damage, only the wanted parts are fetched, and not kept.

        Args:
            parts: The wanted parts.
            fetch: Fills such parts with verified bytes from the object tier. Returns the digests of the blocks that it
                touched, or nothing if there are none. Its errors are passed on. It may read other chunks through the
                cache, as long as these never lead back to this ``flight``.
            flight: Name of the fetch among concurrent readers; by default the chunk's.
            share: Smallest wanted fraction of the chunk for which all of it is fetched.
        """
        least = (chunk.length - BLOCK_BYTES) * share
        # Several parts count with the whole blocks that are fetched for them.
        wanted = len(parts[0][1]) if len(parts) == 1 else count_blocks(parts) * BLOCK_BYTES
        if not self.keeps_reads or wanted < least:
            fetch(parts)
            return
        with self._fetching.single_flight(flight or chunk.name):
            # Another thread or process may have fetched it since the first look, even if the lock was free.
            if self._sources.holds(chunk.name, "ram") and self._sources.read(chunk, parts, is_here=True):
                return
            if len(parts) == 1 and len(parts[0][1]) == chunk.length:
                self.insert(chunk.name, parts[0][1], fetch(parts))
                return
            with buffers().lend(chunk.length) as whole:
                try:
                    digests = fetch([(0, whole)])
                except CorruptionError as error:
                    if wanted >= chunk.length:
                        raise
                    text = "a chunk is damaged, perhaps outside the requested range, which alone is read, uncached: %s"
                    self._counters.fall_back("damaged_chunks_read_in_part", text, error)
                    fetch(parts)
                    return
                for start, out in parts:
                    out[:] = whole[start : start + len(out)]
                self.insert(chunk.name, whole, digests)

    def insert(self, name: bytes, data: memoryview, digests: Sequence[bytes] = ()) -> Slot | None:
        """Keep a clean copy of a chunk in the ram tier, if there is room without waiting. See `ChunkBuffer.fill`.

        If a flusher runs, it is asked to copy the chunk to the nvme tier as well. None is started for that.
        Returns None if there was no room.
        """
        # Take a place before allocating: slots that only wait to be filled would make the ram tier find room for all.
        with processors().place():
            try:
                slot = self._ram.take(SlotKind.CHUNK, len(data), timeout_s=0, spares_copies=self.shares_reads)
            except TierfsError:
                self._counters["ram_insert_refused"] += 1
                return None
            chunk = ChunkBuffer(slot, slot.segment.view(slot), self._kind)
            try:
                with processors().turn():
                    chunk.fill(data, digests)
                    slot = self._writer.seal_chunk(chunk, state=SlotState.CLEAN, name=name)
            except BaseException:
                self._writer.drop(slot)
                raise
        if self._has_nvme and self._flusher.is_running():
            self._backfill.add(slot)
        return slot

    def backfill(self, slots: Sequence[Slot]) -> None:
        """Ask the flusher to copy clean chunks to the nvme tier, if that is on. Raises as `SlabWriter.ask_about`."""
        if self._has_nvme:
            self._writer.ask_about("backfill", slots)

    def evict(self, names: Sequence[bytes] | None, tier: str) -> int:
        """Drop clean copies of these chunks, or of all, from ``"ram"`` or ``"nvme"``. Return the bytes dropped.

        In the ram tier this hides the copies, so that their memory is reused before that of others. If all are dropped,
        segments of dead processes without dirty data are removed as well.
        """
        return self._evict_nvme(names) if tier == "nvme" else self._evict_ram(names)

    def close(self) -> None:
        self._fetching.close()

    def _evict_nvme(self, names: Sequence[bytes] | None) -> int:
        if not self._has_nvme:
            return 0
        if names is None:
            return int(self._flusher.request("evict", {"names": None})["bytes"])
        batches = [names[at : at + NAMES_MAX] for at in range(0, len(names), NAMES_MAX)]
        answers = [self._flusher.request("evict", {"names": [name.hex() for name in batch]}) for batch in batches]
        return sum(int(answer["bytes"]) for answer in answers)

    def _evict_ram(self, names: Sequence[bytes] | None) -> int:
        wanted = None if names is None else set(names)
        dropped = self._ram.reap() if names is None else 0
        for segment in self._ram.segments():
            for slot in segment.slots(kind=SlotKind.CHUNK, states=(SlotState.CLEAN,)):
                if not slot.hidden and (wanted is None or slot.name in wanted):
                    segment.hide(slot)
                    dropped += slot.length
        return dropped


class Backfill:
    """A queue of clean chunks in slabs, and a thread that calls ``keep`` with them while there are any.

    ``keep`` asks the flusher to copy them to the nvme tier. Only a cache is filled: if the thread cannot keep
    up, the oldest queued chunks are dropped.
    """

    def __init__(self, keep: Callable[[Sequence[Slot]], None]) -> None:
        self._keep = keep
        self.failures = 0
        self._lock = threading.Lock()
        self._queue: deque[Slot] = deque(maxlen=QUEUE_MAX)
        self._running = False

    def add(self, slot: Slot) -> None:
        with self._lock:
            self._queue.append(slot)
            if not self._running:
                self._running = start_daemon(self._run, name="backfill") is not None

    def _run(self) -> None:
        while True:
            time.sleep(GATHER_S)
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]
                if not batch:
                    self._running = False
                    return
            try:
                self._keep(batch)
            except (TierfsError, TimeoutError) as error:
                self.failures += 1
                if self.failures == 1:
                    _logger.warning("chunks that were read are not copied to the nvme tier: %s", error)
