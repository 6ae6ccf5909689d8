"""A segment: a region of shared memory with a table of its slots, written by one process and read by all.

The state byte of a slot is its only commit point. Everything else of a slot is written before it becomes SEALED, and it
becomes FREE before any part of it is reused. So a killed process leaves a complete slot or none.

Readers look a slot up, copy its bytes, verify them against known digests, and call `Segment.is_still` where it matters.
They take no lock, unless the table keeps changing while they copy it. Processes that change the table (the owner, or
one that marks a slot) hold its lock for the few bytes concerned, and increment its counter of changes. A copy of the
table is valid only if the counter did not move meanwhile, and stays valid until it does.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import numpy as np

from tierfs._fork import renew_in_children
from tierfs.errors import CorruptionError, InvalidInputError, NotFoundError, ReadOnlyError, StoreError
from tierfs.host.slab.allocate import SlotAllocator, allocate, give_up, map_shared
from tierfs.host.slab.segment_file import (
    SECTOR_BYTES,
    OwnedFd,
    Reservation,
    SegmentHeader,
    TableLock,
    open_segment,
    reopened,
)
from tierfs.host.slab.table import (
    DATA_STATES,
    DIRTY_STATES,
    META_BYTES_MAX,
    NAME_BYTES_MAX,
    SlotKind,
    SlotRow,
    SlotState,
    Sums,
    Table,
    changing,
    padded,
)
from tierfs.host.slab.table_view import TableView

VIEWS_MAX = 3
_U32 = 0xFFFFFFFF
_NOBODY = 0

_MARKS = {SlotState.SEALED: {SlotState.CLEAN, SlotState.CONFLICT}, SlotState.CONFLICT: {SlotState.CLEAN}}
_logger = logging.getLogger("tierfs.local")


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot as it was when it was looked up. Keeps its segment open, but not its contents.

    Attributes:
        segment: The segment that holds the slot.
        index: Its index in the table.
        serial: Number of this use of the table entry; never repeated in a segment.
        kind: Kind of content.
        state: State at the time of the lookup.
        name: Opaque, at most 33 bytes; empty while the slot is being filled.
        offset: Offset of its data in the segment, in bytes; a multiple of 4096.
        length: Length of its data, in bytes.
        stamp_ns: Time of sealing, on the host's monotonic clock.
        hidden: Whether lookups by name pass over the slot.
    """

    segment: Segment
    index: int
    serial: int
    kind: SlotKind
    state: SlotState
    name: bytes
    offset: int
    length: int
    stamp_ns: int
    hidden: bool

    @property
    def turn(self) -> tuple[int, str, int]:
        """The sort key of the order of sealing."""
        return self.stamp_ns, self.segment.id, self.serial


