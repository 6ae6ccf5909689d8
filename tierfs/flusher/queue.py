"""The queue of a flusher's drafts in flight, the progress of each, and the order in which they are published.

Drafts are published in closing order, directory by directory. A draft waits for every draft that was closed earlier and
lies in or below its directory. So ``run/latest`` never appears before the files that were saved under ``run/`` until
then, and a checkpoint's metadata never before its shards. Checkpoints in sibling directories do not wait for each other.
A draft that cannot be published delays the drafts that wait for it.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from tierfs.errors import ConflictError, TierfsError
from tierfs.format.manifest import Row
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import Draft
from tierfs.host.slab.segment import Slot

if TYPE_CHECKING:
    from tierfs.store.encode.keyframes import FilePlan

# Drafts of this size or more are uploaded while they are written to the nvme tier. Smaller drafts reach it too soon for
# that to pay.
LARGE_BYTES_MIN = 64 << 20
ClosingKey: TypeAlias = tuple[int, int, int]
"""The sort key of the closing order: see `Draft.turn`."""


class FlushStage(enum.Enum):
    """How far a draft has come. `_NEXT` has the transitions."""

    WAITING = enum.auto()
    """It has to be brought to the nvme tier. Its chunks may be uploaded meanwhile."""
    WAITING_UPLOADED = enum.auto()
    """It has to be brought to the nvme tier, and its chunks are in the object tier already."""
    READY = enum.auto()
    """It is in the nvme tier, or bypasses it. Its chunks have to be uploaded."""
    UPLOADED = enum.auto()
    """Its record has to be published."""
    PUBLISHED = enum.auto()
    """Its record is published. Only the local tiers have to release it."""
    CONFLICT = enum.auto()
    """Another writer changed the path, so the draft is kept where it is and never published."""


_NEXT: dict[Literal["past nvme", "uploaded", "published", "taken back", "conflict"], dict[FlushStage, FlushStage]] = {
    "past nvme": {FlushStage.WAITING: FlushStage.READY, FlushStage.WAITING_UPLOADED: FlushStage.UPLOADED},
    "uploaded": {FlushStage.WAITING: FlushStage.WAITING_UPLOADED, FlushStage.READY: FlushStage.UPLOADED},
    "published": {FlushStage.UPLOADED: FlushStage.PUBLISHED},
    "taken back": {FlushStage.PUBLISHED: FlushStage.UPLOADED},
    "conflict": dict.fromkeys(FlushStage, FlushStage.CONFLICT),
}
"""The stage of a draft after an event, by its stage before. Where nothing is given, it stays as it was."""


@dataclass(slots=True, eq=False)
class FlushItem:
    """One draft in flight.

    Attributes:
        draft: The draft to publish.
        turn: The draft's place in the closing order: see `Draft.turn`.
        slot: The draft's slot in a slab; ``None`` once the slab does not need to hold the draft.
        number: The draft's seq in the nvme tier; ``None`` before the draft is there.
        level: The level that the draft has reached.
        rows: The rows to publish; ``None`` for a chunk that is not in the object tier yet.
        plan: The facts that guide the encoding; ``None`` before the publisher was asked for them.
        is_foreign: Whether the draft is another host's, and lies in the room for those: see `DraftExchange`.
        is_awaited: Whether a request has waited for the draft, and for a few bytes besides it at most.
        is_urgent: Whether `begin` found it awaited, so that threads with the clients' priority upload it.
        holders: The ids of the other hosts that hold the draft.
        is_held: Whether as many other hosts as were asked for have held the draft.
        stage: How far the draft has come.
        error: The last error.
        unsent_bytes: Bytes of the chunks that are not in the object tier yet. `FlushQueue` sets it.
        failures: Number of failures in a row.
        retry_at: Earliest time of the next attempt, monotonic seconds.
    """

    draft: Draft
    turn: ClosingKey
    slot: Slot | None = None
    number: int | None = None
    level: Level = Level.STAGED
    rows: list[Row | None] = field(default_factory=list)
    plan: FilePlan | None = None
    is_foreign: bool = False
    is_awaited: bool = False
    is_urgent: bool = False
    holders: set[str] = field(default_factory=set)
    is_held: bool = False
    stage: FlushStage = FlushStage.WAITING
    unsent_bytes: int = 0
    error: TierfsError | None = None
    failures: int = 0
    retry_at: float = 0.0

    @property
    def path(self) -> str:
        return self.draft.path

    @property
    def past_nvme(self) -> bool:
        """Whether no work is left to bring the draft to the nvme tier."""
        return self.stage not in {FlushStage.WAITING, FlushStage.WAITING_UPLOADED}

    @property
    def uploaded(self) -> bool:
        """Whether all chunks are known to be in the object tier."""
        return self.stage in {FlushStage.WAITING_UPLOADED, FlushStage.UPLOADED, FlushStage.PUBLISHED}

    @property
    def conflict(self) -> bool:
        return self.stage is FlushStage.CONFLICT

    @property
    def published(self) -> bool:
        return self.stage is FlushStage.PUBLISHED

    def note(self, event: Literal["past nvme", "uploaded", "published", "taken back", "conflict"]) -> None:
        """Change the stage as `_NEXT` says."""
        self.stage = _NEXT[event].get(self.stage, self.stage)

    def fail(self, error: TierfsError, retry_at: float) -> None:
        """Note that an attempt failed. If the draft became a conflict meanwhile, keep that conflict and its error."""
        if not self.conflict:
            self.error, self.retry_at = error, retry_at
            self.failures += 1
            if isinstance(error, ConflictError):
                self.note("conflict")

    def clear(self, error: TierfsError | None = None) -> None:
        """Reset the failures after a success, or before a fresh attempt. ``error`` is kept to be reported.

        A conflict stays.
        """
        if not self.conflict:
            self.error, self.failures, self.retry_at = error, 0, 0.0

    def builds_on(self) -> set[bytes]:
        """Return the write ids of the drafts that have to be published for this one to be published."""
        return {write_id for write_id in (self.draft.base.write_id, self.draft.after) if write_id}


class FlushQueue:
    """All drafts in flight, in closing order. Not thread-safe: the caller holds the flusher's lock.

    The queue separates drafts that can be advanced from drafts that wait for another draft or for their next attempt.
    So the time to find the next draft does not grow with the number of pending drafts. Callers change the state of a
    draft through the methods of this class only.

    Attributes:
        backlog_bytes: Bytes of all drafts' chunks that are not in the object tier yet; none of a draft in conflict.
        is_behind: Whether the backlog took more than half of the budget, and not less than a quarter since.
        large: Drafts of `LARGE_BYTES_MIN` or more that are not past the nvme tier and were never begun, by write id.
    """

    def __init__(self, budget_bytes: float = math.inf) -> None:
        self._budget_bytes = budget_bytes
        self._by_write_id: dict[bytes, FlushItem] = {}
        self._sorted: list[FlushItem] = []
        self._order = ClosingOrder()
        self._standing: set[str] = set()  # paths of published drafts that are not released yet: one draft per path
        self._needs: Counter[bytes] = Counter()  # how many drafts name a chunk
        self._built_on: dict[bytes, list[FlushItem]] = {}  # drafts by the write id of the draft that they build on
        self._waiting: list[FlushItem] = []  # not past the nvme tier
        self._ready: list[FlushItem] = []  # past the nvme tier, and `next_ready` has to look at them
        self._resting: list[tuple[float, int, FlushItem]] = []  # past it: a heap by the time of the next attempt
        self._rests = itertools.count()
        self._kept: dict[bytes, FlushItem] = {}  # in conflict, by write id
        self._passed: dict[bytes, FlushItem] = {}  # past the nvme tier but still in a slab, by write id
        self._busy: set[FlushItem] = set()  # a thread works on them
        self.large: dict[bytes, FlushItem] = {}
        self.backlog_bytes = 0
        self.is_behind = False

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[FlushItem]:
        return iter(self._sorted)

    def __contains__(self, write_id: bytes) -> bool:
        return write_id in self._by_write_id

    def get(self, write_id: bytes) -> FlushItem | None:
        return self._by_write_id.get(write_id)

    def add(self, entry: FlushItem) -> None:
        self._by_write_id[entry.draft.write_id] = entry
        entry.unsent_bytes = entry.draft.length
        self._add_backlog(entry.draft.length)
        _insert(self._sorted, entry)
        self._order.add(entry.path, entry.turn)
        self._needs.update(entry.draft.names)
        for write_id in entry.builds_on():
            self._built_on.setdefault(write_id, []).append(entry)
        if entry.conflict:
            self._note_kept(entry)
        if entry.past_nvme:
            self._note_past_nvme(entry)
        else:
            _insert(self._waiting, entry)
            if entry.draft.length >= LARGE_BYTES_MIN:
                self.large[entry.draft.write_id] = entry

    def pass_nvme(self, entry: FlushItem) -> None:
        """Note that no work is left to bring a draft to the nvme tier."""
        if not entry.past_nvme:
            entry.note("past nvme")
            self._end_waiting(entry)
            self._note_level(entry)

    def hold(self, entry: FlushItem, host: str, count: int) -> None:
        """Note that another host holds a draft, which has to be held by ``count`` hosts."""
        entry.holders.add(host)
        entry.is_held = entry.is_held or len(entry.holders) >= count
        self._note_level(entry)

    def _note_level(self, entry: FlushItem) -> None:
        """Note that a draft has reached the level ``peer``, which implies that it is in the nvme tier, if there is one."""
        if entry.is_held and entry.past_nvme:
            entry.level = max(entry.level, Level.PEER)

    def _end_waiting(self, entry: FlushItem) -> None:
        _take_out(self._waiting, entry)
        self.large.pop(entry.draft.write_id, None)
        self._note_past_nvme(entry)

    def begin(self, entry: FlushItem) -> None:
        """Note that a thread begins to work on a draft."""
        self._busy.add(entry)
        entry.is_urgent = entry.is_awaited
        self.large.pop(entry.draft.write_id, None)
        _take_out(self._ready, entry)

    def end(self, entry: FlushItem) -> None:
        """Note that the thread has finished its work on a draft."""
        self._busy.discard(entry)
        self._rouse(entry)

    def fail(self, entry: FlushItem, error: TierfsError, retry_at: float) -> None:
        """Call `FlushItem.fail`. If the draft is in conflict now, it stays in its tier."""
        was_past_nvme = entry.past_nvme
        entry.fail(error, retry_at)
        if entry.conflict and entry.draft.write_id in self._by_write_id:
            self._note_kept(entry)
            if not was_past_nvme:
                self._end_waiting(entry)

    def clear(self, entry: FlushItem) -> None:
        """Call `FlushItem.clear`, and let `next_ready` consider the draft again."""
        entry.clear()
        self._rouse(entry)

    def hasten(self, entry: FlushItem) -> None:
        """Make the next attempt due now."""
        entry.retry_at = 0.0
        self._rouse(entry)

    def pass_on(self, entry: FlushItem) -> None:
        """Note that a draft's record is published. The next draft may follow, unless it changes the same path."""
        entry.note("published")
        self._order.remove(entry.path, entry.turn)
        self._standing.add(entry.path)
        _take_out(self._ready, entry)
        self._rouse_next(entry)

    def take_back(self, entry: FlushItem) -> None:
        """Undo `pass_on`, so that the draft is published again."""
        entry.note("taken back")
        self._order.add(entry.path, entry.turn)
        self._standing.remove(entry.path)
        self._rouse(entry)
        self._rouse_next(entry)

    def note_sent(self, entry: FlushItem, count: int) -> None:
        """Note that this many more bytes of a draft's chunks are in the object tier."""
        count = min(count, entry.unsent_bytes)
        entry.unsent_bytes -= count
        self._add_backlog(-count)

    def _add_backlog(self, count: int) -> None:
        self.backlog_bytes += count
        self.is_behind = self.backlog_bytes > self._budget_bytes / (4 if self.is_behind else 2)

    def remove(self, entry: FlushItem) -> None:
        """Remove a draft that was published and released, or discarded."""
        write_id = entry.draft.write_id
        self.note_sent(entry, entry.unsent_bytes)
        if entry.published:
            self._standing.remove(entry.path)
        else:
            self._order.remove(entry.path, entry.turn)
        del self._by_write_id[write_id]
        for drafts in (self._sorted, self._ready, self._waiting):
            _take_out(drafts, entry)
        for by_id in (self._kept, self._passed, self.large):
            by_id.pop(write_id, None)
        for before in entry.builds_on():
            self._built_on[before].remove(entry)
            if not self._built_on[before]:
                del self._built_on[before]
        self._needs.subtract(entry.draft.names)
        for name in entry.draft.names:
            if not self._needs[name]:
                del self._needs[name]
        self._rouse_next(entry)

    def waiting(self, count: int) -> list[FlushItem]:
        """Return the first ``count`` drafts that are not past the nvme tier, in closing order."""
        return self._waiting[:count]

    def last_waiting(self) -> ClosingKey | None:
        """Return the turn of the last draft that is not past the nvme tier, or None if there is none."""
        return self._waiting[-1].turn if self._waiting else None

    def next_ready(self, now: float) -> FlushItem | None:
        """Return the first draft past the nvme tier that can be advanced now, or None.

        Drafts before it are set aside until `_rouse` is called for them.
        """
        while self._resting and self._resting[0][0] <= now:
            self._rouse(heapq.heappop(self._resting)[2])
        found, parked = None, 0
        for entry in self._ready:
            if entry.conflict:
                pass
            elif now < entry.retry_at:
                heapq.heappush(self._resting, (entry.retry_at, next(self._rests), entry))
            elif not entry.uploaded or self.is_first(entry) or self.kept_base(entry) is not None:
                found = entry
                break
            parked += 1
        del self._ready[:parked]
        return found

    def _note_kept(self, entry: FlushItem) -> None:
        self._kept[entry.draft.write_id] = entry
        self.note_sent(entry, entry.unsent_bytes)  # it waits for a person
        self._rouse_built_on(entry)

    def _note_past_nvme(self, entry: FlushItem) -> None:
        if entry.slot is not None:
            self._passed[entry.draft.write_id] = entry
        self._rouse(entry)

    def _rouse(self, entry: FlushItem) -> None:
        """Let `next_ready` consider a draft again."""
        is_open = entry.past_nvme and not (entry in self._busy or entry.conflict or entry.published)
        if is_open and entry.draft.write_id in self._by_write_id and _place(self._ready, entry) is None:
            _insert(self._ready, entry)

    def _rouse_next(self, entry: FlushItem) -> None:
        """Let `next_ready` consider the drafts that may have waited for this one."""
        for turn in self._order.firsts(entry.path):
            at = bisect.bisect_left(self._sorted, turn, key=_turn)
            while at < len(self._sorted) and self._sorted[at].turn == turn:
                self._rouse(self._sorted[at])
                at += 1
        self._rouse_built_on(entry)

    def _rouse_built_on(self, entry: FlushItem) -> None:
        for other in self._built_on.get(entry.draft.write_id, ()):
            self._rouse(other)

    def is_needed(self, name: bytes) -> bool:
        """Return whether a draft names this chunk."""
        return name in self._needs

    def is_first(self, entry: FlushItem) -> bool:
        """Return whether no other draft has to be published before this one."""
        if entry.draft.after in self._by_write_id or entry.path in self._standing:
            return False
        return self._order.first(entry.path) == entry.turn

    def dependents(self, entry: FlushItem) -> list[FlushItem]:
        """Return all drafts that build on this one, directly or through others, in closing order."""
        found = {entry: None}
        walk = [entry]
        for each in walk:
            new = [other for other in self._built_on.get(each.draft.write_id, ()) if other not in found]
            found.update(dict.fromkeys(new))
            walk += new
        return sorted(walk[1:], key=_turn)

    def kept_base(self, entry: FlushItem) -> FlushItem | None:
        """Return a draft in conflict that this one builds on, or None. If there is one, keep this draft as well."""
        return next((self._kept[write_id] for write_id in entry.builds_on() if write_id in self._kept), None)

    def _is_before(self, other: FlushItem, entry: FlushItem) -> bool:
        """Return whether ``other`` has to be published before ``entry``."""
        if other.published or other.turn >= entry.turn:
            return False
        directory = entry.path.rpartition("/")[0]
        return not directory or other.path.startswith(f"{directory}/") or other.draft.write_id == entry.draft.after

    def follows_passed(self, entry: FlushItem) -> bool:
        """Return whether this draft waits for a draft that goes to the object tier from memory."""
        return any(self._is_before(one, entry) for one in self._passed.values() if not one.conflict)

    def blocker(self, entry: FlushItem) -> FlushItem | None:
        """Return the first draft in conflict that this one waits for, or None."""
        return min((one for one in self._kept.values() if self._is_before(one, entry)), key=_turn, default=None)

    @property
    def busy(self) -> int:
        """Number of drafts that a thread is working on."""
        return len(self._busy)

    def is_busy(self, entry: FlushItem) -> bool:
        return entry in self._busy

    @property
    def moving(self) -> int:
        """Number of drafts that are not in conflict."""
        return len(self._sorted) - len(self._kept)

    @property
    def has_conflicts(self) -> bool:
        return bool(self._kept)


