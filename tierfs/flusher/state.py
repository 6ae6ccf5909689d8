"""The state that a flusher's parts share: the tiers, the queue of drafts, the lock, and the handling of errors.

No thread holds the lock while it moves bytes. A thread that changes a draft's entry holds the lock and notifies the
others.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tierfs.clock import Clock
from tierfs.digest import CHUNK_BYTES, DigestKind
from tierfs.errors import StoreError, TierfsError
from tierfs.flusher.access import Access, Connect
from tierfs.flusher.priority import Priority
from tierfs.flusher.queue import FlushItem, FlushQueue
from tierfs.format.manifest import Manifest
from tierfs.host.chunk_sources import ChunkSources, ChunkTier, FileChunks, RamChunks, slot_at
from tierfs.host.events import Faults
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import Draft, SlotRef
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Slot
from tierfs.host.slab.table import SlotState

if TYPE_CHECKING:
    from tierfs.flusher.exchange import DraftExchange
    from tierfs.store.encode.pipeline import Pressure

RETRY_S_MIN = 0.25
RETRY_S_MAX = 30.0
# How long writing drafts to the nvme tier defers the upload of others. A client may wait for the nvme tier, which is
# reached soon, while an upload may take long.
PERSISTING_FIRST_S = 10.0
# Requests that wait for at most so many bytes have the priority of their clients. Training goes on during most waits for
# more: those of asynchronous saves.
SMALL_BYTES_MAX = CHUNK_BYTES
# Uploads begin this long after the last such request, so that they do not delay the next one.
BURST_S = 0.05
# The session keeps the priority of its clients this long after it. An unprivileged process may change it ten times a
# second.
AWAITED_S = 0.2
# How long nothing may reach the object tier before this is reported.
STALL_S = 60.0
_logger = logging.getLogger("tierfs.flush")


class NotYetError(StoreError):
    """A chunk was not found, because a place could not be looked at yet: a segment (``ram``), or the object tier."""


class FlushState:
    """The state that a flusher's parts share. `tierfs.flusher.flusher.Flusher` describes the arguments.

    Attributes:
        changed: Held for each use of the attributes below. Notified of every change.
        placing: Held while drafts move to the nvme tier, and while drafts are marked as conflicts, so that no draft
            moves while it is being marked. Never acquired while ``changed`` is held.
        entries: The drafts in flight.
        access: The access to the object tier.
        stopping: Whether the flusher is about to end.
        nudged: Whether a slab may have a new draft, or a draft that waited for room may fit now.
        persisting_since: When the present pass of writing drafts to the nvme tier began, monotonic seconds; None if no
            pass runs.
        moved_at: When a chunk or record last reached the object tier, or nothing was pending, monotonic seconds.
        local_waits: Number of requests that wait for drafts to reach the nvme tier.
        far_waits: Number of requests that wait for a level above that.
        object_waits: Number of changes that wait until the object tier has them.
        priority: How the threads share the processors.
        counters: Counts of events, by name.
        exchange: The exchange of drafts with other hosts; ``None`` if there is none.
        local_level: The level of a draft in the nvme tier.
        nvme_bytes: The nvme tier's budget; 0 if there is no nvme tier.
        fault: Called before and after each ordered step.
    """

    def __init__(
        self,
        ram: RamTier,
        nvme: NvmeTier | None,
        *,
        clock: Clock,
        random: Callable[[], float],
        fault: Faults,
        connect: Connect | None = None,
        priority: Priority | None = None,
    ) -> None:
        self.ram = ram
        self.nvme = nvme
        self.clock = clock
        self.fault = fault
        self._random = random
        self.changed = threading.Condition()
        self.placing = threading.Lock()
        self.access = Access(connect)
        self.stopping = False
        self.nudged = True
        self.persisting_since: float | None = None
        self.moved_at = clock.monotonic()
        self.local_waits = self.far_waits = self.object_waits = 0
        self.priority = priority or Priority()
        self._small_waits = 0
        self._burst_since = self._burst_ends = self._awaited_at = float("-inf")
        self.counters: Counter[str] = Counter()
        self.exchange: DraftExchange | None = None
        usage = nvme.usage() if nvme is not None else None
        self.local_level = Level.LOCAL if usage is not None and usage.gives_local else Level.STAGED
        self.nvme_bytes = usage.budget_bytes if usage is not None else 0
        self.entries = FlushQueue(ram.budget_bytes + self.nvme_bytes)

    def stalled_s(self) -> float:
        """Return for how many seconds nothing has reached the object tier, although drafts are pending.

        It is 0 below `STALL_S`. The caller holds the lock.
        """
        now = self.clock.monotonic()
        if not self.entries.moving:
            self.moved_at = now
        seconds = now - self.moved_at
        return seconds if seconds >= STALL_S else 0.0

    def persists_first(self) -> bool:
        """Return whether the upload of drafts past the nvme tier is deferred, in favour of drafts that go there."""
        since = self._burst_since if self.is_burst() else self.persisting_since
        return since is not None and self.clock.monotonic() - since < PERSISTING_FIRST_S

    def is_burst(self) -> bool:
        """Return whether clients write small files that wait for the nvme tier, and nobody waits for a level above it.

        The caller holds the lock.
        """
        is_on = self.clock.monotonic() < self._burst_ends
        return is_on and not self.far_waits and not self.entries.is_behind

    def note_wait(self, count: int, *, is_local: bool) -> None:
        """Note that one more request waits for a few bytes (1), or one less (-1). The caller holds the lock."""
        now = self._awaited_at = self.clock.monotonic()
        self._small_waits += count
        if is_local:
            self._burst_since = self._burst_since if now < self._burst_ends else now
            self._burst_ends = now + BURST_S
        self.follow_priority()

    def end_burst(self) -> None:
        """Let uploads begin, because the nvme tier needs the room that they free."""
        self._burst_ends = float("-inf")

    def follow_priority(self) -> None:
        """Lower the session's priority while drafts are in flight and nobody waits for a few bytes, else raise it."""
        is_awaited = self._small_waits or self.clock.monotonic() - self._awaited_at < AWAITED_S
        self.priority.lower_session(bool(self.entries.moving) and not is_awaited)

    def persists_alone(self) -> bool:
        """Return whether large drafts are not uploaded early either, because a request waits for the nvme tier."""
        return self.local_waits > 0 and self.persists_first()

    def pressure(self) -> Pressure:
        """Return why chunks have to be sent soon. The caller holds the lock."""
        return "backlog" if self.entries.is_behind else "caller" if self.object_waits else "none"

    def fail(self, entry: FlushItem, error: TierfsError, wait_s: float | None = None) -> None:
        """Note that an attempt failed, and schedule the next one after ``wait_s`` seconds.

        By default the wait grows exponentially with jitter, and the failure is counted and logged.
        """
        if wait_s is None:
            wait_s = min(RETRY_S_MAX, RETRY_S_MIN * 2**entry.failures) * (0.5 + self._random() / 2)
            self.counters["failures"] += 1
            _logger.warning("%s: attempt %d failed, next in %.1f s: %s", entry.path, entry.failures + 1, wait_s, error)
        with self.changed:
            self.entries.fail(entry, error, self.clock.monotonic() + wait_s)

    def known(self, error: Exception, path: str) -> TierfsError:
        """Return a `TierfsError` as it is. Log and count any other error, and return it as a `StoreError`."""
        if isinstance(error, TierfsError):
            return error
        self.counters["unforeseen_errors"] += 1
        _logger.error("%s cannot be flushed", path, exc_info=error)
        return StoreError(f"{path}: {error!r}", path=path)

    # -- slabs ---------------------------------------------------------------------------------------------------------

    def chunk(self, reference: SlotRef) -> Slot | None:
        """Return the slot that a draft refers to, or None if the slot was reused or its segment cannot be opened."""
        return slot_at(self.ram, reference)

    def chunks(self, references: Sequence[SlotRef]) -> list[Slot]:
        """Return the slots of these references that still exist; see `chunk`."""
        return [slot for slot in map(self.chunk, references) if slot is not None]

    def sources(self, kind: DigestKind, slots: Mapping[bytes, SlotRef | None]) -> ChunkSources:
        """Return the copies of chunks on this host: first those in ``slots``, by the digest of their chunk."""
        bad = "bad_local_copies"
        tiers: list[ChunkTier] = [RamChunks(self.ram, self.counters, bad, slots, is_mapped=False)]
        if self.nvme is not None:
            tiers.append(FileChunks(self.nvme, self.nvme.quarantine, self.counters, bad))
        rooms = () if self.exchange is None else self.exchange.room.tiers
        tiers += [FileChunks(room, room.quarantine, self.counters, bad, name="room") for room in rooms]
        return ChunkSources(kind, tiers)

    def sources_of(self, draft: Draft) -> ChunkSources:
        """Return the copies of a draft's chunks, and of others, on this host."""
        if not isinstance(draft.record, Manifest):
            return self.sources(DigestKind.XXH3_128, {})
        digests = (row.name.digest for row in draft.record.rows)
        return self.sources(draft.record.digest_kind, dict(zip(digests, draft.slots, strict=False)))

    def missing(self, entry: FlushItem, reference: SlotRef | None, error: TierfsError) -> TierfsError:
        """Return the error for a chunk that was found in no tier: ``error``, or a transient one if a retry may find it.

        A retry may find the chunk if a segment could not be opened, or was opened meanwhile. Until then the draft keeps
        its place before drafts that were closed later.
        """
        if reference is None or entry.slot is None:
            return error
        if self.chunk(reference) is None and not self.ram.unread():
            return error
        text = f"{entry.path}: one of its chunks is in a segment that cannot be opened now"
        return NotYetError(text, transient=True, path=entry.path, tier="ram")

    def release(self, draft: Draft, slot: Slot, *, discarded: bool = False) -> None:
        """Mark a draft's slots as clean, because a lower tier has the draft or it is discarded.

        The draft's own slot is last, so that a crash leaves no dirty chunk without its draft. If the draft is
        discarded, no lower tier has its chunks, so chunks that another pending draft shares stay dirty.
        """
        self.fault("before release.chunks")
        for name, reference in zip(draft.names, draft.slots, strict=True):
            chunk = None if reference is None else self.chunk(reference)
            if chunk is not None and not (discarded and self._is_lent(draft, name, reference)):
                chunk.segment.mark(chunk, SlotState.CLEAN)
        self.fault("before release.draft")
        slot.segment.mark(slot, SlotState.CLEAN)
        self.fault("after release.draft")

    def _is_lent(self, draft: Draft, name: bytes, reference: SlotRef | None) -> bool:
        """Return whether another draft in a slab needs this draft's slot: a copy of a file that is still pending."""
        with self.changed:
            return any(
                name == other and theirs in {None, reference}
                for entry in self.entries
                if entry.draft is not draft and entry.slot is not None
                for other, theirs in zip(entry.draft.names, entry.draft.slots, strict=True)
            )
