"""Allocate slots in the shared-memory segments of this process; add segments and give them back.

A request for slots that finds no room evicts clean copies or adds a segment. A request that can have neither waits,
with nothing taken, so that no two processes wait for each other's memory. Each process that sees another one wait gives
back a segment a second. A thread adds segments ahead of requests. It holds no lock while memory is allocated, and a
request that adds a segment discards the unfinished one. A file that does not fit into the budget gets segments on the
disk of the state directory. They are removed as soon as they hold copies alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from tierfs.clock import Clock
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import (
    CapacityError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    TierfsError,
)
from tierfs.host.filesystems import make_private
from tierfs.host.host import SMALL_SHM, Host
from tierfs.host.slab.allocate import allocate_idly
from tierfs.host.slab.budget import LOCK, RamBudget
from tierfs.host.slab.memory import memory_available, memory_limit
from tierfs.host.slab.segment import Segment, Slot
from tierfs.host.slab.segment_file import Reservation, SegmentHeader
from tierfs.host.slab.table import Layout, SlotKind, SlotState, padded
from tierfs.threads import start_daemon
from tierfs.units import format_bytes

# A store with a few small files takes this much shared memory; one with a whole chunk takes the second.
FIRST_DATA_BYTES = 2 << 20
CHUNKS_DATA_BYTES = 64 << 20
# A segment for whole chunks is larger by this for small slots: otherwise a shard file's header would need another.
SMALL_BYTES = 1 << 20
# Copies are evicted before memory is added once the process holds this much, and twice the request.
KEPT_BYTES = 64 << 20
# An eviction frees this fraction (1/16) of the process's memory at least: each one sorts all clean slots.
EVICTED_SHARE = 16
# This fraction (1/16) of memory is never taken, however large the budget is.
MEMORY_SPARED = 16
# A segment that is made ahead has as many times the longest run that is expected, so that little of it stays unused, and
# at least so many bytes. A request that comes meanwhile discards what is made of it.
AHEAD_RUNS = 16
AHEAD_BYTES = 256 << 20
# This fraction (1/32) of a request is added to it: the ends of segments that are too short for a run stay unused.
ENDS_SHARE = 32
# A process of its own allocates this much and more ahead. Less takes about as long as it takes to start.
IDLY_BYTES = 64 << 20
JOIN_S = 5.0  # how long closing waits for the thread that adds memory
POLL_S_MIN = 0.001
POLL_S_MAX = 0.05
_logger = logging.getLogger("tierfs.local")


class SegmentPool:
    """The segments that this process writes into. Thread-safe.

    Attributes:
        own: The segments.
        waits: Number of requests that waited for room.
        waited_s: Total time of these waits, in seconds.
        evicted_bytes: Bytes evicted so far.
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
        self._clock = clock
        self._lock = threading.Lock()  # protects the fields below; never held for long
        self.own: tuple[Segment, ...] = ()
        self._ahead: threading.Thread | None = None
        self._unfinished: Reservation | None = None  # whose memory that thread allocates
        self._closed = False
        self._small_said = self._removed_said = False
        self._requests = self._waiting = 0  # that got their slots; that wait now
        self._is_new = False  # whether there was a request, not for a copy, since memory was last added ahead
        self._largest = self._longest = 0  # bytes of the largest request, and of the longest run
        self._share = budget_bytes  # no more memory is added ahead
        self._inherits = False  # whether it has segments of dead processes, whose copies make room first
        self.waits = 0
        self.waited_s = 0.0
        self.evicted_bytes = 0
        self.why_not = ""
        self._growing = threading.Lock()
        self._evicting = threading.Lock()

    def take(
        self,
        kind: SlotKind,
        runs: Sequence[Sequence[int]],
        *,
        timeout_s: float | None,
        on_wait: Callable[[], None] | None,
        spares_copies: bool,
    ) -> list[list[Slot]] | None:
        """Allocate runs of slots, all or none; see `RamTier.take_runs`.

        Returns:
            The slots of each run. None if there was no room before the timeout, or none can come.
        """
        slots = self._take_now(kind, runs, spares_copies=spares_copies)
        if slots is not None or (timeout_s is not None and timeout_s <= 0):
            return slots
        started, waited_s, delay_s = self._clock.monotonic(), 0.0, POLL_S_MIN
        with self._lock:
            self.waits += 1
            self._waiting += 1
        try:
            if on_wait is not None:
                on_wait()
            while timeout_s is None or waited_s < timeout_s:
                requests, is_quiet = self._requests, self._is_quiet(runs)
                slots = self._take_now(kind, runs, spares_copies=spares_copies)
                # A thread that took the room during the attempt gives it back later.
                if slots is not None or (is_quiet and requests == self._requests and self._is_quiet(runs)):
                    return slots
                self._ram_budget.ask_for_room()
                self._clock.sleep(delay_s if timeout_s is None else min(delay_s, timeout_s - waited_s))
                delay_s = min(2 * delay_s, POLL_S_MAX)
                waited_s = self._clock.monotonic() - started
            return self._take_now(kind, runs, spares_copies=spares_copies)
        finally:
            with self._lock:
                self._waiting -= 1
                self.waited_s += waited_s

    def take_on_disk(self, kind: SlotKind, runs: Sequence[Sequence[int]]) -> list[list[Slot]] | None:
        """Allocate runs of slots, all or none, in segments on the disk of the state directory, beyond the budget.

        Returns:
            The slots of each run. None if the disk has no room.
        """
        found: list[list[Slot] | None] = [None] * len(runs)
        try:
            while not self._fit_all(list(filter(self._is_on_disk, self.own)), kind, runs, found):
                left = [lengths for lengths, slots in zip(runs, found, strict=True) if slots is None]
                with self._growing:
                    if not self._grow_on_disk(_longest(left), _size(itertools.chain.from_iterable(left))):
                        free(found)
                        return None
        except BaseException:
            free(found)
            raise
        return [slots for slots in found if slots is not None]

    def _is_on_disk(self, segment: Segment) -> bool:
        return segment.path.parent == self._ram_budget.overflow

    def prepare(self, wanted: int, longest: int, share: int) -> None:
        """See `RamTier.prepare`."""
        if wanted <= share and longest <= self._data_bytes_max:
            with self._lock:
                self._largest, self._longest = max(self._largest, wanted), max(self._longest, longest)
                self._share, self._is_new = share, True
            self.grow_ahead()

    def grow_ahead(self) -> threading.Thread | None:
        """Start a thread that adds memory for another request like the largest, beside the last one and all dirty data.

        Touching new memory is several times slower than copying into it, so this happens before the next save needs it.
        A process without dirty data adds memory at most once after a request: others may want that memory.

        Returns:
            The thread; None if there is enough memory, or it runs already.
        """
        if self._ram_budget.is_room_asked_for():
            return None
        is_new, self._is_new = self._is_new, False
        if not self._missing() or not (is_new or any(map(_needed_bytes, self._in_use()))):
            return None
        with self._lock:
            if self._closed or (self._ahead is not None and self._ahead.is_alive()):
                return None
            # A daemon thread: a process that exits does not wait for it, and another process removes the unfinished
            # segment.
            self._ahead = start_daemon(self._grow_quietly, name="ram-ahead")
            return self._ahead

    def _missing(self) -> int:
        """Return the bytes of memory to be added ahead."""
        own = self._in_use()
        needed = max(sum(map(_needed_bytes, own)), self._largest) + self._largest + self._largest // ENDS_SHARE
        needed = min(needed, self._share)
        return max(needed - sum(segment.data_bytes for segment in own), 0)

    def give_back(self) -> int:
        """See `RamTier.give_back`."""
        leaving = [one for one in self.own if one.retired or (self._is_on_disk(one) and not one.awaits())]
        if not self._waiting and self._ram_budget.is_room_asked_for():
            # One at a time: the next save of a process needs its memory again. What is needed stays in memory.
            leaving += sorted(self._in_use(), key=_needed_bytes)[:1]
        return sum(map(self._give_back, leaving))

    def removed(self) -> list[Segment]:
        """Return the own segments whose file was removed while they hold dirty data or slots being filled."""
        return [segment for segment in self.own if segment.is_removed() and _needed_bytes(segment)]

    def close(self) -> None:
        """Release all segments. Dirty data stays for the flusher; the memory of copies is released.

        If a process ends without this call, its segments stay as a cache until another process needs the room.
        """
        with self._lock:
            self._closed = True
            ahead = self._ahead
        self._discard_unfinished()
        if ahead is not None:
            ahead.join(JOIN_S)
        with self._growing:
            for segment in self.own:
                if segment.is_dirty():
                    segment.shed()
                    segment.disown()
                else:
                    segment.unlink()
                self._forget(segment)
                segment.close()

    def _take_now(
        self, kind: SlotKind, runs: Sequence[Sequence[int]], *, spares_copies: bool
    ) -> list[list[Slot]] | None:
        """Allocate runs of slots, all or none, without waiting for other threads or processes."""
        found: list[list[Slot] | None] = [None] * len(runs)
        wanted = _size(itertools.chain.from_iterable(runs))
        try:
            while not self._fit_all(self._within_budget(own := self.own), kind, runs, found):
                left = [lengths for lengths, slots in zip(runs, found, strict=True) if slots is None]
                held = sum(segment.data_bytes for segment in self._in_use())
                enough = 0 if self._inherits else max(min(KEPT_BYTES, self._budget_bytes // 2), 2 * wanted)
                evicts = not spares_copies and held >= enough
                if not (
                    (evicts and self._evict_for(left))
                    or self._grow_for(left, own, takes_over=not spares_copies)
                    or self._evict_for(left)
                    or self._replace_small(left)
                ):
                    free(found)
                    return None
        except BaseException:
            free(found)
            raise
        with self._lock:
            self._requests += 1
            self._is_new |= not spares_copies
            self._largest, self._longest = max(self._largest, wanted), max(self._longest, _longest(runs))
        return [slots for slots in found if slots is not None]

    def _fit_all(
        self, own: Sequence[Segment], kind: SlotKind, runs: Sequence[Sequence[int]], found: list[list[Slot] | None]
    ) -> bool:
        """Allocate the runs that fit into these segments as they are. Return whether all are allocated."""
        for segment in own:
            left = [number for number, slots in enumerate(found) if slots is None]
            if not left:
                break
            wanted = [runs[number] for number in left]
            with contextlib.suppress(ReadOnlyError):  # another thread dropped it
                if not segment.may_take(wanted):
                    continue
                self._leave_removed(segment)
                taken = segment.take_runs(kind, wanted)
                for number, slots in zip(left, taken, strict=True):
                    found[number] = slots
        return None not in found

    def _leave_removed(self, segment: Segment) -> None:
        """Give back a segment whose file was removed: no other process could open it."""
        if segment.is_removed():
            self._give_back(segment)
            if not self._removed_said:
                self._removed_said = True
                _logger.warning(
                    "%s was removed while in use, and is no longer used: data staged in it is lost unless the "
                    "flusher had it open; if a logout removed it, see systemd-logind's RemoveIPC",
                    segment.path,
                )

    def _is_quiet(self, runs: Sequence[Sequence[int]]) -> bool:
        """Return whether nothing can free room for these runs, except a request that is under way in another thread.

        Then the budget is used up by this process alone, and none of its data is being filled or flushed.
        """
        own = self._within_budget(self.own)
        if any(segment.awaits() for segment in own):
            return False
        names = {str(segment.header.name) for segment in own}
        files = self._ram_budget.files()
        left = self._budget_bytes - sum(file.size for file in files)
        return {str(file.name) for file in files} <= names and left < Layout.for_data(_longest(runs)).size

    def _in_use(self) -> list[Segment]:
        """Return the segments within the budget that are not retired."""
        return [segment for segment in self._within_budget(self.own) if not segment.retired]

    def _within_budget(self, own: Sequence[Segment]) -> list[Segment]:
        return [segment for segment in own if not self._is_on_disk(segment)]

    def _evict_for(self, runs: Sequence[Sequence[int]]) -> bool:
        """Evict copies of as many bytes as these runs need: useless ones first, then by their last use.

        Returns whether any was evicted.
        """
        freed = 0
        with self._evicting:
            segments = self._in_use()
            wanted = _size(itertools.chain.from_iterable(runs))
            wanted = max(wanted, sum(segment.data_bytes for segment in segments) // EVICTED_SHARE)
            for slot in _evictable(segments):
                with contextlib.suppress(ReadOnlyError):  # its segment was closed meanwhile
                    if slot.segment.give(slot, only_clean=True):
                        freed += padded(max(slot.length, 1))
                if freed >= wanted:
                    break
            self.evicted_bytes += freed
        return freed > 0

    def _grow_for(self, runs: Sequence[Sequence[int]], own: Sequence[Segment], *, takes_over: bool) -> bool:
        """Add a segment for these runs, unless another thread changed ``own`` meanwhile. Return whether to try again."""
        with self._growing:
            wanted = _size(itertools.chain.from_iterable(runs))
            return self.own is not own or self._grow(_longest(runs), wanted, takes_over=takes_over)

    def _replace_small(self, runs: Sequence[Sequence[int]]) -> bool:
        """Give back own segments that are too small for the longest run. Return whether that released memory.

        Slots that are being filled or flushed are soon free, so their segments stay.
        """
        small = [one for one in self._in_use() if one.data_bytes < _longest(runs) and not one.awaits()]
        return sum(map(self._give_back, small)) > 0

    def _give_back(self, segment: Segment) -> int:
        """Remove an own segment, or shed it if a slot is dirty or being filled. Return the bytes released."""
        before = segment.memory_bytes
        with contextlib.suppress(ReadOnlyError):  # another thread closed it
            if segment.retire():
                segment.unlink()
                self._forget(segment)
                return before
            segment.shed()
            return before - segment.memory_bytes
        return 0

    def _grow_quietly(self) -> None:
        try:
            while (missing := self._missing()) and not self._ram_budget.is_room_asked_for():
                longest = min(max(self._longest, CHUNK_BYTES), missing, self._data_bytes_max)
                if not self._grow_ahead(longest, min(missing, max(AHEAD_RUNS * longest, AHEAD_BYTES))):
                    break
        except (TierfsError, OSError) as error:
            # A later request for the room tries again and reports the error.
            _logger.debug("no segment was made ahead: %s", error)

    def _grow_ahead(self, longest: int, wanted: int) -> bool:
        """Add a segment that no request waits for, as `_grow` does. Return whether to go on.

        No segment of a dead process is removed for it.
        """
        if self._take_over(longest, threads=1):
            return True
        with self._host.locked(LOCK):
            reservation = self._plan_file(longest, wanted)
            self._unfinished = reservation
        if reservation is None:
            return False
        fd, size = reservation.fd.number, reservation.header.layout.size
        if size >= IDLY_BYTES:
            with contextlib.suppress(OSError):  # no process can be started
                allocate_idly(fd, size, partial(self._is_wanted, reservation), self._discard_unfinished)
        with self._growing:  # a request waits for these few milliseconds, and finds the segment
            with self._lock:
                is_wanted = self._unfinished is reservation
                self._unfinished = None
            # No thread waits for memory that is still missing, and training wants the processors.
            return is_wanted and self._finish(reservation, threads=1)

    def _is_wanted(self, reservation: Reservation) -> bool:
        return self._unfinished is reservation and not self._ram_budget.is_room_asked_for()

    def _discard_unfinished(self) -> None:
        """Release what is being made ahead. Its memory may be in the hands of a process that gets no processor now."""
        with self._lock:
            reservation, self._unfinished = self._unfinished, None
        if reservation is not None:
            reservation.cancel()

    def _grow(self, longest: int, wanted: int, *, takes_over: bool = False) -> bool:
        """Add a segment that holds ``longest`` bytes in one piece.

        With ``takes_over``, that of a dead process is preferred: its memory need not be made. Else the budget decides.
        Returns whether a segment was added.

        Raises:
            InvalidInputError: The tier was closed.
            StoreError: No segment can be made.
        """
        if takes_over and self._take_over(longest):
            return True
        with self._host.locked(LOCK):
            self._discard_unfinished()
            if (reservation := self._plan_file(longest, wanted)) is None:
                orphans = self._ram_budget.orphans()
                while (reservation := self._plan_file(longest, wanted)) is None and orphans:
                    orphans.pop().unlink()
        while reservation is not None and not self._finish(reservation):
            folders = self._ram_budget.folders  # another process filled this folder: try the next
            with self._host.locked(LOCK):
                header = reservation.header
                reservation = self._reserve(header, folders[folders.index(reservation.path.parent) + 1 :])
        return reservation is not None

    def _take_over(self, longest: int, *, threads: int | None = None) -> bool:
        """Add a segment of a dead process that holds ``longest`` bytes in one piece. Return whether there is one."""
        with self._host.locked(LOCK):
            self._check_open()
            make_private(self._ram_budget.directory)  # another process may have removed it
            claimed = self._ram_budget.claim(self._store, longest)
        with contextlib.suppress(CapacityError, CorruptionError, NotFoundError):  # removed or cut short meanwhile
            if claimed is not None:
                self._add(Segment.resume(claimed, threads=threads))
                self._inherits = True
                return True
        return False

    def _plan_file(self, longest: int, wanted: int) -> Reservation | None:
        """Create the file of a segment within the budget. The caller holds the host's lock."""
        self._check_open()
        if (layout := self._plan(longest, wanted)) is None:
            return None
        header = SegmentHeader.new(layout, store=self._store, owner=self._host.owner(), number=next(_numbers))
        return self._reserve(header, self._ram_budget.folders)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError("the ram tier was closed", tier="ram")

    def _finish(self, reservation: Reservation, *, threads: int | None = None) -> bool:
        """Allocate the memory of a segment that is not allocated yet, and add it. Return whether there is memory."""
        try:
            segment = Segment.make(reservation, threads=threads)
        except CapacityError as error:
            self.why_not = str(error)
            return False
        if self._closed:
            reservation.cancel()
            return False
        self._name(segment, reservation)
        return True

    def _grow_on_disk(self, longest: int, wanted: int) -> bool:
        """Add a segment on the disk of the state directory. Return whether it has room for one.

        Raises:
            InvalidInputError: The tier was closed.
            StoreError: No segment can be made.
        """
        folder = self._ram_budget.overflow
        with self._host.locked(LOCK):
            self._check_open()
            make_private(folder)
            for orphan in self._ram_budget.orphans():
                if self._is_on_disk(orphan):
                    orphan.unlink()
            files = self._ram_budget.overflow_files()
            room, held = self._ram_budget.free_bytes(folder, files), sum(file.size for file in files)
            layout = next_layout(longest, wanted, held=held, room=room, data_bytes_max=self._data_bytes_max)
            if layout is None:
                self.why_not = f"{folder} has {format_bytes(max(room, 0))} to spare"
                return False
            header = SegmentHeader.new(layout, store=self._store, owner=self._host.owner(), number=next(_numbers))
            reservation = Reservation(folder, header)
        try:
            # Its pages are not written ahead: on a disk, each would be written twice.
            self._name(Segment.make(reservation, populates=False), reservation)
        except CapacityError as error:
            self.why_not = str(error)
            return False
        return True

    def _name(self, segment: Segment, reservation: Reservation) -> None:
        with self._host.locked(LOCK):
            segment.path = reservation.finish()
        self._add(segment)

    def _add(self, segment: Segment) -> None:
        with self._lock:
            self.own = (*self.own, segment)

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

    def _plan(self, longest: int, wanted: int) -> Layout | None:
        files = self._ram_budget.files()
        # Reserved memory is not in use yet, but promised. The spared part keeps the machine from running out.
        promised = sum(file.missing for file in files)
        spare = memory_available() - promised - memory_limit() // MEMORY_SPARED
        return next_layout(
            longest,
            wanted,
            held=sum(segment.data_bytes for segment in self.own),
            room=min(self._budget_bytes - sum(file.size for file in files), spare),
            data_bytes_max=self._data_bytes_max,
        )

    def _forget(self, segment: Segment) -> None:
        """Take a segment out of the own ones. Its memory is released with the last slot or view of it."""
        with self._lock:
            self.own = tuple(own for own in self.own if own is not segment)


def next_layout(longest: int, wanted: int, *, held: int, room: int, data_bytes_max: int) -> Layout | None:
    """Return the layout of a process's next segment: for the bytes wanted now, or a part of what the process holds.

    That part is an eighth; more than 64 MiB only up to a thirty-second. It keeps the number of segments small if memory
    grows in small steps: each segment needs descriptors in every process that reads the store.

    Args:
        longest: Bytes that must fit in one piece.
        wanted: Bytes wanted in all.
        held: Data bytes of the process's segments.
        room: Remaining budget, in bytes. The segment takes all of it rather than leave too little for the wish.
        data_bytes_max: The most data in a segment, apart from 1 MiB for small slots.

    Returns:
        None if there is not enough room.
    """
    if wanted >= CHUNK_BYTES:
        wanted = max(-(-wanted // CHUNK_BYTES) * CHUNK_BYTES, CHUNKS_DATA_BYTES)
    elif wanted > FIRST_DATA_BYTES // 2:
        wanted += SMALL_BYTES
    part = min(held // 8, max(CHUNKS_DATA_BYTES, held // 32))
    data_bytes = min(max(FIRST_DATA_BYTES, wanted, part), data_bytes_max)
    # Whole chunks, and 1 MiB for small slots, so that no larger rest stays unused.
    chunks = data_bytes // CHUNK_BYTES * CHUNK_BYTES
    wish = Layout.for_data(chunks + SMALL_BYTES if chunks else data_bytes)
    least = Layout.for_data(max(longest, 1))
    layout = max(wish if wish.size <= room else Layout.for_size(room), least, key=lambda one: one.data_bytes)
    return layout if layout.size <= room else None


def _evictable(segments: Iterable[Segment]) -> list[Slot]:
    """Return the clean slots: first those that no process reads any more, then least recently used first."""
    clean = [slot for segment in segments for slot in segment.slots(states={SlotState.CLEAN})]

    def use(slot: Slot) -> tuple[bool, int, int]:
        # A lower tier has a clean draft, and lookups pass over a hidden slot.
        return not (slot.hidden or slot.kind is SlotKind.DRAFT), slot.segment.used_s(slot), slot.stamp_ns

    return sorted(clean, key=use)


def _needed_bytes(segment: Segment) -> int:
    sums = segment.sums()
    return sums.filling + sums.dirty


def _longest(runs: Sequence[Sequence[int]]) -> int:
    return max(map(_size, runs), default=0)


def _size(lengths: Iterable[int]) -> int:
    """Return the bytes of memory that slots of these lengths take."""
    return sum(map(padded, lengths))


def free(runs: Iterable[Iterable[Slot] | None]) -> None:
    """Free slots that were allocated and not filled."""
    for slot in itertools.chain.from_iterable(filter(None, runs)):
        slot.segment.give(slot)


# Numbers of the segments that this process makes, for any store. A forked child has another id, and may go on counting.
_numbers = itertools.count(1)
