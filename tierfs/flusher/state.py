"""The shared state of a flusher's parts: the tiers, the drafts on their way, one lock, and the errors.

The lock is never held while bytes move. A thread that changes a draft's entry holds it, and tells the others.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from tierfs.clock import Clock
from tierfs.errors import StoreError, TierfsError
from tierfs.flusher.access import Access, Connect
from tierfs.flusher.queue import FlushItem, FlushQueue
from tierfs.host.ground import Faults
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import Draft, SlotRef
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Slot, SlotState

__all__ = ["FlushState", "UnreadSegmentError"]

RETRY_S_MIN = 0.25
RETRY_S_MAX = 30.0
# How long drafts on their way to the nvme tier keep others from being uploaded: somebody may be waiting for that, and it
# is over soon, where this takes as long as it takes.
PERSISTING_FIRST_S = 10.0
_logger = logging.getLogger("tierfs.flush")


class UnreadSegmentError(StoreError):
    """A chunk lies in a segment that could not be opened yet."""


class NotAskedError(StoreError):
    """Whether the object tier has a chunk that no local tier has cannot be told now: it is unreachable, or nobody has said yet where it is."""


class FlushState:
    """See `tierfs.flusher.flusher.Flusher` for the arguments.

    Attributes:
        changed: Held for each use of what follows; told of every change.
        placing: Held while drafts get their place in the nvme tier, and while drafts are marked as conflicts where they lie:
            so each is marked where it stays. Never taken while ``changed`` is held.
        entries: The drafts on their way.
        access: The way to the object tier.
        stopping: Whether the flusher is about to end.
        nudged: Whether there may be something new in a slab, or room for what had to wait.
        persisting_since: Since when drafts are on their way to the nvme tier, monotonic seconds; None while there are none.
        local_waits: How many wait for drafts to be in the nvme tier.
        holders: Files that are being written and have chunks in the nvme tier already.
        counters: Events, by name.
        local_level: The level of a draft in the nvme tier.
        nvme_bytes: The nvme tier's budget; 0 where there is none.
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
    ) -> None:
        self.ram = ram
        self.nvme = nvme
        self.clock = clock
        self.fault = fault
        self._random = random
        self.changed = threading.Condition()
        self.placing = threading.Lock()
        self.entries = FlushQueue()
        self.access = Access(connect)
        self.stopping = False
        self.nudged = True
        self.persisting_since: float | None = None
        self.local_waits = 0
        self.holders: set[str] = set()
        self.counters: Counter[str] = Counter()
        usage = nvme.usage() if nvme is not None else None
        self.local_level = Level.LOCAL if usage is not None and usage.gives_local else Level.STAGED
        self.nvme_bytes = usage.budget_bytes if usage is not None else 0

    def persists_first(self) -> bool:
        """Whether no draft that is in the nvme tier is begun with now, for the sake of those that are not."""
        since = self.persisting_since
        return since is not None and self.clock.monotonic() - since < PERSISTING_FIRST_S

    def persists_alone(self) -> bool:
        """Whether those are not uploaded meanwhile, either, because somebody waits."""
        return self.local_waits > 0 and self.persists_first()

    def fail(self, entry: FlushItem, error: TierfsError, wait_s: float | None = None) -> None:
        """Note that an attempt failed, and when the next one is due; by default later each time, and said."""
        if wait_s is None:
            wait_s = min(RETRY_S_MAX, RETRY_S_MIN * 2**entry.failures) * (0.5 + self._random() / 2)
            self.counters["failures"] += 1
            _logger.warning("%s: attempt %d failed, next in %.1f s: %s", entry.path, entry.failures + 1, wait_s, error)
        with self.changed:
            self.entries.fail(entry, error, self.clock.monotonic() + wait_s)

    def known(self, error: Exception, path: str) -> TierfsError:
        """An error as one of ours; one that nobody foresaw is logged, and counts as a failure of the store."""
        if isinstance(error, TierfsError):
            return error
        self.counters["unforeseen_errors"] += 1
        _logger.error("%s cannot be flushed", path, exc_info=error)
        return StoreError(f"{path}: {error!r}", path=path)

    # -- slabs ---------------------------------------------------------------------------------------------------------

    def chunk(self, reference: SlotRef) -> Slot | None:
        """The slot that a draft refers to, unless it has got another life."""
        segment = self.ram.segment(reference.segment)
        slot = None if segment is None else segment.slot(reference.index)
        return slot if slot is not None and slot.serial == reference.serial else None

    def chunks(self, references: Sequence[SlotRef]) -> list[Slot]:
        """Those of these slots that have not got another life."""
        return [slot for slot in map(self.chunk, references) if slot is not None]

    def missing(self, entry: FlushItem, reference: SlotRef | None, error: TierfsError) -> TierfsError:
        """The error for a chunk that no tier has and whose slot could not be seen: ``error``, or that it has to be tried again.

        A segment may have been opened meanwhile. Until then the draft keeps its place before those that were closed later.
        """
        if reference is None or entry.slot is None:
            return error
        if self.chunk(reference) is None and not self.ram.unread():
            return error
        text = f"{entry.path}: a chunk of it lies in a segment that could not be opened yet"
        return UnreadSegmentError(text, transient=True, path=entry.path, tier="ram")

    def release(self, draft: Draft, slot: Slot, *, discarded: bool = False) -> None:
        """Mark a draft's slots clean: a lower tier has it. The draft itself last, so that no chunk is left behind.

        Nobody else has a chunk of one that is discarded: if a copy of the file is pending, its slot stays dirty.
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
        """Whether another draft in a slab relies on this one's slot: a copy of a file that was not published yet."""
        with self.changed:
            return any(
                name == other and theirs in {None, reference}
                for entry in self.entries
                if entry.draft is not draft and entry.slot is not None
                for other, theirs in zip(entry.draft.names, entry.draft.slots, strict=True)
            )

    # -- what went ahead of a draft ------------------------------------------------------------------------------------

    def drop_holds(self, draft: Draft) -> None:
        """Hold chunks that went ahead of a draft no longer: it is in the nvme tier itself, or not pending any more."""
        ours = [holder for holder in self.holders if holder.endswith(f":{draft.write_id.hex()}")]
        if ours and self.nvme is not None:
            self.nvme.drop_hold(*ours)
            self.holders.difference_update(ours)


def read_slot(slot: Slot, start: int, out: memoryview) -> bool:
    """Copy bytes of a chunk out of its slot, from an offset on; false if it is not there any more."""
    if start + len(out) > slot.length:
        return False
    slot.segment.read(slot, start, out)
    return slot.segment.is_still(slot)
