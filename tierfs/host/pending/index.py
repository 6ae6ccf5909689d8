"""The drafts in segments by path, each decoded once. The time of a look-up does not grow with their number."""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping

from tierfs.errors import CorruptionError, FormatError, TierfsError
from tierfs.host.events import Counters
from tierfs.host.nvme.batch import StoredDraft
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
        known = self._find(key)
        if known is not None:
            return known
        data = slot.segment.read_all(slot)
        if data is None:
            return None
        try:
            draft = Draft.decode(data, f"a draft in slab {slot.segment.id}")
        except TierfsError as error:
            self._counters.say(f"draft:{key}", "a draft cannot be read and is ignored: %s", error)
            return None
        return self._remember(key, draft)

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
        known = self._find(key)
        if known is not None:
            return known
        where = f"{stored.path or 'a file of this host'}: draft {stored.seq} in the nvme tier"
        try:
            return self._remember(key, Draft.decode(stored.data, where))
        except CorruptionError as error:
            of = "" if stored.path else " for the store's root"
            advice = f"discard it with `tierfs flusher discard`{of}, and write it again"
            raise CorruptionError(f"{error}: {advice}", path=stored.path, tier="nvme") from error

    def readable(self, stored: StoredDraft) -> Draft | None:
        """Return a draft in the nvme tier, or log it and return ``None`` if it cannot be decoded."""
        try:
            return self.stored(stored)
        except (CorruptionError, FormatError) as error:
            self._counters.say(f"stored:{stored.seq}", "a draft cannot be read and is ignored: %s", error)
            return None

    def _find(self, key: _Key) -> Draft | None:
        with self._lock:
            return self._decoded.get(key)

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
