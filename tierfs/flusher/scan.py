"""Find drafts to flush in slabs and in the nvme tier, from all processes, and free the leftovers of dead processes."""

from __future__ import annotations

import logging
import threading

from tierfs.clock import boot_id
from tierfs.errors import ConflictError, CorruptionError, FormatError, TierfsError
from tierfs.flusher.queue import FlushItem, FlushStage
from tierfs.flusher.state import FlushState
from tierfs.format.keys import is_at_or_below
from tierfs.host.pending.record import Draft, SlotRef, discard_advice
from tierfs.host.pending.scan import KEPT, damaged_segment
from tierfs.host.slab.segment import Segment, Slot
from tierfs.host.slab.table import SlotKind, SlotState

# Seconds between walks over all drafts. A look at the changes returns each draft once, so an error after it would leave
# the draft behind.
WALK_S = 10.0
_PENDING = (SlotState.SEALED, SlotState.CONFLICT)
_logger = logging.getLogger("tierfs.flush")


class PendingScan:
    """Adds an entry to the queue for each new draft. Thread-safe."""

    def __init__(self, state: FlushState) -> None:
        self._state = state
        self._boot = boot_id()
        self._looking = threading.Lock()  # a concurrent `discover` waits, so that it has the results of this one, too
        self._walk_at_s = float("-inf")
        # Unreadable drafts by write id: the path, the seq in the nvme tier or the slot, and the problem.
        self._lost: dict[bytes, tuple[str, int | Slot, TierfsError]] = {}

    @property
    def unreadable(self) -> int:
        """Number of drafts that were found but cannot be decoded."""
        return len(self._lost)

    def resume(self) -> None:
        """Find the drafts that an earlier flusher left in the nvme tier, then those in slabs.

        Call this before anything is published.
        """
        state = self._state
        if state.nvme is not None:
            for stored in state.nvme.drafts():
                try:
                    draft = Draft.in_nvme(stored)
                except TierfsError as error:
                    self._lost[stored.write_id] = stored.path, stored.seq, error
                    lost = stored.path or "a file"
                    _logger.error("%s is lost: %s (%s)", lost, stored.note, error)  # noqa: TRY400 - a trace adds nothing
                    continue
                turn = draft.turn(self._boot, stored.seq)
                entry = FlushItem(draft, turn, number=stored.seq, level=state.local_level, stage=FlushStage.READY)
                if stored.state == "conflict":
                    entry.fail(ConflictError(stored.note, path=draft.path), float("inf"))
                with state.changed:
                    state.entries.add(entry)
        self.discover()

    def discover(self) -> None:
        """Find drafts that were sealed since the last call.

        The first call, and one every `WALK_S`, walks over all drafts. This method looks at one segment after the other,
        so a look may miss a draft and find a later one of another process. A second look finds all drafts that were
        sealed before those of the first. Drafts that were sealed after those are left for the next call.
        """
        with self._looking:
            now_s, walk_at_s = self._state.clock.monotonic(), self._walk_at_s
            is_walk = now_s >= walk_at_s
            self._walk_at_s = float("-inf")  # if this call fails, the next one walks over all drafts
            found = self._look(walk=is_walk)
            with self._state.changed:
                new_ns = [slot.stamp_ns for slot in found if slot.name not in self._state.entries]
            last_ns = max(new_ns, default=None)
            if last_ns is not None:
                found += self._look(walk=False)
            found.sort(key=lambda slot: slot.turn)
            for slot in found:
                if last_ns is None or slot.stamp_ns <= last_ns:
                    self._take(slot)
                else:
                    slot.segment.put_back_changed_drafts([slot.index])
            self._walk_at_s = now_s + WALK_S if is_walk else walk_at_s

    def _look(self, *, walk: bool) -> list[Slot]:
        """Return the slots of all pending drafts, or of those that changed since the last look."""
        found: list[Slot] = []
        for segment in self._state.ram.segments():
            changed = segment.take_changed_drafts().values()
            if walk:
                found += segment.slots(kind=SlotKind.DRAFT, states=_PENDING)
            else:
                found += [slot for slot in changed if slot is not None and slot.state in _PENDING]
        return found

    def _take(self, slot: Slot) -> None:
        state, segment = self._state, slot.segment
        with state.changed:
            known = state.entries.get(slot.name)
            if known is not None and known.slot is not None:
                return
        where = segment.meta(slot).decode(errors="replace")
        draft = Draft.in_slot(slot)
        if isinstance(draft, TierfsError):
            if slot.name not in self._lost:
                self._lost[slot.name] = where, slot, draft
                _logger.error("a draft cannot be read and stays where it is: %s", draft)
            return
        if draft is None:
            return
        with state.changed:
            known = state.entries.get(draft.write_id)
            if known is None:
                # Look at the slot again. The flusher marks a slot as clean before it removes the entry, so this draft
                # may be finished already.
                now = segment.slot(slot.index)
                if now is None or now.serial != slot.serial or now.state not in _PENDING:
                    return
                entry = FlushItem(draft, draft.turn(self._boot), slot=slot)
                if now.state is SlotState.CONFLICT:
                    entry.fail(ConflictError(f"{draft.path} was {KEPT}", path=draft.path), float("inf"))
                state.entries.add(entry)
                state.changed.notify_all()
                return
        if known.number is not None:
            # An earlier flusher committed the draft and ended before it marked the slots as clean. It may also have
            # marked only some drafts of a conflict.
            state.release(known.draft, slot)

    # -- what cannot be read -------------------------------------------------------------------------------------------

    def check_lost(self, path: str) -> None:
        """Check that no draft at or below ``path`` is unreadable, and no segment, which may have held a draft.

        Raises:
            CorruptionError: A draft or a segment is damaged, so this host's last change there may be lost.
            FormatError: Another version of tierfs wrote the draft.
        """
        for name, error in self._state.ram.damaged().items():
            raise damaged_segment(name, error, path)
        for where, place, error in list(self._lost.values()):
            if not where or is_at_or_below(where, path):
                if isinstance(error, FormatError):
                    raise FormatError(str(error), path=where)
                advice = discard_advice(where)
                if where and isinstance(place, int):  # an unreadable draft in a slab also keeps writers from its path
                    advice = "write it again, or discard it with `tierfs flusher discard`"
                raise CorruptionError(
                    f"{where or 'a file'}: this host's last write is damaged and cannot be recovered: {advice}",
                    path=where,
                    tier="nvme" if isinstance(place, int) else "ram",
                )

    def discard_lost(self, path: str) -> int:
        """Discard the unreadable drafts of ``path``. Return how many."""
        lost = {write_id: place for write_id, (where, place, _) in list(self._lost.items()) if where == path}
        for write_id, place in lost.items():
            if isinstance(place, int):
                assert self._state.nvme is not None
                self._state.nvme.forget_drafts(place)
            else:
                place.segment.mark(place, SlotState.CLEAN)
            del self._lost[write_id]
        return len(lost)

    # -- dead owners ---------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Free slots that dead processes left without a sealed draft."""
        state = self._state
        freed = state.ram.reclaim(self._needed_slots)
        if freed:
            state.counters["reclaimed_bytes"] += freed
            _logger.info("freed %d bytes that dead processes left in slabs", freed)

    def _needed_slots(self, segment: Segment) -> set[int]:
        """Return the indexes of the chunk slots of a segment that drafts still need."""
        state = self._state
        is_blind = state.ram.is_blind()
        # The owner may have sealed a draft right before it died. Look for it first.
        self.discover()
        chunks = segment.slots(kind=SlotKind.CHUNK)
        with state.changed:
            if self._lost or is_blind or state.ram.is_blind():
                # An unreadable draft may need any of these chunks.
                return {chunk.index for chunk in chunks}
            named = {
                reference
                for entry in state.entries
                if entry.slot is not None
                for reference in entry.draft.slots
                if reference is not None and reference.segment == segment.id
            }
            return {
                chunk.index for chunk in chunks if SlotRef.of(chunk) in named or state.entries.is_needed(chunk.name)
            }
