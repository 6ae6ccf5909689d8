"""One segment: a region of shared memory with a table of its slots in it, written by one process, read by all.

The state byte of a slot is the only commit point: everything else of a slot is written before it becomes SEALED, and it
becomes FREE before anything else of it is given to somebody else. So a process that is killed leaves a whole slot or none.

Readers take no lock. They look the slot up, copy its bytes, verify them against the digests that they know, and where it
matters ask `Segment.is_still`. Those who change the table (the owner; whoever marks) hold its lock for the few bytes
concerned, and move its counter of changes: a look during which it moved does not count, and one that counts may be
kept for as long as the counter stays. How segments come to be is told in `tierfs.host.slab.new_segment`.
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
from tierfs.host.slab.allocate import give_up, map_shared
from tierfs.host.slab.segment_file import SECTOR_BYTES, OwnedFd, SegmentHeader, open_segment, reopened
from tierfs.host.slab.table.allocator import SlotAllocator
from tierfs.host.slab.table.lock import TableLock, changing
from tierfs.host.slab.table.table import (
    DATA_STATES,
    DIRTY_STATES,
    META_BYTES_MAX,
    NAME_BYTES_MAX,
    SlotKind,
    SlotRow,
    SlotState,
    Sums,
    Table,
    padded,
)
from tierfs.host.slab.table.view import TableView

__all__ = ["Segment", "Slot", "SlotKind", "SlotState"]

VIEWS_MAX = 3
_U32 = 0xFFFFFFFF
_NOBODY = 0

_MARKS = {
    SlotState.SEALED: {SlotState.CLEAN, SlotState.CONFLICT},
    SlotState.CONFLICT: {SlotState.CLEAN, SlotState.SEALED},
}
_logger = logging.getLogger("tierfs.local")


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot as it was when it was looked up. Keeps its segment open, but not its contents.

    Attributes:
        segment: Where it is.
        index: Its place in the table.
        serial: Which use of that place: never repeated in a segment.
        kind: What it holds.
        state: What it was worth.
        name: Opaque, at most 33 bytes; empty while it is being filled.
        offset: Of its data in the segment, in bytes; a multiple of 4096.
        length: Of its data, in bytes.
        stamp_ns: When it was sealed, on the host's monotonic clock.
        hidden: Whether it is kept from those who look for its name.
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


class Segment:
    """A segment as one process has it. Safe for use by many threads.

    Nothing is found in a segment that was closed, and for a forked child it is closed.

    Args:
        fd: An open file of the segment; not kept.
        header: What the segment says of itself.
        path: Its file.
        memory: All of it, mapped, if we are its owner. Then `start` follows.

    Attributes:
        id: Random; hex.
        store: The uuid of its store, 32 hex digits.
        size: Of the whole segment, in bytes.
        data_bytes: Room for data.
        path: Its file. It may have been removed since.
    """

    def __init__(self, fd: OwnedFd, header: SegmentHeader, path: Path, *, memory: memoryview | None = None) -> None:
        self.header = header
        self.id = header.id
        self.store = header.store
        self.size = header.layout.size
        self.data_bytes = header.layout.data_bytes
        self.path = path
        # An open file of our own: those who share one share its lock, too.
        self._fd: OwnedFd | None = OwnedFd(reopened(fd.number))
        self._map = map_shared(fd.number, header.layout.data_at) if memory is None else memory
        self._mapped_whole = memory is not None
        self._lock = TableLock(self._fd)
        self._table = Table(self._map, header.layout)
        self._view_lock = Lock()
        self._view = TableView(header.layout)
        self._allocator: SlotAllocator | None = None
        self._unsound_said = False
        self._shed_at = -1
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"Segment({str(self.path)!r}, size={self.size}, slots={self.header.layout.slots}, owned={self.owned})"

    @classmethod
    def attach(cls, path: Path) -> Segment:
        """Open a segment that another process made.

        Raises:
            NotFoundError: It is gone.
            CorruptionError: Its header is damaged.
            FormatError: It is of another version, or was left by a run of the kernel before this one.
            StoreError: It cannot be opened.
        """
        fd, header = open_segment(path)
        return cls(fd, header, path)

    def start(self, allocator: SlotAllocator) -> None:
        """Be its owner from now on."""
        self._allocator = allocator

    @property
    def owner(self) -> str:
        """The process that may take slots in it: 16 hex digits; zeros once that has released it."""
        return f"{int(self._table.owner[0]):016x}"

    @property
    def owned(self) -> bool:
        """Whether that is us."""
        return self._allocator is not None

    @property
    def retired(self) -> bool:
        """Whether no slots of it are given away any more."""
        return bool(self._table.retired[0])

    @property
    def memory_bytes(self) -> int:
        """What it takes now: `size`, less what `shed` gave back; 0 once it is closed."""
        fd = self._fd
        return 0 if fd is None else min(os.fstat(fd.number).st_blocks * SECTOR_BYTES, self.size)

    @property
    def changes(self) -> int:
        """A number that moves whenever a slot is taken, sealed, marked, hidden or freed, by whomever."""
        return int(self._table.changes[0])

    def is_known_full(self, runs: Sequence[Sequence[int]]) -> bool:
        """Whether so little as the least of these runs was refused since something was freed. Raises as `take_runs` does."""
        return all(map(self._own().is_known_full, runs))

    def take_runs(self, kind: SlotKind, runs: Sequence[Sequence[int]]) -> list[list[Slot] | None]:
        """Take runs of slots, to be filled: they lie side by side in the memory, each from a whole page on.

        In everything else they are slots of their own. By the owner only.

        Args:
            kind: What they will hold.
            runs: For each how many bytes its slots will hold.

        Returns:
            For each run its slots; None for one that does not fit, whether those behind it do or not.

        Raises:
            ReadOnlyError: We are not the owner.
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
        """The bytes of a slot, or from there to the end of the last one of a run, as plain memory that needs no copy.

        For the owner of a slot that is being filled, writable. For everybody else to be read, and as with `read` it may
        change meanwhile. Keeps the memory for as long as it is referred to.

        Raises:
            NotFoundError: The segment was closed.
        """
        end = slot if last is None else last
        with self._view_lock:
            fd = self._open()
            if not self._mapped_whole:
                self._map, self._mapped_whole = map_shared(fd.number, self.size), True
            bytes_ = self._map[slot.offset : end.offset + end.length]
        return bytes_ if self.owned and slot.state is SlotState.FILLING else bytes_.toreadonly()

    def whole(self) -> memoryview:
        """All of the segment as plain memory, for the owner to register it with a device. Writable; keeps the memory.

        Raises:
            NotFoundError: The segment was closed.
        """
        with self._view_lock:
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
        """Make a slot that was filled readable by all. By the owner only.

        Args:
            slot: As `take_runs` gave it.
            name: At most 33 bytes.
            meta: At most 900 bytes.
            length: How many bytes it holds, if fewer than were taken; the rest is given back.
            state: SEALED (dirty), or CLEAN if another tier has it.
            stamp_ns: Now, on the host's monotonic clock.

        Raises:
            ReadOnlyError: We are not the owner.
            InvalidInputError: The slot is not being filled, or something is too long.
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
        # A system call lies in between, which keeps any processor from showing others the state before the rest.
        with self._lock.held():
            self._check_filling(slot)
            with changing(table):
                table.state[index] = state
            self._own().shrink(index, slot.offset, length)
        return replace(slot, state=state, name=name, length=length, stamp_ns=stamp_ns)

    def give(self, slot: Slot, *, only_clean: bool = False) -> bool:
        """Free a slot. By the owner only.

        Args:
            slot: Which; nothing happens if it is another by now.
            only_clean: Leave it if it is not CLEAN (any more).

        Returns:
            Whether it was freed.

        Raises:
            ReadOnlyError: We are not the owner.
        """
        with self._lock.held():
            allocator = self._own()
            if not self._is(slot, {SlotState.CLEAN} if only_clean else {*DATA_STATES, SlotState.FILLING}):
                return False
            with changing(self._table):
                self._table.state[slot.index] = SlotState.FREE
            allocator.give(slot.index, slot.offset)
        return True

    def retire(self, *, although_needed: bool = False) -> bool:
        """Give no more slots away, unless one is dirty or being filled. By the owner only.

        Args:
            although_needed: Also if one is.

        Returns:
            Whether nothing is in it that may not go.
        """
        with self._lock.held():
            self._own()
            is_needed = self._table.has({*DIRTY_STATES, SlotState.FILLING})
            if although_needed or not is_needed:
                self._table.retired[0] = 1
            return not is_needed

    def claim(self) -> None:
        """Have its owner put nothing more into it, and remove it once nothing in it is needed: another process waits for room."""
        with self._lock.held():
            self._table.retired[0] = 1

    def is_idle(self, since_s: float) -> bool:
        """Whether no slot was taken or sealed since then, in seconds of the host's monotonic clock."""
        table = self._table
        taken_s = table.used_s[table.state == SlotState.FILLING]
        return int(taken_s.max(initial=0)) <= since_s and int(table.stamp_ns.max(initial=0)) <= since_s * 1e9

    def shed(self) -> None:
        """Give back the memory of all that is not dirty or being filled, and no more slots away: there is no memory for them.

        By the owner; or where that is dead, by who keeps others from becoming it. Not while it is registered with a device.
        Where the filesystem cannot do that, it stays as it is.
        """
        table = self._table
        with self._lock.held():
            if self._shed_at == int(table.changes[0]):
                return
            table.retired[0] = 1
            clean = table.state == SlotState.CLEAN
            if clean.any():
                with changing(table):
                    table.state[clean] = SlotState.FREE
            try:
                for begin, end in table.unused():
                    give_up(self._open().number, begin, end)
            except StoreError as error:
                _logger.debug("%s: %s", self, error)
            self._shed_at = int(table.changes[0])

    def disown(self) -> None:
        """Release it: from now on it is as if its owner were dead. By the owner only."""
        with self._lock.held():
            self._own()
            self._allocator = None
            self._table.owner[0] = _NOBODY

    def free_unneeded(self, needed: Collection[int]) -> int:
        """Free what the death of the owner left useless; the caller sees to it that the owner is dead, and stays so.

        Args:
            needed: The slots (indices) of chunks that some draft still needs.

        Returns:
            Bytes freed.
        """
        table, wanted = self._table, np.zeros(self._table.layout.slots, np.bool_)
        wanted[sorted(needed)] = True
        with self._lock.held():
            chunks = (table.state == SlotState.SEALED) & (table.kind == SlotKind.CHUNK)
            useless = (table.state == SlotState.FILLING) | (chunks & ~wanted)
            freed = sum(padded(max(int(length), 1)) for length in table.length[useless])
            if freed:
                with changing(table):
                    table.state[useless] = SlotState.FREE
        return freed

    def slots(self, *, kind: SlotKind | None = None, states: Collection[SlotState] | None = None) -> list[Slot]:
        """The slots that are not free, or those of a kind, or in these states, in the order of the table."""
        with self._view_lock:
            rows = self._current_view().select(kind, states)
        return [self._slot(index, row) for index, row in rows]

    def slot(self, index: int) -> Slot | None:
        """The slot at this place in the table; None if it is free."""
        with self._view_lock:
            row = self._current_view().rows.get(index)
        return None if row is None else self._slot(index, row)

    def take_changed_drafts(self) -> dict[int, Slot | None]:
        """The slots of drafts that changed since the last call, by index; ``None`` where no draft is now. For one caller."""
        with self._view_lock:
            view, nothing_changed = self._current_view(), set[int]()
            rows = {index: view.rows.get(index) for index in view.changed_drafts}
            slots = {
                index: self._slot(index, row) if row is not None and row.kind == SlotKind.DRAFT else None
                for index, row in rows.items()
            }
            view.changed_drafts = nothing_changed  # last: if memory runs out before, no change is lost
        return slots

    def put_back_changed_drafts(self, indices: Iterable[int]) -> None:
        """Undo `take_changed_drafts` for these: its caller did not get to them."""
        with self._view_lock:
            self._view.changed_drafts.update(indices)

    def find(self, name: bytes) -> Slot | None:
        """The chunk of this name that was sealed last and is not hidden. Costs microseconds while nothing changes."""
        with self._view_lock:
            found = self._current_view().find(name)
        return self._slot(*found) if found else None

    def meta(self, slot: Slot) -> bytes:
        """The metadata of a slot, to be verified by the caller like its data; empty if it is another by now."""
        if not self._is(slot, {*DATA_STATES}):
            return b""
        return self._table.meta(slot.index)

    def read(self, slot: Slot, start: int, out: memoryview) -> None:
        """Copy bytes of a slot into ``out``. If it was reused meanwhile they are others': verify them.

        Reads through the descriptor, so that no page is mapped and nothing that happens to the file can kill us.

        Args:
            slot: From where.
            start: The first byte, from the slot's beginning.
            out: Writable and contiguous; filled as a whole. Borrowed for the call only.

        Raises:
            InvalidInputError: The slot has not so many bytes.
            CorruptionError: The file was cut short.
            NotFoundError: The segment was closed.
        """
        out = out.cast("B")
        if start < 0 or start + len(out) > slot.length:
            raise InvalidInputError(f"bytes {start} to {start + len(out)} of a slot of {slot.length} bytes")
        fd, done = self._open(), 0
        while done < len(out):
            count = os.preadv(fd.number, [out[done:]], slot.offset + start + done)
            if not count:
                raise CorruptionError(f"{self} was cut short", path=str(self.path), tier="ram")
            done += count

    def read_all(self, slot: Slot) -> bytes | None:
        """The bytes of a slot; None if it is another by now. Raises as `read` does."""
        data = bytearray(slot.length)
        self.read(slot, 0, memoryview(data))
        return bytes(data) if self.is_still(slot) else None

    def is_still(self, slot: Slot) -> bool:
        """Whether the slot holds what it held when it was looked up: what was read before was its own bytes."""
        return self._is(slot, DATA_STATES)

    def mark(self, slot: Slot, state: SlotState) -> bool:
        """Say what a sealed slot is worth now: SEALED becomes CLEAN or CONFLICT, CONFLICT becomes CLEAN or SEALED.

        Returns:
            False if that is no change it can make, or the slot is another by now: nothing was done.
        """
        before = {old for old, new in _MARKS.items() if state in new}
        with self._lock.held():
            if not self._is(slot, before):
                return False
            with changing(self._table):
                self._table.state[slot.index] = state
        return True

    def hide(self, slot: Slot) -> bool:
        """Keep a slot from those who look for its name; once it is clean it is reused before others. Dirty, it is kept.

        Returns:
            False if it is another by now.
        """
        with self._lock.held():
            if not self._is(slot, DATA_STATES):
                return False
            with changing(self._table):
                self._table.hidden[slot.index] = 1
        return True

    def touch(self, slot: Slot) -> None:
        """Note that a slot is used now. A hint: takes no lock."""
        if self._is(slot, DATA_STATES):
            self._table.used_s[slot.index] = int(time.monotonic()) & _U32

    def used_s(self, slot: Slot) -> int:
        """When a slot was last used, in seconds of the host's monotonic clock; as of now."""
        return int(self._table.used_s[slot.index]) if slot.index < self._table.layout.slots else 0

    def sums(self) -> Sums:
        """How many bytes are taken, and for what."""
        return self._table.sums()

    def is_dirty(self) -> bool:
        """Whether a slot is SEALED or CONFLICT."""
        return self._table.has(DIRTY_STATES)

    def awaits(self, kept: int = 0) -> bool:
        """Whether more than so many bytes are being filled, or a slot is SEALED: on its way to being free."""
        return self._table.has({SlotState.SEALED}) or self._table.sums().filling > kept

    def is_removed(self) -> bool:
        """Whether its file was removed: no other process finds it any more."""
        fd = self._fd
        return fd is not None and os.fstat(fd.number).st_nlink == 0

    def unlink(self) -> None:
        """Remove the file. Who has the segment open keeps it."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the memory: nothing is found here any more. What `view` gave stays valid, and keeps the memory."""
        with self._view_lock, self._lock.held():
            self._fd = self._allocator = None
            self._lock.close()
            self._table = Table.nothing()
            self._view = TableView(self._table.layout)
            # Where a view or another thread has the mapping in use, it goes when they are done with it.
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
        """Whether the slot is in the same use, and in one of these states."""
        table = self._table
        if slot.index >= table.layout.slots:
            return False
        # The state first: if the serial is the same after that, then the state was this use's.
        return int(table.state[slot.index]) in states and int(table.serial[slot.index]) == slot.serial

    def _current_view(self) -> TableView:
        """What is in the table, as of now."""
        view, table = self._view, self._table
        if view.changes == table.changes[0]:
            return view
        if not any(view.update(table, stable=False) for _ in range(VIEWS_MAX)):
            with self._lock.held():
                if int(table.changes[0]) % 2:  # whoever made it odd was killed
                    with changing(table):
                        pass
                view.update(table, stable=True)
        if view.unsound and not self._unsound_said:
            self._unsound_said = True
            _logger.warning("%d slots of %s are damaged and passed over", len(view.unsound), self)
        return view

    def _slot(self, index: int, row: SlotRow) -> Slot:
        kind, state, hidden = _KINDS[row.kind], _STATES[row.state], bool(row.hidden)
        return Slot(self, index, row.serial, kind, state, row.name, row.offset, row.length, row.stamp_ns, hidden)

    def _renew(self) -> None:
        """After a fork: all of it is the parent's. The lock belongs to the open file, which a child must not keep open."""
        fd, self._fd, self._allocator = self._fd, None, None
        if fd is not None:
            fd.leave_to_parent()
        self._lock, self._view_lock = TableLock(None), Lock()
        self._table = Table.nothing()
        self._view = TableView(self._table.layout)


_KINDS = {int(kind): kind for kind in SlotKind}
_STATES = {int(state): state for state in SlotState}
