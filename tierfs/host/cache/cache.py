"""Clean copies of chunks in the host's own tiers: kept from what was read or prefetched, dropped when asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import CorruptionError, TierfsError
from tierfs.format.ranges import WHOLE_SHARE, Part, block_runs
from tierfs.host.cache.backfill import Backfill
from tierfs.host.cache.reader import ChunkReader
from tierfs.host.counters import Counters
from tierfs.host.name_locks import NameLocks
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Slot, SlotKind, SlotState
from tierfs.host.write.chunk_buffer import ChunkBuffer
from tierfs.host.write.writer import NAMES_MAX, SlabWriter
from tierfs.processors import processors

__all__ = ["ChunkCache"]


class ChunkCache:
    """The local tiers as a cache of the object tier. Safe for use by many threads.

    Args:
        ram: The ram tier.
        reader: Reads chunks that are here.
        writer: Puts chunks into slabs.
        flusher: How to reach the flusher.
        counters: Where it is counted that there was no room.
        kind: The store's digests.
        has_nvme: Whether the nvme tier is on.
        keeps_reads: Whether chunks that were read from the object tier are kept.
        shares_reads: Whether they are about to be wanted again, perhaps by other processes of this host. Then each is kept until
            the ram tier's budget is used up. Otherwise each takes the place of one before it soon, since new memory takes longer
            than a copy.

    Attributes:
        keeps_reads: As given; may be changed.
        shares_reads: As given; may be changed.
    """

    def __init__(
        self,
        ram: RamTier,
        reader: ChunkReader,
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
        self._reader = reader
        self._writer = writer
        self._flusher = flusher
        self._counters = counters
        self._kind = kind
        self._has_nvme = has_nvme
        self._fetching = NameLocks(ram.host.store_directory(ram.store) / "fetch.lock")
        self._backfill = Backfill(self.backfill)

    def __repr__(self) -> str:
        return f"ChunkCache({self._ram!r}, keeps_reads={self.keeps_reads}, {self._backfill!r}, {self._fetching!r})"

    def read_through(
        self,
        name: bytes,
        raw_length: int,
        parts: Sequence[Part],
        fetch: Callable[[Sequence[Part]], Sequence[bytes]],
        *,
        flight: bytes | None = None,
        share: float = WHOLE_SHARE,
    ) -> None:
        """Copy verified bytes of a chunk to where they are wanted: from the object tier where no local one has a good copy.

        What is fetched then is kept here. A chunk of which ``share`` or more is wanted is fetched whole, and once for all
        threads and processes of the host that want it meanwhile. Where that finds damage, what is
        wanted is fetched alone, and not kept.

        Args:
            name: As for `ChunkReader.read`; so are ``raw_length`` and ``parts``.
            raw_length: See there.
            parts: See there.
            fetch: Fills such parts with verified bytes from the object tier, and returns the digests of the blocks that it
                touched, or nothing where there are none. Its errors are passed on. It may read through others, as long as
                those never lead back to this ``flight``.
            flight: Names what is fetched, for those who want it at once; ``name`` by default.
            share: From which part of the chunk on it is fetched whole.
        """
        if self._reader.read(name, raw_length, parts) is not None:
            return
        least = (raw_length - BLOCK_BYTES) * share
        # Several are counted by what is fetched for them: whole blocks.
        wanted = len(parts[0][1]) if len(parts) == 1 else sum(map(len, block_runs(parts))) * BLOCK_BYTES
        if not self.keeps_reads or wanted < least:
            fetch(parts)
            return
        with self._fetching.single_flight(flight or name):
            # Somebody may have fetched it since the first look, whether or not that had to be waited for.
            if self._reader.holds(name, "ram") and self._reader.read(name, raw_length, parts) is not None:
                return
            if len(parts) == 1 and len(parts[0][1]) == raw_length:
                self.insert(name, parts[0][1], fetch(parts))
                return
            with buffers().lend(raw_length) as whole:
                try:
                    digests = fetch([(0, whole)])
                except CorruptionError as error:
                    if wanted >= raw_length:
                        raise
                    text = "a chunk is damaged, perhaps where nobody wants it: what is wanted is read alone, and not kept: %s"
                    self._counters.fall_back("damaged_chunks_read_in_part", text, error)
                    fetch(parts)
                    return
                for start, out in parts:
                    out[:] = whole[start : start + len(out)]
                self.insert(name, whole, digests)

    def insert(self, name: bytes, data: memoryview, digests: Sequence[bytes] = ()) -> Slot | None:
        """Keep a clean copy of a chunk in the ram tier, if there is room without waiting. See `ChunkBuffer.fill`.

        Where a flusher runs, it is had to copy it to the nvme tier as well; none is started for that.
        """
        # Slots that only wait to be filled would have the ram tier make room for them all.
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
        """Have the flusher copy clean chunks to the nvme tier, if that is on. Raises as `SlabWriter.ask_about` does."""
        if self._has_nvme:
            self._writer.ask_about("backfill", slots)

    def evict(self, names: Sequence[bytes] | None, tier: str) -> int:
        """Drop clean copies of these chunks, or of all, from ``"ram"`` or ``"nvme"``. Returns the bytes dropped."""
        return self._evict_nvme(names) if tier == "nvme" else self._evict_ram(names)

    def close(self) -> None:
        """Wait for nobody's fetch any more."""
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