def _insert(drafts: list[FlushItem], entry: FlushItem) -> None:
    bisect.insort(drafts, entry, key=_turn)


def _place(drafts: list[FlushItem], entry: FlushItem) -> int | None:
    at = bisect.bisect_left(drafts, entry.turn, key=_turn)
    while at < len(drafts) and drafts[at].turn == entry.turn:
        if drafts[at] is entry:
            return at
        at += 1
    return None


def _take_out(drafts: list[FlushItem], entry: FlushItem) -> None:
    at = _place(drafts, entry)
    if at is not None:
        del drafts[at]


def _turn(entry: FlushItem) -> ClosingKey:
    return entry.turn


class ClosingOrder:
    """The pending drafts of each directory in closing order. Not thread-safe."""

    def __init__(self) -> None:
        self._below: dict[str, list[ClosingKey]] = {}

    def add(self, path: str, turn: ClosingKey) -> None:
        for directory in _ancestors(path):
            bisect.insort(self._below.setdefault(directory, []), turn)

    def remove(self, path: str, turn: ClosingKey) -> None:
        for directory in _ancestors(path):
            turns = self._below[directory]
            del turns[bisect.bisect_left(turns, turn)]
            if not turns:
                del self._below[directory]

    def first(self, path: str) -> ClosingKey:
        """Return the turn of the earliest pending draft in or below the directory of ``path``."""
        return self._below[path.rpartition("/")[0]][0]

    def firsts(self, path: str) -> Iterator[ClosingKey]:
        """Yield the turn of the earliest pending draft of each directory above ``path``. A turn may repeat."""
        for directory in _ancestors(path):
            turns = self._below.get(directory)
            if turns:
                yield turns[0]


def _ancestors(path: str) -> Iterator[str]:
    """Yield every directory above ``path``; the root (``""``) comes last."""
    while path:
        path = path.rpartition("/")[0]
        yield path
