"""Which copies in this process's segments make room for what is written, and when."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable

from tierfs.errors import ReadOnlyError
from tierfs.host.slab.segment import Segment, Slot, SlotState
from tierfs.host.slab.table import padded

__all__ = ["Eviction"]

HIGH_WATERMARK = 0.95
LOW_WATERMARK = 0.85
# What is taken within so many seconds is of one save.
SAVE_S = 2.0


class Eviction:
    """Frees clean slots. Safe for use by many threads.

    Attributes:
        bytes: What was evicted.
    """

    def __init__(self) -> None:
        self._alone = threading.Lock()
        self._last_save = (0, 0.0)  # how many bytes were taken, and from when on
        # The segments and their changes, when room was made ahead last. By their ids: their memory is not to stay for this.
        self._tried: list[tuple[str, int]] = []
        self.bytes = 0

    def __repr__(self) -> str:
        return f"Eviction({self.bytes} bytes)"

    def note_save(self, bytes_: int, now_s: float) -> None:
        """Say that so many bytes were taken at once, to be saved."""
        before, since_s = self._last_save
        is_of_it = now_s - since_s < SAVE_S
        self._last_save = (before + bytes_, since_s) if is_of_it else (bytes_, now_s)

    def ahead(self, segments: list[Segment]) -> None:
        """Evict what a save like the last one would have to, so that training does not wait for it; but nothing that came since then."""
        wanted, since_s = self._last_save
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

    def one_by_one(self, segments: Iterable[Segment]) -> Generator[int, None, None]:
        """Evict all that may be, for as long as the caller goes on asking; yields the bytes of each."""
        with self._alone:
            for slot in evictable(segments):
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
    """The clean slots: hidden ones first, then as they were used."""
    clean = [slot for segment in segments for slot in segment.slots(states={SlotState.CLEAN})]
    return sorted(clean, key=lambda slot: (not slot.hidden, slot.segment.used_s(slot), slot.stamp_ns))