class Segment:
    """A segment as one process has it open. Thread-safe.

    After `close`, and in a forked child, the segment is empty.

    Args:
        fd: An open file of the segment; not kept.
        path: Its file.
        memory: The whole new segment, mapped, if this process is its owner.

    Attributes:
        id: Random; hex.
        store: The uuid of its store, 32 hex digits.
        size: Size of the whole segment, in bytes.
        data_bytes: Capacity for data, in bytes.
        path: Its file, which may have been removed since.
        retired: Whether this process, its owner, allocates no more slots in it.
    """

    def __init__(self, fd: OwnedFd, header: SegmentHeader, path: Path, *, memory: memoryview | None = None) -> None:
        self.header = header
        self.id = header.id
        self.store = header.store
        self.size = header.layout.size
        self.data_bytes = header.layout.data_bytes
        self.path = path
        # An open file description of its own: file descriptors that share one share its flock, too.
        self._fd: OwnedFd | None = OwnedFd(reopened(fd.number))
        self._map = map_shared(fd.number, header.layout.data_at) if memory is None else memory
        self._mapped_whole = memory is not None
        self._lock = TableLock(self._fd)
        self._table = Table(self._map, header.layout)
        self._view_lock = Lock()
        self._view = TableView(header.layout)
        self._allocator: SlotAllocator | None = None
        if memory is not None:
            self._allocator = self._left_free()
        self._unsound_said = False
        self.retired = False
        self._shed_at = -1
        renew_in_children(self)

    @classmethod
    def make(cls, reservation: Reservation, *, threads: int | None = None, populates: bool = True) -> Segment:
        """Make a segment of a reserved file. The caller then calls `Reservation.finish`.

        All its memory is allocated now, which takes a second or two per GiB.

        Args:
            threads, populates: See `allocate`.

        Raises:
            CapacityError: There is not enough memory, or not enough room in the folder. The file is removed.
            StoreError: The segment cannot be made. The file is removed.
        """
        fd, header, path = reservation.fd, reservation.header, reservation.path
        try:
            memory = allocate(fd.number, header.layout.size, str(path), threads=threads, populates=populates)
            fd.write(header.encode())
            segment = cls(fd, header, path, memory=memory)
            segment._table.owner[0] = int(header.creator, 16)
            return segment
        except BaseException:
            reservation.cancel()
            raise

    def _left_free(self) -> SlotAllocator:
        """Return what is free in a segment without dirty data."""
        table, used = self._table, []
        for index in np.flatnonzero(table.states() != SlotState.FREE).tolist():
            row = table.row(index)
            if row.state != SlotState.CLEAN or not row.is_sound(table.layout):
                raise CorruptionError(f"{self} cannot be taken over: slot {index} is damaged", tier="ram")
            used.append((index, row.offset, row.length))
        return SlotAllocator(table.layout, used, int(table.serial.max(initial=0)))

    def claim(self, owner: str) -> None:
        """Become the owner of a segment of a dead process that has no dirty data, in place of that process.

        The caller holds the host's lock, makes sure that the owner is dead, and opens the segment with `resume` next.
        What the dead process was filling is freed. Its copies stay.

        Raises:
            CorruptionError: The table is damaged.
        """
        table = self._table
        with self._lock.held(), changing(table):
            table.set_state(table.states() == SlotState.FILLING, SlotState.FREE)
            self._left_free()
            table.owner[0] = int(owner, 16)

    @classmethod
    def resume(cls, path: Path, *, threads: int | None = None) -> Segment:
        """Open a segment that this process has claimed. All its memory is mapped now. Raises as `attach` and `make`."""
        fd, header = open_segment(path)
        return cls(fd, header, path, memory=allocate(fd.number, header.layout.size, str(path), threads=threads))

    @classmethod
    def attach(cls, path: Path) -> Segment:
        """Open a segment that another process made.

        Raises:
            NotFoundError: The file does not exist.
            CorruptionError: The file is not a segment, its header is damaged, or its size is wrong.
            FormatError: The file has another version, or is left over from an earlier boot.
            StoreError: It cannot be opened.
        """
        fd, header = open_segment(path)
        return cls(fd, header, path)

    @property
    def owner(self) -> str:
        """Id of the process that may allocate slots in it: 16 hex digits; zeros once that process has released it."""
        return f"{int(self._table.owner[0]):016x}"

    @property
    def owned(self) -> bool:
        """Whether this process is the owner."""
        return self._allocator is not None

    @property
    def memory_bytes(self) -> int:
        """Memory that the segment occupies: `size`, less the bytes that `shed` released; 0 once it is closed."""
        fd = self._fd
        return 0 if fd is None else min(os.fstat(fd.number).st_blocks * SECTOR_BYTES, self.size)

    @property
    def changes(self) -> int:
        """A counter that moves whenever any process allocates, seals, marks, hides or frees a slot."""
        return int(self._table.changes[0])

    def may_take(self, runs: Sequence[Sequence[int]]) -> bool:
        """Return whether one of these runs may fit, without a system call. `take_runs` decides."""
        return any(map(self._own().may_take, runs))

    def take_runs(self, kind: SlotKind, runs: Sequence[Sequence[int]]) -> list[list[Slot] | None]:
        """Allocate runs of slots to be filled. The slots of a run are adjacent in memory, each on a page boundary.

        In every other respect they are independent slots. Only the owner may call this.

        Args:
            kind: Kind of content.
            runs: For each run the lengths of its slots, in bytes.

        Returns:
            For each run its slots, or None if it does not fit. A later run may fit nevertheless.

        Raises:
            ReadOnlyError: This process is not the owner.
        """
        now_s = int(time.monotonic()) & _U32
        with self._lock.held():
            allocator = self._own()
            found = [None if self.retired else allocator.take(lengths) for lengths in runs]
            taken = [
                [
                    Slot(self, index, serial, kind, SlotState.FILLING, b"", offset, length, 0, hidden=False)
                    for (index, serial, offset), length in zip(one, lengths, strict=True)
                ]
                if one is not None
                else None
                for one, lengths in zip(found, runs, strict=True)
            ]
            if any(taken):
                with changing(self._table):
                    for slot in itertools.chain.from_iterable(filter(None, taken)):
                        self._table.begin(
                            slot.index,
                            kind=kind,
                            serial=slot.serial,
                            offset=slot.offset,
                            length=slot.length,
                            used_s=now_s,
                        )
        return taken

    def view(self, slot: Slot, last: Slot | None = None) -> memoryview:
        """Return the bytes of a slot, or of a run from ``slot`` to ``last``, without a copy.

        The view is writable for the owner while the slot is being filled, and read-only otherwise. As with `read`, the
        bytes may change while they are read. The view keeps the memory mapped.

        Raises:
            NotFoundError: The segment was closed.
        """
        end = slot if last is None else last
        with self._view_lock:
            bytes_ = self._map_whole()[slot.offset : end.offset + end.length]
        return bytes_ if self.owned and slot.state is SlotState.FILLING else bytes_.toreadonly()

    def whole(self) -> memoryview:
        """Return the whole segment as writable memory, for the owner to register it with a device. Keeps it mapped.

        Raises:
            NotFoundError: The segment was closed.
        """
        with self._view_lock:
            return self._map_whole()

    def _map_whole(self) -> memoryview:
        fd = self._open()
        if not self._mapped_whole:
            self._map, self._mapped_whole = map_shared(fd.number, self.size), True
        return self._map

    def seal(
        self,
        slot: Slot,
        name: bytes,
        meta: bytes,
        *,
        length: int | None = None,
        state: SlotState = SlotState.SEALED,
        stamp_ns: int,
    ) -> Slot:
        """Make a filled slot readable for all processes. Only the owner may call this.

        Args:
            slot: A slot that `take_runs` returned.
            name: At most 33 bytes.
            meta: At most 900 bytes.
            length: Bytes that it holds, if fewer than were allocated; the rest is released.
            state: SEALED (dirty), or CLEAN if another tier has the content.
            stamp_ns: The current time, on the host's monotonic clock.

        Raises:
            ReadOnlyError: This process is not the owner.
            InvalidInputError: The slot is not being filled, an argument is too long, or `state` is invalid.
        """
        length = slot.length if length is None else length
        if not 0 <= length <= slot.length or len(name) > NAME_BYTES_MAX or len(meta) > META_BYTES_MAX:
            raise InvalidInputError(
                f"{length} bytes, a name of {len(name)} and metadata of {len(meta)} bytes do not fit"
            )
        if state not in {SlotState.SEALED, SlotState.CLEAN}:
            raise InvalidInputError(f"a slot is sealed as SEALED or CLEAN, not as {state.name}")
        table, index, used_s = self._table, slot.index, stamp_ns // 1_000_000_000 & _U32
        with self._lock.held():
            self._check_filling(slot)
            table.describe(index, name, meta, length=length, stamp_ns=stamp_ns, used_s=used_s)
        # The system calls in between act as a memory barrier: no processor shows the new state before the rest of the
        # slot.
        with self._lock.held():
            self._check_filling(slot)
            with changing(table):
                table.set_state(index, state)
            self._own().shrink(index, slot.offset, length)
        return replace(slot, state=state, name=name, length=length, stamp_ns=stamp_ns)

    def give(self, slot: Slot, *, only_clean: bool = False) -> bool:
        """Free a slot; with ``only_clean`` only if it is CLEAN. Only the owner may call this.

        Returns:
            Whether it was freed. False also if its table entry has been reused since.

        Raises:
            ReadOnlyError: This process is not the owner.
        """
        with self._lock.held():
            allocator = self._own()
            if not self._is(slot, {SlotState.CLEAN} if only_clean else {*DATA_STATES, SlotState.FILLING}):
                return False
            with changing(self._table):
                self._table.set_state(slot.index, SlotState.FREE)
            allocator.give(slot.index, slot.offset)
        return True

    def retire(self) -> bool:
        """Stop allocating slots, unless a slot is dirty or being filled. Only the owner may call this.

        Returns:
            Whether no slot is dirty or being filled.
        """
        with self._lock.held():
            self._own()
            is_needed = self._table.has({*DIRTY_STATES, SlotState.FILLING})
            self.retired = self.retired or not is_needed
            return not is_needed

    def shed(self) -> None:
        """Free the clean slots, release all memory that is not dirty or being filled, and stop allocating slots.

        Only the owner may call this, or any process if the owner is dead.
        The segment must not be registered with a device. If the filesystem cannot punch holes, the memory stays
        allocated.
        """
        table = self._table
        with self._lock.held():
            if self._shed_at == int(table.changes[0]):
                return
            self.retired = True
            clean = table.states() == SlotState.CLEAN
            if clean.any():
                with changing(table):
                    table.set_state(clean, SlotState.FREE)
            try:
                for begin, end in table.unused():
                    give_up(self._open().number, begin, end)
            except StoreError as error:
                _logger.debug("%s: %s", self, error)
            self._shed_at = int(table.changes[0])

    def disown(self) -> None:
        """Release ownership: other processes treat the owner as dead from now on. Only the owner may call this."""
        with self._lock.held():
            self._own()
            self._allocator = None
            self._table.owner[0] = _NOBODY

    def free_unneeded(self, needed: Collection[int]) -> int:
        """Free the slots that a dead owner left unsealed, and its sealed chunks that no draft needs.

        The caller makes sure that the owner is dead.

        Args:
            needed: Indices of the slots of chunks that a draft still needs.

        Returns:
            Bytes freed.
        """
        table, wanted = self._table, np.zeros(self._table.layout.slots, np.bool_)
        wanted[sorted(needed)] = True
        with self._lock.held():
            states = table.states()
            chunks = (states == SlotState.SEALED) & (table.kind == SlotKind.CHUNK)
            useless = (states == SlotState.FILLING) | (chunks & ~wanted)
            freed = sum(padded(max(int(length), 1)) for length in table.length[useless])
            if freed:
                with changing(table):
                    table.set_state(useless, SlotState.FREE)
        return freed

    def slots(self, *, kind: SlotKind | None = None, states: Collection[SlotState] | None = None) -> list[Slot]:
        """Return the slots that are not free, or those of this kind and in these states, in table order."""
        with self._view_lock:
            rows = self._current_view().select(kind, states)
        return [self._slot(index, row) for index, row in rows]

    def slot(self, index: int) -> Slot | None:
        """Return the slot at this index; None if it is free."""
        with self._view_lock:
            row = self._current_view().rows.get(index)
        return None if row is None else self._slot(index, row)

    def take_changed_drafts(self) -> dict[int, Slot | None]:
        """Return the draft slots that changed since the last call, by index; None for one that holds no draft now.

        Only one consumer per `Segment` may call this.
        """
        with self._view_lock:
            view, nothing_changed = self._current_view(), set[int]()
            rows = {index: view.rows.get(index) for index in view.changed_drafts}
            slots = {
                index: self._slot(index, row) if row is not None and row.kind == SlotKind.DRAFT else None
                for index, row in rows.items()
            }
            view.changed_drafts = nothing_changed  # last, so that no change is lost if memory runs out before
        return slots

    def put_back_changed_drafts(self, indices: Iterable[int]) -> None:
        """Undo `take_changed_drafts` for these slots, which its caller did not process."""
        with self._view_lock:
            self._view.changed_drafts.update(indices)

    def find(self, name: bytes) -> Slot | None:
        """Return the chunk of this name that is sealed and not hidden. If there are several, the most recently noted.

        Takes microseconds while the table does not change.
        """
        with self._view_lock:
            found = self._current_view().find(name)
        return self._slot(*found) if found else None

    def meta(self, slot: Slot) -> bytes:
        """Return the metadata of a slot, empty if the slot was reused. The caller verifies it like the data."""
        if not self._is(slot, {*DATA_STATES}):
            return b""
        return self._table.meta(slot.index)

    def read(self, slot: Slot, start: int, out: memoryview) -> None:
        """Copy bytes of a slot into ``out``. If the slot was reused meanwhile, they are other bytes: verify them.

        Reads through the descriptor and not through a mapping, so that no page is mapped, and a truncated file cannot
        kill this process by SIGBUS.

        Args:
            start: The first byte, from the slot's beginning.
            out: Writable and contiguous; filled completely. Borrowed for the call only.

        Raises:
            InvalidInputError: The range exceeds the slot.
            CorruptionError: The file was truncated.
            NotFoundError: The segment was closed.
        """
        out = out.cast("B")
        if start < 0 or start + len(out) > slot.length:
            raise InvalidInputError(f"bytes {start} to {start + len(out)} exceed a slot of {slot.length} bytes")
        fd, done = self._open(), 0
        while done < len(out):
            count = os.preadv(fd.number, [out[done:]], slot.offset + start + done)
            if not count:
                raise CorruptionError(f"{self} was cut short", path=str(self.path), tier="ram")
            done += count

    def copy(self, slot: Slot, start: int, out: memoryview) -> None:
        """Copy bytes as `read` does, through the mapping: that takes half the time, and a truncated file is fatal."""
        source = np.frombuffer(self.view(slot), dtype=np.uint8)
        np.copyto(np.frombuffer(out, dtype=np.uint8), source[start : start + len(out)])

    def read_all(self, slot: Slot) -> bytes | None:
        """Return the bytes of a slot; None if the slot was reused. Raises as `read` does."""
        data = bytearray(slot.length)
        self.read(slot, 0, memoryview(data))
        return bytes(data) if self.is_still(slot) else None

    def is_still(self, slot: Slot) -> bool:
        """Return whether the slot has not been reused since its lookup. If so, bytes read before are its own."""
        return self._is(slot, DATA_STATES)

    def mark(self, slot: Slot, state: SlotState) -> bool:
        """Change the state of a sealed slot: SEALED to CLEAN or CONFLICT, CONFLICT to CLEAN.

        Returns:
            False, with nothing changed, if the slot cannot change to that state or was reused.
        """
        before = {old for old, new in _MARKS.items() if state in new}
        with self._lock.held():
            if not self._is(slot, before):
                return False
            with changing(self._table):
                self._table.set_state(slot.index, state)
        return True

    def hide(self, slot: Slot) -> bool:
        """Exclude a slot from lookups by name. Once it is clean, it is evicted before others; while dirty, it is kept.

        Returns:
            False if the slot was reused.
        """
        with self._lock.held():
            if not self._is(slot, DATA_STATES):
                return False
            with changing(self._table):
                self._table.hidden[slot.index] = 1
        return True

    def touch(self, slot: Slot) -> None:
        """Record that a slot is used now. Best effort: takes no lock."""
        if self._is(slot, DATA_STATES):
            self._table.used_s[slot.index] = int(time.monotonic()) & _U32

    def used_s(self, slot: Slot) -> int:
        """Return when the slot at this index was last used, in seconds of the host's monotonic clock."""
        return int(self._table.used_s[slot.index]) if slot.index < self._table.layout.slots else 0

    def sums(self) -> Sums:
        return self._table.sums()

    def is_dirty(self) -> bool:
        """Return whether a slot is SEALED or CONFLICT."""
        return self._table.has(DIRTY_STATES)

    def awaits(self) -> bool:
        """Return whether a slot is FILLING or SEALED, and may soon be free."""
        return self._table.has({SlotState.FILLING, SlotState.SEALED})

    def is_removed(self) -> bool:
        """Return whether its file was removed, so that no other process can open it."""
        fd = self._fd
        return fd is not None and os.fstat(fd.number).st_nlink == 0

    def unlink(self) -> None:
        """Remove the file. Processes that have the segment open keep it."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the memory; the segment is empty from now on. Views stay valid, and keep the memory mapped."""
        with self._view_lock, self._lock.held():
            self._fd = self._allocator = None
            self._lock.close()
            self._table = Table.nothing()
            self._view = TableView(self._table.layout)
            # The mapping is unmapped when the last view or thread that uses it is done.
            self._map = memoryview(b"")

    def _open(self) -> OwnedFd:
        fd = self._fd
        if fd is None:
            raise NotFoundError(f"{self} is closed", tier="ram")
        return fd

    def _own(self) -> SlotAllocator:
        allocator = self._allocator
        if allocator is None:
            raise ReadOnlyError(f"{self} belongs to another process", tier="ram")
        return allocator

    def _check_filling(self, slot: Slot) -> None:
        self._own()
        if not self._is(slot, {SlotState.FILLING}):
            raise InvalidInputError(f"slot {slot.index} of {self} is not being filled")

    def _is(self, slot: Slot, states: Collection[int]) -> bool:
        """Return whether the slot has not been reused and is in one of these states."""
        table = self._table
        if slot.index >= table.layout.slots:
            return False
        # Read the state first: if the serial is unchanged after that, the state belongs to this use of the slot
        return table.state(slot.index) in states and int(table.serial[slot.index]) == slot.serial

    def _current_view(self) -> TableView:
        view, table = self._view, self._table
        if view.changes == table.changes[0]:
            return view
        if not any(view.update(table, stable=False) for _ in range(VIEWS_MAX)):
            with self._lock.held():
                if int(table.changes[0]) % 2:  # the process that made it odd was killed
                    with changing(table):
                        pass
                view.update(table, stable=True)
        if view.unsound and not self._unsound_said:
            self._unsound_said = True
            _logger.warning("%d slots of %s have a damaged head", len(view.unsound), self)
        return view

    def _slot(self, index: int, row: SlotRow) -> Slot:
        kind, state, hidden = _KINDS[row.kind], _STATES[row.state], bool(row.hidden)
        return Slot(self, index, row.serial, kind, state, row.name, row.offset, row.length, row.stamp_ns, hidden)

    def _renew(self) -> None:
        """In a forked child: drop all state, which is the parent's. A child must not prolong the parent's lock."""
        fd, self._fd, self._allocator = self._fd, None, None
        if fd is not None:
            fd.leave_to_parent()
        self._lock, self._view_lock = TableLock(None), Lock()
        self._table = Table.nothing()
        self._view = TableView(self._table.layout)


_KINDS = {int(kind): kind for kind in SlotKind}
_STATES = {int(state): state for state in SlotState}
