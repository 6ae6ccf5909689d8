"""Allocate slots in the shared-memory segments of this process; add segments and release them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tierfs.clock import Clock
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError, InvalidInputError, ReadOnlyError, TierfsError
from tierfs.host.host import SMALL_SHM, Host
from tierfs.host.private import make_private
from tierfs.host.slab.budget import LOCK, RamBudget
from tierfs.host.slab.eviction import Eviction
from tierfs.host.slab.growth import next_layout, wished_layout
from tierfs.host.slab.memory import memory_available, memory_limit
from tierfs.host.slab.new_segment import adopt, make_header, make_in
from tierfs.host.slab.segment import Segment, Slot
from tierfs.host.slab.segment_file import Reservation, SegmentHeader
from tierfs.host.slab.table.table import Layout, SlotKind, padded
from tierfs.threads import start_daemon
from tierfs.units import format_bytes

# Eviction by watermark starts when the process's segments hold this much data.
KEPT_BYTES = 64 << 20
# If the budget allows only a smaller segment, copies are evicted first: each segment needs descriptors.
WORTHWHILE_BYTES = 32 << 20
POLL_S_MIN = 0.001
POLL_S_MAX = 0.05
WORTHWHILE = 32
# This fraction (1/16) of memory is never taken, however large the budget is.
MEMORY_SPARED = 16
_logger = logging.getLogger("tierfs.local")


class SegmentPool:
    """The segments that this process writes into. Thread-safe.

    Attributes:
        own: The segments.
        waits: Number of runs that waited for room.
        waited_s: Total time of these waits, in seconds.
        eviction: Frees slots that hold copies.
        why_not: Why the last attempt to create a segment's file failed; empty if it succeeded.
    """

    def __init__(
        self, host: Host, store: str, ram_budget: RamBudget, *, budget_bytes: int, data_bytes_max: int, clock: Clock
    ) -> None:
        self._host = host
        self._store = store
        self._ram_budget = ram_budget
        self._budget_bytes = budget_bytes
        self._data_bytes_max = data_bytes_max
        self._worthwhile = min(WORTHWHILE_BYTES, budget_bytes // WORTHWHILE)
        self._clock = clock
        self._lock = threading.Lock()  # protects the fields below; never held for long
        self.own: tuple[Segment, ...] = ()
        self._ahead: threading.Thread | None = None
        self._closed = False
        self._is_claimed = False  # whether a process claimed a segment since this one last allocated a slot
        self._small_said = self._removed_said = False
        self.waits = 0
        self.waited_s = 0.0
        self.eviction = Eviction()
        self.why_not = ""
        self._growing = threading.Lock()

    def __repr__(self) -> str:
        return f"SegmentPool({len(self.own)} segments, waits={self.waits}, {self.eviction!r})"

    def take(
        self,
        kind: SlotKind,
        runs: Sequence[Sequence[int]],
        *,
        timeout_s: float | None,
        on_wait: Callable[[], None] | None,
        spares_copies: bool,
    ) -> list[list[Slot] | None]:
        """Allocate runs of slots; see `RamTier.take_runs`. The timeout applies to each run, and so does ``on_wait``.

        Returns:
            One list of slots for each run. If a run finds no room before the timeout, its entry is None, and so is that
            of each later run that did not fit at once.
        """
        found: list[list[Slot] | None] = [None] * len(runs)
        asked_s = self._clock.monotonic()
        try:
            self._fit_all(kind, runs, found)
            for number, lengths in enumerate(runs):
                if found[number] is not None:
                    continue
                left = [runs[other] for other, slots in enumerate(found) if slots is None]
                known = _size(itertools.chain.from_iterable(left)) if len(left) > 1 else 0
                slots = self._make_room(kind, lengths, known, spares_copies=spares_copies)
                if slots is None and (timeout_s is None or timeout_s > 0):
                    held = Counter[Segment]()
                    for slot in itertools.chain.from_iterable(filter(None, found)):
                        held[slot.segment] += padded(slot.length)
                    slots = self._wait(kind, lengths, timeout_s, on_wait, held)
                found[number] = slots
                if slots is None:
                    break
                self._fit_all(kind, runs, found)
        except BaseException:
            give_back(found)
            raise
        self._is_claimed = False
        if len(runs) > 1 and not spares_copies and None not in found:
            self.eviction.note_save(_size(itertools.chain.from_iterable(runs)), asked_s)
        return found

    def grow_ahead(self) -> None:
        """Start a thread that allocates memory for another save like the last, if dirty data leaves no room for one.

        Touching new memory is several times slower than copying into it, so this happens before the next save needs it.
        Memory beyond that of two saves is allocated on demand.
        """
        if self._is_claimed:
            return
        own = self._in_use()
        kept = sum(sums.filling + sums.dirty for sums in (segment.sums() for segment in own))
        missing = 2 * min(kept, self.eviction.last_save_bytes or kept) - sum(segment.data_bytes for segment in own)
        if missing <= 0:
            return
        with self._lock:
            if self._closed or (self._ahead is not None and self._ahead.is_alive()):
                return
            # A daemon thread: a process that exits does not wait for it, and another process removes the unfinished
            # segment.
            self._ahead = start_daemon(self._grow_quietly, missing, name="ram-ahead")

    def evict_ahead(self) -> None:
        self.eviction.ahead(self._in_use())

    def removed(self) -> list[Segment]:
        """Return the own segments whose file was removed while they hold dirty data or slots being filled."""
        return [segment for segment in self.own if segment.is_removed() and _is_needed(segment)]

    def _leave_removed(self, segment: Segment) -> None:
        """Retire a segment whose file was removed: no other process could open it."""
        if segment.is_removed() and not segment.retired:
            segment.retire(although_needed=True)
            if not self._removed_said:
                self._removed_said = True
                _logger.warning(
                    "%s was removed while in use, and is no longer used: data staged in it is lost unless the "
                    "flusher had it open; if a logout removed it, see systemd-logind's RemoveIPC",
                    segment.path,
                )

    def give_back_claimed(self) -> int:
        """See `RamTier.give_back_claimed`."""
        claimed = [segment for segment in self.own if segment.retired]
        self._is_claimed = self._is_claimed or bool(claimed)
        return sum(map(self._give_back, claimed))

    def _give_back(self, segment: Segment) -> int:
        """Remove an own segment, or shed it if a slot is dirty or being filled. Return the bytes released."""
        before = segment.memory_bytes
        with contextlib.suppress(ReadOnlyError):  # another thread closed it
            if segment.retire():
                self._drop(segment)
                return before
            segment.shed()
            return before - segment.memory_bytes
        return 0

    def close(self) -> None:
        """Release all segments. Dirty data stays for the flusher; the memory of copies is released.

        If a process ends without this call, its segments stay as a cache until another process needs the room.
        """
        with self._lock:
            self._closed = True
            ahead = self._ahead
        if ahead is not None:
            ahead.join()
        with self._growing:
            for segment in self.own:
                # Under the host's lock, because other processes may adopt the segment from then on.
                with self._host.locked(LOCK):
                    if not segment.is_dirty():
                        self._drop(segment)
                    else:
                        segment.shed()
                        segment.disown()
                        self._forget(segment)
                segment.close()

    def _fit(self, kind: SlotKind, lengths: Sequence[int]) -> list[Slot] | None:
        found: list[list[Slot] | None] = [None]
        self._fit_all(kind, [lengths], found)
        return found[0]

    def _fit_all(self, kind: SlotKind, runs: Sequence[Sequence[int]], found: list[list[Slot] | None]) -> None:
        """Allocate the runs that fit into the segments as they are. Locks each segment at most once."""
        for segment in self.own:
            left = [number for number, slots in enumerate(found) if slots is None]
            if not left:
                break
            with contextlib.suppress(ReadOnlyError):  # another thread dropped it
                if segment.is_known_full([runs[number] for number in left]):
                    continue
                self._leave_removed(segment)
                taken = segment.take_runs(kind, [runs[number] for number in left])
                for number, slots in zip(left, taken, strict=True):
                    found[number] = slots

    def _make_room(
        self, kind: SlotKind, lengths: Sequence[int], known: int = 0, *, spares_copies: bool = False
    ) -> list[Slot] | None:
        """Allocate slots by evicting or by adding a segment, without waiting. ``known`` bytes are wanted in all."""
        self.give_back_claimed()
        if not spares_copies and self._held() >= min(KEPT_BYTES, self._budget_bytes // 2):
            self.eviction.to_watermark(self._in_use())
        slots = self._fit(kind, lengths)
        if slots is None and not spares_copies:
            slots = self._evict_until(kind, lengths, known, before_s=int(self.eviction.last_save_s))
        if slots is not None:
            return slots
        with self._growing:
            slots = self._fit(kind, lengths)  # another thread may have added a segment
            if slots is None and self._grow(_size(lengths), known, least=self._worthwhile):
                slots = self._fit(kind, lengths)
        if slots is None and spares_copies:
            # room for several slots, so that not each of them asks for a segment
            self.eviction.to_watermark(self._in_use())
            slots = self._fit(kind, lengths)
        slots = slots or self._evict_until(kind, lengths, known)
        if slots is not None:
            return slots
        with self._growing:
            return self._fit(kind, lengths) if self._grow(_size(lengths), known) else None

    def _wait(
        self,
        kind: SlotKind,
        lengths: Sequence[int],
        timeout_s: float | None,
        on_wait: Callable[[], None] | None,
        held: Mapping[Segment, int],
    ) -> list[Slot] | None:
        started, delay_s = self._clock.monotonic(), POLL_S_MIN
        with self._lock:
            self.waits += 1
        if on_wait is not None:
            on_wait()
        waited_s = 0.0
        try:
            while timeout_s is None or waited_s < timeout_s:
                with self._host.locked(LOCK):
                    self._ram_budget.claim(self._budget_bytes, self._clock.monotonic())
                self._clock.sleep(delay_s if timeout_s is None else min(delay_s, timeout_s - waited_s))
                delay_s = min(2 * delay_s, POLL_S_MAX)
                is_last = not self._may_come(_size(lengths), held)
                slots = self._make_room(kind, lengths)
                waited_s = self._clock.monotonic() - started
                if slots is not None or is_last:
                    return slots
        finally:
            with self._lock:
                self.waited_s += waited_s
        return None

    def _may_come(self, length: int, held: Mapping[Segment, int]) -> bool:
        """Return whether waiting may bring room for this many bytes.

        Another process may release some, or data of this process may be published or discarded.

        Args:
            length: Bytes wanted.
            held: Bytes in each segment that the waiting thread allocated for the same request: these stay.
        """
        own = self.own
        # Bytes that no conflict keeps may be free now, and taken by another thread the next moment.
        for one in own:
            kept = held.get(one, 0)
            if one.awaits(kept) or (not one.retired and one.data_bytes - one.sums().dirty - kept >= length):
                return True
        names = {str(segment.header.name) for segment in own}
        files = self._ram_budget.files()
        if any(str(file.name._replace(suffix="slab")) not in names for file in files):
            return True
        # Only the budget, and other use of the machine's memory, can be in the way now.
        return self._budget_bytes - sum(file.size for file in files) >= Layout.for_data(length).size

    def _in_use(self) -> list[Segment]:
        """Return the segments that are not retired."""
        return [segment for segment in self.own if not segment.retired]

    def _held(self) -> int:
        return sum(segment.data_bytes for segment in self.own)

    def _evict_until(
        self, kind: SlotKind, lengths: Sequence[int], known: int, *, before_s: float = math.inf
    ) -> list[Slot] | None:
        freed = 0
        with contextlib.closing(self.eviction.one_by_one(self.own, before_s)) as evicted:
            for bytes_ in evicted:
                freed += bytes_
                if 0 < known <= freed or (freed and not known):
                    slots = self._fit(kind, lengths)
                    if slots is not None:
                        return slots
        return self._fit(kind, lengths) if freed else None

    def _grow_quietly(self, missing: int) -> None:
        with self._growing:
            try:
                length = min(missing, CHUNK_BYTES, self._data_bytes_max)
                self._grow(length, missing, least=self._worthwhile, ahead=True)
            except (TierfsError, OSError) as error:
                # A later request for the room tries again and reports the error.
                _logger.debug("no segment was made ahead: %s", error)

    def _grow(self, length: int, known: int = 0, *, least: int = 0, ahead: bool = False) -> bool:
        """Add a segment if the budget allows one with ``least`` bytes of data, or with all the data wished for.

        With ``ahead``, no segment is adopted or removed for it. Returns whether a segment was added.

        Raises:
            InvalidInputError: The tier was closed.
            StoreError: No segment can be made.
        """
        with self._host.locked(LOCK):
            if self._closed:
                raise InvalidInputError("the ram tier was closed", tier="ram")
            make_private(self._ram_budget.directory)  # another process may have removed it
            least = min(least, self._wish(length, known).data_bytes)
            layout = self._plan(length, known)
            if not ahead and (layout is None or layout.data_bytes < least):
                self._ram_budget.sweep()
                if self._adopt_or_reap(length):
                    return True
                layout = self._plan(length, known) or (None if least else self._plan_instead(length))
            if layout is None or layout.data_bytes < least:
                return False
            header = make_header(layout, store=self._store, owner=self._host.owner(), number=next(_numbers))
            reservation = self._reserve(header, self._ram_budget.folders)
        # No thread waits for memory that is allocated ahead, and training wants the processors.
        threads = 1 if ahead else None
        while reservation is not None:
            try:
                segment = make_in(reservation, threads=threads, stopped=self._is_closed)
            except CapacityError as error:  # noqa: PERF203 - another process filled this folder: try the next
                self.why_not = str(error)
                folders = self._ram_budget.folders
                with self._host.locked(LOCK):
                    reservation = self._reserve(header, folders[folders.index(reservation.path.parent) + 1 :])
            else:
                if segment is None:
                    return False
                with self._host.locked(LOCK):
                    segment.path = reservation.finish()
                return self._begin(segment)
        return False

    def _reserve(self, header: SegmentHeader, folders: Sequence[Path]) -> Reservation | None:
        """Create a segment's file in the first of these folders that has room. The caller holds the host's lock."""
        files = self._ram_budget.files()
        for folder in folders:
            try:
                make_private(folder)  # another process may have removed it
                if header.layout.size > self._ram_budget.free_bytes(folder, files):
                    self.why_not = f"{folder} has no room for a segment of {format_bytes(header.layout.size)}"
                    continue
                reservation = Reservation(folder, header)
            except CapacityError as error:
                # Not even a file without memory can be made there. The pool waits for room, as it does for memory.
                self.why_not = str(error)
                continue
            if folder != self._ram_budget.folders[0] and not self._small_said:
                self._small_said = True
                _logger.warning("%s (%s)", SMALL_SHM, self.why_not)
            self.why_not = ""
            return reservation
        return None

    def _plan(self, length: int, known: int = 0) -> Layout | None:
        files = self._ram_budget.files()
        # Reserved memory is not in use yet, but promised. The spared part keeps the machine from running out.
        promised = sum(file.missing for file in files)
        spare = memory_available() - promised - memory_limit() // MEMORY_SPARED
        room = min(self._budget_bytes - sum(file.size for file in files), spare)
        return next_layout(length, wish=self._wish(length, known), room=room, data_bytes_max=self._data_bytes_max)

    def _wish(self, length: int, known: int) -> Layout:
        return wished_layout(length, held=self._held(), data_bytes_max=self._data_bytes_max, known=known)

    def _plan_instead(self, length: int) -> Layout | None:
        """Release own segments that are too small for this length, then plan one.

        Of a segment with a conflict, only the clean part is released.
        """
        for segment in self.own:
            # Slots that are being filled or flushed are soon free, and their memory is mapped already.
            if segment.data_bytes < length and not segment.awaits():
                self._give_back(segment)
        return self._plan(length)

    def _begin(self, segment: Segment) -> bool:
        """Add a segment to the own ones."""
        with self._lock:
            self.own = (*self.own, segment)
        return True

    def _adopt_or_reap(self, length: int) -> bool:
        """Adopt a segment that a dead process of this store left, because its memory is allocated already.

        If none is suitable, remove segments of dead processes until a new one fits. Return whether one was adopted.
        """
        orphans = self._ram_budget.orphans()
        for orphan in orphans:
            is_whole = orphan.memory_bytes == orphan.size
            if orphan.store == self._store and is_whole and orphan.data_bytes >= length:
                try:
                    segment = adopt(orphan.path, self._host.owner())
                except TierfsError as error:
                    _logger.warning("a segment of a dead process cannot be reused: %s", error)
                    continue
                return self._begin(segment)
        for orphan in orphans:
            if self._plan(length) is not None:
                break
            orphan.unlink()
        return False

    def _is_closed(self) -> bool:
        return self._closed

    def _drop(self, segment: Segment) -> None:
        """Remove a segment. Its memory is released with the last slot or view of it."""
        segment.unlink()
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        with self._lock:
            self.own = tuple(own for own in self.own if own is not segment)


def _is_needed(segment: Segment) -> bool:
    sums = segment.sums()
    return bool(sums.filling or sums.dirty)


def _size(lengths: Iterable[int]) -> int:
    """Return the bytes of memory that slots of these lengths take."""
    return sum(map(padded, lengths))


def give_back(runs: Iterable[Iterable[Slot] | None]) -> None:
    """Free slots that were allocated and not filled."""
    for slot in itertools.chain.from_iterable(filter(None, runs)):
        slot.segment.give(slot)


# Numbers of the segments that this process makes, for any store. A forked child has another id, and may go on counting.
_numbers = itertools.count(1)
