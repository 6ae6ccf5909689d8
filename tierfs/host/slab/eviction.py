"""The choice of clean copies to evict from this process's segments, and of the time to do it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable

from tierfs.errors import ReadOnlyError
from tierfs.host.slab.segment import Segment, Slot
from tierfs.host.slab.table.table import SlotKind, SlotState, padded

# Lower than the share of a segment that whole chunks can fill.
HIGH_WATERMARK = 0.9
LOW_WATERMARK = 0.85
# Allocations within this time belong to one save.
SAVE_S = 2.0


class Eviction:
    """Frees clean slots. Thread-safe.

    Attributes:
        bytes: Bytes evicted so far.
        last_save_bytes: Bytes allocated for the last save; 0 before the first.
        last_save_s: When the last save began, in seconds of the host's monotonic clock.
    """

    def __init__(self) -> None:
        self._alone = threading.Lock()
        # The segments and their counters of changes at the last call of `ahead`. By id, so as not to keep their memory.
        self._tried: list[tuple[str, int]] = []
        self.bytes = 0
        self.last_save_bytes, self.last_save_s = 0, 0.0

    def __repr__(self) -> str:
        return f"Eviction({self.bytes} bytes)"

    def note_save(self, bytes_: int, now_s: float) -> None:
        """Record that a save allocated this many bytes at once."""
        if now_s - self.last_save_s < SAVE_S:
            self.last_save_bytes += bytes_
        else:
            self.last_save_bytes, self.last_save_s = bytes_, now_s

    def ahead(self, segments: list[Segment]) -> None:
        """Evict until a save like the last one fits, so that training does not wait for it.

        Slots that were used since that save stay.
        """
        wanted, since_s = self.last_save_bytes, self.last_save_s
        with self._alone:
            if self._tried == [(segment.id, segment.changes) for segment in segments]:
                return
            free = sum(segment.data_bytes - sum(segment.sums()) for segment in segments)
            for slot in evictable(segments) if free < wanted else ():
                if free >= wanted:
                    break
                if slot.segment.used_s(slot) < int(since_s):  # sealing counts as use
                    free += self._evict(slot)
            self._tried = [(segment.id, segment.changes) for segment in segments]

    def to_watermark(self, segments: list[Segment]) -> None:
        """If these segments are more than 90 % full, evict until they are 85 % full."""
        total = sum(segment.data_bytes for segment in segments)
        used = sum(sum(segment.sums()) for segment in segments)
        if used > HIGH_WATERMARK * total:
            with self._alone:
                for slot in evictable(segments):
                    if used <= LOW_WATERMARK * total:
                        break
                    used -= self._evict(slot)

    def one_by_one(self, segments: Iterable[Segment], before_s: float) -> Generator[int, None, None]:
        """Evict useless slots, and slots last used before this time, one for each value that the caller consumes.

        ``before_s`` is a whole second, because a slot records whole seconds. Yields the bytes of each slot.
        """
        with self._alone:
            for slot in evictable(segments):
                if _is_useless(slot) or slot.segment.used_s(slot) < before_s:
                    yield self._evict(slot)

    def _evict(self, slot: Slot) -> int:
        """Free a slot if it is clean. Return the bytes freed."""
        try:
            freed = padded(max(slot.length, 1)) if slot.segment.give(slot, only_clean=True) else 0
        except ReadOnlyError:  # its segment was closed meanwhile
            return 0
        self.bytes += freed
        return freed


def evictable(segments: Iterable[Segment]) -> list[Slot]:
    """Return the clean slots: useless ones first, then least recently used first."""
    clean = [slot for segment in segments for slot in segment.slots(states={SlotState.CLEAN})]
    return sorted(clean, key=lambda slot: (not _is_useless(slot), slot.segment.used_s(slot), slot.stamp_ns))


def _is_useless(slot: Slot) -> bool:
    """Return whether no process reads a clean slot any more: it is hidden, or a draft that a lower tier has."""
    return slot.hidden or slot.kind is SlotKind.DRAFT
