"""The host's ram tier as one process sees it, for one store.

Each process writes into segments of its own, and evicts from those only. Before it makes another it sees to it, under
the host's lock, that the segments of all processes and stores stay within the budget. It finds what others wrote
in their segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tierfs.clock import Clock
from tierfs.errors import CapacityError
from tierfs.host.host import Host
from tierfs.host.slab.abandoned import remove_gone
from tierfs.host.slab.budget import LOCK, RamBudget
from tierfs.host.slab.growth import CHUNKS_BUDGET_BYTES, largest
from tierfs.host.slab.peers import PeerSegments
from tierfs.host.slab.pool import SegmentPool, give_back
from tierfs.host.slab.segment import Segment, Slot, SlotKind, SlotState
from tierfs.host.slab.table.table import Layout, padded
from tierfs.units import format_bytes

__all__ = ["RamTier", "RamUsage"]

HOLDERS_NAMED = 3


@dataclass(frozen=True, slots=True)
class RamUsage:
    """What the ram tier holds, in bytes.

    Attributes:
        budget_bytes: What all segments of the host may take.
        host_bytes: What they take, of all processes and stores.
        store_bytes: What those of this store take, as far as this process has them.
        used_bytes: What is taken in these.
        dirty_bytes: Of that, what no other tier is known to have.
        clean_bytes: Of that, what may go.
        segments: How many of this store there are.
        disk_segments: How many of them are files in the state directory, because shared memory is too small.
        waits: How often this process waited for room.
        waited_s: For how long in all.
        evicted_bytes: What this process evicted.
    """

    budget_bytes: int
    host_bytes: int
    store_bytes: int
    used_bytes: int
    dirty_bytes: int
    clean_bytes: int
    segments: int
    disk_segments: int
    waits: int
    waited_s: float
    evicted_bytes: int


class RamTier:
    """Segments of this process, and those of others. Safe for use by many threads.

    Args:
        host: Where segments are.
        store: The uuid of the store.
        budget_bytes: What all segments of the host may take together.
        clock: For waiting.
        segment_bytes_max: The most data that one segment holds.

    Attributes:
        host: As given.
        store: The uuid, 32 hex digits.
        budget_bytes: As given.
        chunks_budget_bytes: The least budget for files of any length.
    """

    chunks_budget_bytes = CHUNKS_BUDGET_BYTES

    def __init__(
        self, host: Host, store: str, *, budget_bytes: int, clock: Clock, segment_bytes_max: int = 1 << 30
    ) -> None:
        self.host = host
        self.store = store.replace("-", "")
        self.budget_bytes = budget_bytes
        self._clock = clock
        self._length_max = largest(budget_bytes, segment_bytes_max)
        self._ram_budget = RamBudget(host)
        remove_gone(self._ram_budget.directory)
        self._pool = SegmentPool(
            host,
            self.store,
            self._ram_budget,
            budget_bytes=budget_bytes,
            data_bytes_max=segment_bytes_max,
            clock=clock,
        )
        pool = self._pool  # no reference to ourselves, so that what nobody uses any more is closed at once
        self._peers = PeerSegments(self._ram_budget, self.store, lambda: pool.own)

    def __repr__(self) -> str:
        budget = format_bytes(self.budget_bytes)
        return f"RamTier({str(self._ram_budget.directory)!r}, store={self.store}, budget={budget}, {self._pool!r})"

    @property
    def holds_chunks(self) -> bool:
        """Whether the budget is enough for files of any length: for a whole chunk, and what comes with it."""
        return self.budget_bytes >= self.chunks_budget_bytes

    def take(
        self,
        kind: SlotKind,
        length: int,
        *,
        timeout_s: float | None,
        on_wait: Callable[[], None] | None = None,
        spares_copies: bool = False,
    ) -> Slot:
        """Take a slot in a segment of this process, to be filled and sealed or given back there.

        Args:
            kind: What it will hold.
            length: Of that, in bytes.
            timeout_s: How long to wait for room while everything is dirty; None for as long as it takes.
            on_wait: Called once when it comes to that.
            spares_copies: Evict clean copies only when the budget is (all but) used up: for what is one of them. What is written rather
                takes the place of what was written before, in memory that is warm.

        Raises:
            CapacityError: There was no room in that time; or there never will be, which is said at once.
            InvalidInputError: The tier was closed.
        """
        ((slot,),) = self.take_runs(kind, [[length]], timeout_s=timeout_s, on_wait=on_wait, spares_copies=spares_copies)
        return slot

    def take_runs(
        self,
        kind: SlotKind,
        runs: Sequence[Sequence[int]],
        *,
        timeout_s: float | None,
        on_wait: Callable[[], None] | None = None,
        spares_copies: bool = False,
    ) -> list[list[Slot]]:
        """Take runs: slots that lie side by side in one segment, each from a whole page on. All of them or none; see `take`."""
        longest = max((sum(map(padded, lengths)) for lengths in runs), default=0)
        if longest > self._length_max:
            raise CapacityError(
                f"{format_bytes(longest)} are more than the ram tier can hold in one piece "
                f"({format_bytes(self._length_max)}): raise ram= (TIERFS_RAM) from {format_bytes(self.budget_bytes)} to "
                f"{format_bytes(Layout.for_data(longest).size)} at least",
                tier="ram",
            )
        started = self._clock.monotonic()
        found = self._pool.take(kind, runs, timeout_s=timeout_s, on_wait=on_wait, spares_copies=spares_copies)
        taken = [slots for slots in found if slots is not None]
        if len(taken) < len(runs):
            give_back(taken)
            missing = next(lengths for lengths, slots in zip(runs, found, strict=True) if slots is None)
            raise self._full(sum(map(padded, missing)), timeout_s, self._clock.monotonic() - started)
        return taken

    def grow_ahead(self) -> None:
        """Begin to get memory for a second save like the last one: see `SegmentPool.grow_ahead`."""
        self._pool.grow_ahead()

    def evict_ahead(self) -> None:
        """Evict copies that are older than what was saved last, until there is room for a save like it."""
        self._pool.evict_ahead()

    def own_segments(self) -> list[Segment]:
        """The segments that this process writes into."""
        return list(self._pool.own)

    def removed_segments(self) -> list[Segment]:
        """Those whose file somebody removed while something in them is needed: no process finds it that did not have it open."""
        return self._pool.removed()

    def give_back_claimed(self) -> int:
        """Give back the segments of this process that others claimed while they waited for room: see `RamBudget.claim`.

        Happens with every `take` that needs room; a process that takes nothing for long does it from time to time.

        Returns:
            Bytes given back. What is dirty cannot be: nothing more is put beside it, and it goes at a later call. Where there is
            something dirty in a segment, what is not goes alone.
        """
        return self._pool.give_back_claimed()

    def segments(self) -> list[Segment]:
        """All segments of this store on this host: our own first."""
        return [*self._pool.own, *self._peers.segments()]

    def unread(self) -> frozenset[str]:
        """Names of this store's segments that could not be opened just now. What is in them, nobody may count as absent."""
        self._peers.segments()
        return self._peers.unread

    def damaged(self) -> dict[str, Exception]:
        """What is wrong with each file that has the name of one of this store's segments and is none, by name."""
        self._peers.segments()
        return self._peers.damaged

    def is_blind(self) -> bool:
        """Whether there may be drafts in this store's segments that nobody can see, `unread` or `damaged`: they may need anything."""
        return bool(self.unread() or self.damaged())

    @property
    def why_unread(self) -> BaseException | None:
        """What came up when the last of them was opened."""
        return self._peers.why_unread

    def segment(self, ident: str) -> Segment | None:
        """The segment with this id."""
        return next((segment for segment in self.segments() if segment.id == ident), None)

    def find(self, name: bytes) -> Slot | None:
        """A chunk of this name, in our own segments or in others'."""
        for segment in self.segments():
            slot = segment.find(name)
            if slot is not None:
                return slot
        return None

    def drafts(self, states: Collection[SlotState] = (SlotState.SEALED,)) -> list[Slot]:
        """The drafts in these states, as they were sealed."""
        found = [slot for segment in self.segments() for slot in segment.slots(kind=SlotKind.DRAFT, states=states)]
        return sorted(found, key=lambda slot: (slot.stamp_ns, slot.segment.id, slot.serial))

    def reclaim(self, needed: Callable[[Segment], Collection[int]]) -> int:
        """Free what dead processes left unsealed, or sealed without a draft that needs it. For the flusher.

        Args:
            needed: Says which slots (indices) of chunks in a segment are needed. Asked when its owner is dead, so no
                draft comes to be after that.

        Returns:
            Bytes freed.
        """
        freed = 0
        for segment in self.segments():
            if segment.owned or self.host.is_alive(segment.owner):
                continue
            kept = needed(segment)
            with self.host.locked(LOCK):
                if self.host.is_alive(segment.owner):
                    continue  # adopted meanwhile
                freed += segment.free_unneeded(kept)
                # What is clean in a segment whose file was removed is of no use to others; and who released one in good
                # order has left only what had to be flushed.
                left = segment.is_removed() or not int(segment.owner, 16)
                if not any(segment.sums()) or (left and not segment.is_dirty()):
                    self._peers.drop(segment)
        return freed

    def reap(self) -> int:
        """Give back the memory that dead processes left and that only holds copies. Returns the bytes of these."""
        freed = 0
        for segment in self._peers.segments():
            with self.host.locked(LOCK):
                if not self.host.is_alive(segment.owner) and not segment.is_dirty():
                    copies = segment.slots(kind=SlotKind.CHUNK, states=(SlotState.CLEAN,))
                    freed += sum(slot.length for slot in copies if not slot.hidden)
                    self._peers.drop(segment)
        return freed

    def usage(self) -> RamUsage:
        """What the tier holds now."""
        segments = self.segments()
        sums = [segment.sums() for segment in segments]
        dirty, clean = sum(item.dirty for item in sums), sum(item.clean for item in sums)
        return RamUsage(
            budget_bytes=self.budget_bytes,
            host_bytes=sum(file.size for file in self._ram_budget.files()),
            store_bytes=sum(segment.memory_bytes for segment in segments),
            used_bytes=dirty + clean + sum(item.filling for item in sums),
            dirty_bytes=dirty,
            clean_bytes=clean,
            segments=len(segments),
            disk_segments=sum(segment.path.parent == self.host.fallback for segment in segments),
            waits=self._pool.waits,
            waited_s=self._pool.waited_s,
            evicted_bytes=self._pool.eviction.bytes,
        )

    def close(self) -> None:
        """Release everything. Of own segments those stay in which something is dirty, until it is flushed."""
        self._pool.close()
        self._peers.close()

    def holders(self) -> str:
        """What the segments of this host take of the budget, and which stores (their uuids) have most of it. For people."""
        files = self._ram_budget.files()
        sizes: Counter[str] = Counter()
        for file in files:
            sizes[file.name.store] += file.size
        stores = ", ".join(
            f"{format_bytes(size)} of store {store}..." for store, size in sizes.most_common(HOLDERS_NAMED)
        )
        taken = f"the segments of this host take {format_bytes(sizes.total())} of {format_bytes(self.budget_bytes)}"
        return f"{taken} ({stores})" if stores else taken

    def _full(self, length: int, timeout_s: float | None, waited_s: float) -> CapacityError:
        what = f"no room for {format_bytes(length)} in the ram tier"
        why = f"; {self._pool.why_not}" if self._pool.why_not else ""
        dirty = format_bytes(self.usage().dirty_bytes)
        if timeout_s is not None and waited_s >= timeout_s:
            text = (
                f"{what} within {timeout_s:g} s: {self.holders()}, and of this store {dirty} are dirty, waiting for the flusher; "
                f"raise ram= (TIERFS_RAM), or wait longer{why}"
            )
        else:
            text = f"{what}, and none will come by waiting: {self.holders()}; raise ram= (TIERFS_RAM){why}"
        return CapacityError(text, tier="ram")
