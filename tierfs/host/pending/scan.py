"""Find the pending changes of this host: sealed drafts that are not in the object tier yet.

Look-ups read the tiers themselves, the ram tier before the nvme tier, because a draft only moves down. They need no
flusher.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tierfs.clock import SystemClock, boot_id
from tierfs.errors import CorruptionError, FormatError, StoreError, TierfsError
from tierfs.format.keys import is_at_or_below
from tierfs.host.events import Counters
from tierfs.host.host import Host
from tierfs.host.nvme.batch import StoredDraft
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import Draft
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment, Slot
from tierfs.host.slab.table import SlotState

# Enough for the pending drafts of a host that writes small files faster than they are flushed; 2 KiB each.
DECODED_MAX = 16_384
_Key = tuple[str, int, int] | tuple[str, bytes]


class DecodedDrafts:
    """Decodes drafts, and caches the latest `DECODED_MAX` of them. Thread-safe.

    Args:
        counters: Logs each draft that cannot be decoded, once.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._decoded: dict[_Key, Draft] = {}

    def in_slot(self, slot: Slot) -> Draft | None:
        """Return the draft in a slot.

        ``None`` if the slot was reused, or if the draft cannot be decoded. The latter is logged.
        """
        key = (slot.segment.id, slot.index, slot.serial)
        known = self._decoded.get(key)
        if known is not None:
            return known
        draft = Draft.in_slot(slot)
        if isinstance(draft, TierfsError):
            self._counters.say(f"draft:{key}", "a draft cannot be read and is ignored: %s", draft)
            return None
        return None if draft is None else self._remember(key, draft)

    @staticmethod
    def damaged_in_slot(slot: Slot) -> list[str]:
        """Return the path of a draft that cannot be decoded, or ``""`` if its path is unknown, too.

        The list is empty if the slot was reused meanwhile.
        """
        where = slot.segment.meta(slot).decode(errors="replace")
        return [where] if slot.segment.is_still(slot) else []

    def stored(self, stored: StoredDraft) -> Draft:
        """Return a draft in the nvme tier.

        Raises:
            CorruptionError, FormatError: The draft cannot be decoded.
        """
        key = ("nvme", stored.write_id)
        return self._decoded.get(key) or self._remember(key, Draft.in_nvme(stored))

    def readable(self, stored: StoredDraft) -> Draft | None:
        """Return a draft in the nvme tier, or log it and return ``None`` if it cannot be decoded."""
        try:
            return self.stored(stored)
        except (CorruptionError, FormatError) as error:
            self._counters.say(f"stored:{stored.seq}", "a draft cannot be read and is ignored: %s", error)
            return None

    def _remember(self, key: _Key, draft: Draft) -> Draft:
        with self._lock:
            while len(self._decoded) >= DECODED_MAX:
                del self._decoded[next(iter(self._decoded))]
            self._decoded[key] = draft
        return draft


