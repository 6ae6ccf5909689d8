"""The drafts that a flusher has on its way, each with how far it has come."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierfs.errors import ConflictError, TierfsError
from tierfs.flusher.order import ClosingOrder, Turn
from tierfs.format.manifest import Row
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import Draft
from tierfs.host.slab.segment import Slot

if TYPE_CHECKING:
    from tierfs.store.encode.contexts import ChunkContext

__all__ = ["FlushItem", "FlushQueue"]


@dataclass(slots=True, eq=False)
class FlushItem:
    """One draft on its way.

    Attributes:
        draft: The draft to publish.
        turn: When its file was closed: see `Draft.turn`.
        slot: Where it lies in a slab; ``None`` once the slab is not needed for it any more.
        number: Its row's in ``nvme.db``; ``None`` before it is there.
        level: The level that it has reached.
        since_s: When this flusher learned of it, monotonic seconds.
        rows: As they are to be published; ``None`` for a chunk that is not in the object tier yet.
        contexts: The facts about each chunk; ``None`` before they were asked for.
        persisted: Whether it has left the slab for the nvme tier, or does not need to.
        ahead: Whether it was uploaded, or that was tried, before it was settled.
        uploaded: Whether every row is there.
        published: Whether its record stands, and only the local tiers are still to be told.
        busy: Whether a thread is at work on it.
        conflict: Whether somebody else changed its path, so that it is kept and never published.
        error: The last one.
        failures: How often in a row something did.
        retry_at: Not before this, monotonic seconds.
    """

    draft: Draft
    turn: Turn
    since_s: float
    slot: Slot | None = None
    number: int | None = None
    level: Level = Level.STAGED
    rows: list[Row | None] = field(default_factory=list)
    contexts: Sequence[ChunkContext] | None = None
    persisted: bool = False
    ahead: bool = False
    uploaded: bool = False
    published: bool = False
    busy: bool = False
    conflict: bool = False
    error: TierfsError | None = None
    failures: int = 0
    retry_at: float = 0.0

    @property
    def path(self) -> str:
        """The path that changes."""
        return self.draft.path

    def fail(self, error: TierfsError, retry_at: float) -> None:
        """Note that the last attempt failed; a conflict that it was drawn into meanwhile stays, with what is said of it."""
        if not self.conflict:
            self.error, self.retry_at = error, retry_at
            self.failures += 1
            self.conflict = isinstance(error, ConflictError)

    def clear(self) -> None:
        """Note that it went well, or may from now on; here, too, a conflict stays."""
        if not self.conflict:
            self.error, self.failures, self.retry_at = None, 0, 0.0


class FlushQueue:
    """All drafts on their way, in closing order. Not thread-safe: the flusher holds its lock."""

    def __init__(self) -> None:
        self._by_write_id: dict[bytes, FlushItem] = {}
        self._sorted: list[FlushItem] = []
        self._order = ClosingOrder()
        self._standing: set[str] = set()  # paths of those that are published: one draft for each
        self._needs: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[FlushItem]:
        return iter(self._sorted)

    def __contains__(self, write_id: bytes) -> bool:
        return write_id in self._by_write_id

    def get(self, write_id: bytes) -> FlushItem | None:
        """The draft with this write id."""
        return self._by_write_id.get(write_id)

    def add(self, entry: FlushItem) -> None:
        """Note a draft."""
        self._by_write_id[entry.draft.write_id] = entry
        bisect.insort(self._sorted, entry, key=_turn)
        self._order.add(entry.path, entry.turn)
        self._needs.update(entry.draft.names)

    def pass_on(self, entry: FlushItem) -> None:
        """Note that a draft's record stands: it is others' turn, but for those that change the same path."""
        entry.published = True
        self._order.remove(entry.path, entry.turn)
        self._standing.add(entry.path)

    def take_back(self, entry: FlushItem) -> None:
        """The draft is to be published again, after all."""
        entry.published = False
        self._order.add(entry.path, entry.turn)
        self._standing.remove(entry.path)

    def remove(self, entry: FlushItem) -> None:
        """Note that a draft is done with, or discarded."""
        if entry.published:
            self._standing.remove(entry.path)
        else:
            self._order.remove(entry.path, entry.turn)
        del self._by_write_id[entry.draft.write_id]
        at = bisect.bisect_left(self._sorted, entry.turn, key=_turn)
        del self._sorted[self._sorted.index(entry, at)]
        self._needs.subtract(entry.draft.names)
        for name in entry.draft.names:
            if not self._needs[name]:
                del self._needs[name]

    def is_needed(self, name: bytes) -> bool:
        """Whether a draft names this chunk."""
        return name in self._needs

    def is_first(self, entry: FlushItem) -> bool:
        """Whether no draft has to be published before this one."""
        if entry.draft.after in self._by_write_id or entry.path in self._standing:
            return False
        return self._order.first(entry.path) == entry.turn

    def dependents(self, entry: FlushItem) -> list[FlushItem]:
        """Drafts that are only to be published if this one is: those chained on it, and those chained on these."""
        found, ids = [], {entry.draft.write_id}
        for other in self:
            if other.draft.base.write_id in ids or other.draft.after in ids:
                found.append(other)
                ids.add(other.draft.write_id)
        return found

    def before(self, entry: FlushItem) -> Iterator[FlushItem]:
        """The drafts that have to be published before this one, in closing order."""
        directory = entry.path.rpartition("/")[0]
        for other in self:
            if other.turn >= entry.turn:
                break
            if other.published:
                continue
            if not directory or other.path.startswith(f"{directory}/") or other.draft.write_id == entry.draft.after:
                yield other

    def blocker(self, entry: FlushItem) -> FlushItem | None:
        """A draft in conflict that this one waits for, if any."""
        return next((other for other in self.before(entry) if other.conflict), None)


def _turn(entry: FlushItem) -> Turn:
    return entry.turn
