"""An index of the drafts in segments by path. The time of a look-up does not grow with the number of pending drafts."""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping

from tierfs.host.pending.decoded import DecodedDrafts
from tierfs.host.pending.record import Draft
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment, Slot
from tierfs.host.slab.table import SlotState


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

    def __repr__(self) -> str:
        return f"StagedIndex({len(self._places)} paths)"

    def newest(self, path: str) -> tuple[Draft | None, bool]:
        """Return the newest draft of a path, and whether a draft that cannot be decoded may be newer."""
        with self._lock:
            segments = self._refresh()
            slots, damaged = _slots(segments, self._places.get(path, ())), _slots(segments, self._damaged)
        for slot in reversed(slots):
            draft = self._decoded.in_slot(slot)
            if draft is not None and draft.path == path:
                return draft, self._is_hidden(path, [each for each in damaged if _turn(each) > _turn(slot)])
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
    return sorted((slot for slot in found if slot is not None and slot.state is SlotState.SEALED), key=_turn)


def _turn(slot: Slot) -> tuple[int, str, int]:
    """Return the sort key of a slot: the later a slot was sealed, the greater the key."""
    return slot.stamp_ns, slot.segment.id, slot.serial