class StagedIndex:
    """The sealed drafts in the segments of one store, by path. Thread-safe.

    Each look-up first applies the changes in the segments' tables since the previous look-up.
    """

    def __init__(self, ram: RamTier, decoded: DecodedDrafts) -> None:
        self._ram = ram
        self._decoded = decoded
        self._lock = threading.Lock()
        self._seen: weakref.WeakKeyDictionary[Segment, int] = weakref.WeakKeyDictionary()  # `Segment.changes`
        self._paths: dict[str, dict[int, str]] = {}  # by segment id, then by slot index
        self._places: dict[str, set[tuple[str, int]]] = {}  # by path: segment ids and slot indexes
        self._sorted: list[str] = []  # the paths, sorted
        self._damaged: set[tuple[str, int]] = set()

    def newest(self, path: str) -> tuple[Draft | None, bool]:
        """Return the newest draft of a path, and whether a draft that cannot be decoded may be newer."""
        with self._lock:
            segments = self._refresh()
            slots, damaged = _slots(segments, self._places.get(path, ())), _slots(segments, self._damaged)
        for slot in reversed(slots):
            draft = self._decoded.in_slot(slot)
            if draft is not None and draft.path == path:
                return draft, self._is_hidden(path, [each for each in damaged if each.turn > slot.turn])
            if draft is None:
                damaged.append(slot)
        return None, self._is_hidden(path, damaged)

    def below(self, path: str) -> Iterator[Draft]:
        """Yield the drafts at or below ``path`` in closing order, except those that cannot be decoded."""
        with self._lock:
            segments = self._refresh()
            names = self._names_below(path)
            slots = _slots(segments, itertools.chain.from_iterable(self._places[name] for name in names))
        for slot in slots:
            draft = self._decoded.in_slot(slot)
            if draft is not None:
                yield draft

    def _names_below(self, path: str) -> list[str]:
        if not path:
            return self._sorted
        inside = f"{path}/"
        first = bisect.bisect_left(self._sorted, inside)
        names = itertools.takewhile(lambda name: name.startswith(inside), itertools.islice(self._sorted, first, None))
        return [*([path] if path in self._places else ()), *names]

    def _is_hidden(self, path: str, damaged: Iterable[Slot]) -> bool:
        """Return whether one of these damaged drafts is of ``path``, or of an unknown path."""
        return any(not {path, ""}.isdisjoint(self._decoded.damaged_in_slot(slot)) for slot in damaged)

    def _refresh(self) -> dict[str, Segment]:
        """Apply all changes, and return the segments by id. The caller holds the lock."""
        segments = {segment.id: segment for segment in self._ram.segments()}
        for segment_id in [known for known in self._paths if known not in segments]:
            self._forget(segment_id)
        for segment in segments.values():
            changes, seen = segment.changes, self._seen.get(segment)
            if seen == changes:
                continue
            if seen is None:  # perhaps a known segment that was reopened
                self._forget(segment.id)
            self._seen[segment] = -1
            changed = segment.take_changed_drafts()
            try:
                while changed:
                    index, slot = next(iter(changed.items()))
                    self._note(segment.id, index, slot)
                    del changed[index]
            finally:
                segment.put_back_changed_drafts(changed)
            self._seen[segment] = changes
        return segments

    def _note(self, segment_id: str, index: int, slot: Slot | None) -> None:
        self._remove(segment_id, index)
        if slot is None or slot.state is not SlotState.SEALED:
            return
        draft = self._decoded.in_slot(slot)
        if draft is None:
            self._damaged.add((segment_id, index))
        else:
            self._paths.setdefault(segment_id, {})[index] = draft.path
            if draft.path not in self._places:
                self._places[draft.path] = set()
                bisect.insort(self._sorted, draft.path)
            self._places[draft.path].add((segment_id, index))

    def _remove(self, segment_id: str, index: int) -> None:
        self._damaged.discard((segment_id, index))
        path = self._paths.get(segment_id, {}).pop(index, None)
        if path is not None:
            self._places[path].discard((segment_id, index))
            if not self._places[path]:
                del self._places[path]
                del self._sorted[bisect.bisect_left(self._sorted, path)]

    def _forget(self, segment_id: str) -> None:
        for index in list(self._paths.get(segment_id, ())):
            self._remove(segment_id, index)
        self._paths.pop(segment_id, None)
        self._damaged = {place for place in self._damaged if place[0] != segment_id}


def _slots(segments: Mapping[str, Segment], places: Iterable[tuple[str, int]]) -> list[Slot]:
    """Return the slots of these that are sealed, in the order in which they were sealed."""
    found = [segments[segment_id].slot(index) for segment_id, index in places]
    return sorted(
        (slot for slot in found if slot is not None and slot.state is SlotState.SEALED), key=lambda slot: slot.turn
    )


KEPT = "changed by another writer before it was flushed: their version is kept, and this one is kept as a conflict"


@dataclass(frozen=True, slots=True)
class Pending:
    """A draft that is not in the object tier yet, and the level that it has reached."""

    draft: Draft
    level: Level


