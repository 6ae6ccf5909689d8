"""Which copies in this process's segments make room for what is written, and when."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable

from tierfs.errors import ReadOnlyError
from tierfs.host.slab.segment import Segment, Slot, SlotKind, SlotState
from tierfs.host.slab.table.table import padded

__all__ = ["Eviction"]

# Below what whole chunks take of a segment that they fill.
HIGH_WATERMARK = 0.9
LOW_WATERMARK = 0.85
# What is taken within so many seconds is of one save.
SAVE_S = 2.0


class Eviction:
    """Frees clean slots. Safe for use by many threads.

    Attributes:
        bytes: What was evicted.
        last_save_bytes: What was taken for the last save; 0 before the first.
        last_save_s: When that began.
    """

    def __init__(self) -> None:
        self._alone = threading.Lock()
        # The segments and their changes, when room was made ahead last. By their ids: their memory is not to stay for this.
        self._tried: list[tuple[str, int]] = []
        self.bytes = 0
        self.last_save_bytes, self.last_save_s = 0, 0.0

    def __repr__(self) -> str:
        return f"Eviction({self.bytes} bytes)"

    def note_save(self, bytes_: int, now_s: float) -> None:
        """Say that so many bytes were taken at once, to be saved."""
        if now_s - self.last_save_s < SAVE_S:
            self.last_save_bytes += bytes_
        else:
            self.last_save_bytes, self.last_save_s = bytes_, now_s

    def ahead(self, segments: list[Segment]) -> None:
        """Evict what a save like the last one would have to, so that training does not wait for it; but nothing that came since then."""
        wanted, since_s = self.last_save_bytes, self.last_save_s
        with self._alone:
            if self._tried == [(segment.id, segment.changes) for segment in segments]:
                return
            free = sum(segment.data_bytes - sum(segment.sums()) for segment in segments)
            for slot in evictable(segments) if free < wanted else ():
                if free >= wanted:
                    break
                if slot.segment.used_s(slot) < int(since_s):  # which sealing is, too
                    free += self._evict(slot)
            self._tried = [(segment.id, segment.changes) for segment in segments]

    def to_watermark(self, segments: list[Segment]) -> None:
        """Evict a tenth of what these segments hold, if they are all but full."""
        total = sum(segment.data_bytes for segment in segments)
        used = sum(sum(segment.sums()) for segment in segments)
        if used > HIGH_WATERMARK * total:
            with self._alone:
                for slot in evictable(segments):
                    if used <= LOW_WATERMARK * total:
                        break
                    used -= self._evict(slot)

    def one_by_one(self, segments: Iterable[Segment], before_s: float) -> Generator[int, None, None]:
        """Evict what is of no use, and what was used last before this time, for as long as the caller goes on asking.

        The time is a whole second: a slot notes no more of its own. Yields the bytes of each.
        """
        with self._alone:
            for slot in evictable(segments):
                if _is_useless(slot) or slot.segment.used_s(slot) < before_s:
                    yield self._evict(slot)

    def _evict(self, slot: Slot) -> int:
        """Free a clean slot; returns how many bytes that were."""
        try:
            freed = padded(max(slot.length, 1)) if slot.segment.give(slot, only_clean=True) else 0
        except ReadOnlyError:  # dropped meanwhile
            return 0
        self.bytes += freed
        return freed


def evictable(segments: Iterable[Segment]) -> list[Slot]:
    """The clean slots: those of no use first, then as they were used."""
    clean = [slot for segment in segments for slot in segment.slots(states={SlotState.CLEAN})]
    return sorted(clean, key=lambda slot: (not _is_useless(slot), slot.segment.used_s(slot), slot.stamp_ns))


def _is_useless(slot: Slot) -> bool:
    """Whether nobody reads a clean slot any more: a lower tier has the draft, or the chunk is hidden."""
    return slot.hidden or slot.kind is SlotKind.DRAFT
