"""A cache of decoded drafts, so that each draft in the local tiers is decoded once."""

from __future__ import annotations

import threading

from tierfs.errors import CorruptionError, FormatError, TierfsError
from tierfs.host.events import Counters
from tierfs.host.nvme.batch import StoredDraft
from tierfs.host.pending.record import Draft
from tierfs.host.slab.segment import Slot

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

    def __repr__(self) -> str:
        return f"DecodedDrafts({len(self._decoded)}/{DECODED_MAX})"

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
        return self._remember(key, Draft.decode(stored.data, f"{stored.path}: draft {stored.seq} in the nvme tier"))

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