class PendingDrafts:
    """The drafts in one store's local tiers. Thread-safe.

    Args:
        counters: Receives fallbacks.
        stored_level: The level of a draft in the nvme tier.
    """

    def __init__(self, ram: RamTier, nvme: NvmeReader, counters: Counters, *, stored_level: Level) -> None:
        self.stored_level = stored_level
        self._ram = ram
        self._nvme = nvme
        self._decoded = DecodedDrafts(counters)
        self._by_path = StagedIndex(ram, self._decoded)
        self._boot = boot_id()

    def pending(self, path: str) -> Pending | None:
        """Return the newest draft of ``path``, or None.

        Raises:
            CorruptionError, FormatError: The newest draft cannot be decoded, or a damaged draft may be newer.
            StoreError: The nvme tier cannot be read now.
        """
        while True:
            staged, is_hidden = self._by_path.newest(path)
            if is_hidden:
                raise CorruptionError(
                    f"{path}: this host's last write, perhaps to this path, is damaged in shared memory: discard it with "
                    "`tierfs flusher discard` for this path, or else for the store's root, and write it again",
                    path=path,
                    tier="ram",
                )
            item = self._nvme.draft(path)
            stored = None if item is None else self._decoded.stored(item)
            if stored is not None and (staged is None or not self._is_newer(staged, stored)):
                return Pending(stored, self.stored_level)
            # A draft that has left the ram tier meanwhile may have passed through the nvme tier between the two looks.
            if staged is None or self._by_path.newest(path)[0] is staged:
                return None if staged is None else Pending(staged, Level.STAGED)

    def level(self, path: str) -> Level:
        pending = self.pending(path)
        return Level.OBJECT if pending is None else pending.level

    def pending_below(self, path: str) -> dict[str, Pending]:
        """Return the newest draft of each path at or below ``path``; of all paths for ``""``.

        Drafts that cannot be decoded are skipped and logged.
        """
        staged = list(self._by_path.below(path))
        stored = self._nvme.drafts_below(path)
        readable = [(item.path, self._decoded.readable(item)) for item in stored]
        found = {name: Pending(draft, self.stored_level) for name, draft in readable if draft is not None}
        for draft in staged:
            other = found.get(draft.path)
            if other is None or self._is_newer(draft, other.draft):
                found[draft.path] = Pending(draft, Level.STAGED)
        return found

    def check_hidden(self, path: str) -> None:
        """Check that no damaged segment may hide changes of this host at or below ``path``.

        Raises:
            CorruptionError: A segment of the store is damaged.
        """
        for name, error in self._ram.damaged().items():
            raise damaged_segment(name, error, path)

    def is_settled(self, path: str) -> bool:
        """Return whether no draft at or below ``path`` is pending or kept as a conflict.

        Return false if this process cannot read a segment or a draft of the ram tier.
        """
        if self._ram.is_blind():
            return False
        damaged: list[str] = []
        staged = self._staged((SlotState.SEALED, SlotState.CONFLICT), damaged=damaged)
        if any(is_at_or_below(draft.path, path) for draft in staged) or damaged:
            return False
        return not self._nvme.drafts_below(path, conflicts=True)

    def conflicts(self) -> list[tuple[str, str]]:
        """Return the path of each draft in conflict, with a note for the user."""
        found = [(draft.path, KEPT) for draft in self._staged((SlotState.CONFLICT,))]
        stored = self._nvme.drafts_below("", conflicts=True)
        return found + [(item.path, item.note) for item in stored if item.state == "conflict"]

    def kept(self, path: str) -> Draft | None:
        """Return the newest change of ``path`` that is kept as a conflict, or None."""
        found = [draft for draft in self._staged((SlotState.CONFLICT,)) if draft.path == path]
        stored = [item for item in self._nvme.drafts_below(path, conflicts=True) if item.path == path]
        found += [
            draft for item in stored if item.state == "conflict" and (draft := self._decoded.readable(item)) is not None
        ]
        return found[-1] if found else None

    def own(self) -> list[Draft]:
        """Return the sealed drafts in this process's own segments.

        A draft leaves them when the flusher has committed it to the nvme tier or, if there is none, published it.
        """
        own = {segment.id for segment in self._ram.own_segments()}
        slots = [slot for slot in self._ram.drafts((SlotState.SEALED,)) if slot.segment.id in own]
        return [draft for draft in map(self._decoded.in_slot, slots) if draft is not None]

    def _is_newer(self, draft: Draft, other: Draft) -> bool:
        """Return whether a draft in a slab was closed after a draft in the nvme tier.

        A draft is in both tiers until the flusher marks its slot as clean.
        """
        return draft.turn(self._boot) > other.turn(self._boot)

    def _staged(
        self, states: tuple[SlotState, ...] = (SlotState.SEALED,), *, damaged: list[str] | None = None
    ) -> Iterator[Draft]:
        """Yield the drafts in slabs, in closing order. Append the paths of undecodable drafts to ``damaged``."""
        for slot in self._ram.drafts(states):
            draft = self._decoded.in_slot(slot)
            if draft is not None:
                yield draft
            elif damaged is not None:
                damaged += self._decoded.damaged_in_slot(slot)


def paths_pending(state: Path, directory: Path, path: str = "") -> list[str]:
    """Return the paths of pending changes and conflicts at or below ``path`` in local tiers that are not in use here.

    Args:
        directory: The store's directory in it.
        path: Relative to the store's root.

    Raises:
        TierfsError: The tiers cannot be read, and may have pending changes.
    """
    nvme, ram = NvmeReader(directory), RamTier(Host(state), directory.name, budget_bytes=0, clock=SystemClock())
    with contextlib.closing(ram):
        slots = ram.drafts((SlotState.SEALED, SlotState.CONFLICT))
        staged = [slot.segment.meta(slot).decode(errors="replace") for slot in slots]
        for name, error in ram.damaged().items():
            raise damaged_segment(name, error, path)
        for name in ram.unread():
            raise StoreError(f"{name} cannot be opened, and may hold pending changes: {ram.why_unread}", tier="ram")
        stored = [draft.path for draft in nvme.drafts_below(path, conflicts=True)]
    return sorted({*stored, *(name for name in staged if is_at_or_below(name, path))})


def damaged_segment(name: str, error: Exception, path: str) -> TierfsError:
    """Return the error for a path whose changes may be in a damaged segment, or one of another version."""
    if isinstance(error, FormatError):
        return FormatError(f"{path or 'a file'} may have a change in a segment: {error}", path=path, tier="ram")
    what = f"{path}: {name}" if path else name
    return CorruptionError(
        f"{what} is no longer a valid segment, and may have held the only copy of saved data: {error}: delete that "
        "file to discard it, and save again what is not in the object tier",
        path=path,
        tier="ram",
    )
