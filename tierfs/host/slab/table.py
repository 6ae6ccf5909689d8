"""The byte layout of the slot table in a segment, and the meaning of its fields.

A segment is a header page, then the *heads* of all slots side by side (so that a scan of all slots touches little
memory), then the metadata of the slots, then the data. Several processes write to the table concurrently, under the
rules of `tierfs.host.slab.segment`. This module reads and writes the bytes, and has the lock on them.

A `threading.Lock` excludes other threads. ``flock`` on an open file that no other process shares excludes other
processes. A writer makes the counter of changes odd before a change and even after it, so that readers without the lock
detect the change.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierfs.buffers import PAGE_BYTES

HEAD_BYTES = 96
SLOT_BYTES = 1024
NAME_BYTES_MAX = 33
WRITE_ID_BYTES = 16
META_BYTES_MAX = 900

CHANGES_AT = 512  # in the header page, behind the part that never changes
OWNER_AT = 520

# One slot for each 64 KiB of a segment. Files up to 64 KiB lie in their manifests, so this is about the size of the
# smallest chunk slot with its draft.
BYTES_PER_SLOT = 64 << 10
SLOTS_MIN = 64
SLOTS_MAX = 8192


class SlotState(enum.IntEnum):
    """Whether the content of a slot is complete, and whether another tier has it.

    The values differ from each other in three bits at least, so that a state with one flipped bit is recognized.
    """

    FREE = 0x00
    FILLING = 0x1F
    """Allocated and being written. No process reads it."""
    SEALED = 0xE3
    """Dirty: complete, and not known to be in another tier."""
    CLEAN = 0xFC
    """Complete, and safe in another tier. May be evicted at any time."""
    CONFLICT = 0x55
    """Complete, and refused by the object tier. Kept until the user decides."""


class SlotKind(enum.IntEnum):
    """The kind of content of a slot."""

    CHUNK = 1
    DRAFT = 2


DIRTY_STATES = frozenset({SlotState.SEALED, SlotState.CONFLICT})
DATA_STATES = frozenset({SlotState.SEALED, SlotState.CLEAN, SlotState.CONFLICT})

_STATES = frozenset(SlotState)
_CORRECTED = np.array(
    [next((state for state in SlotState if (state ^ byte).bit_count() <= 1), byte) for byte in range(256)], np.uint8
)
_HEAD = np.dtype(
    {
        "names": [
            "state",
            "kind",
            "hidden",
            "name_length",
            "meta_length",
            "serial",
            "offset",
            "length",
            "stamp_ns",
            "used_s",
            "name",
        ],
        "formats": ["u1", "u1", "u1", "u1", "<u4", "<u8", "<u8", "<u8", "<u8", "<u4", f"V{NAME_BYTES_MAX}"],
        "offsets": [0, 1, 2, 3, 4, 8, 16, 24, 32, 40, 44],
        "itemsize": HEAD_BYTES,
    }
)


class SlotRow(NamedTuple):
    """The head of one slot."""

    state: int
    kind: int
    hidden: int
    name_length: int
    meta_length: int
    serial: int
    offset: int
    length: int
    stamp_ns: int
    used_s: int
    name_padded: bytes

    @property
    def name(self) -> bytes:
        """The name without its padding."""
        return self.name_padded[: self.name_length]

    def is_sound(self, layout: Layout) -> bool:
        """Return whether the fields are possible values within this layout."""
        return (
            self.state in _STATES
            and self.kind in {SlotKind.CHUNK, SlotKind.DRAFT}
            and self.name_length <= NAME_BYTES_MAX
            and self.meta_length <= META_BYTES_MAX
            and self._is_inside(layout)
        )

    def salvage(self, layout: Layout) -> SlotRow | None:
        """Return a damaged head as that of a dirty draft, which may be nowhere else; ``None`` if it is of another slot.

        The draft's own checksum tells whether its bytes can be used. A draft whose place is damaged has no bytes.
        """
        # The name of a chunk has another length.
        may_be_draft = self.kind != SlotKind.CHUNK and self.name_length == WRITE_ID_BYTES
        if not (self.kind == SlotKind.DRAFT or may_be_draft) or self.state not in DIRTY_STATES:
            return None
        offset, length = (self.offset, self.length) if self._is_inside(layout) else (layout.data_at, 0)
        return self._replace(kind=SlotKind.DRAFT, offset=offset, length=length)

    def _is_inside(self, layout: Layout) -> bool:
        return (
            self.offset % PAGE_BYTES == 0 and layout.data_at <= self.offset and self.offset + self.length <= layout.size
        )


class Layout(NamedTuple):
    """Size of a segment in bytes and number of its slots; the offsets of its parts follow from these."""

    size: int
    slots: int

    @property
    def heads_at(self) -> int:
        """Offset of the slots' heads, in bytes."""
        return PAGE_BYTES

    @property
    def metas_at(self) -> int:
        """Offset of the slots' metadata, in bytes."""
        return self.heads_at + padded(self.slots * HEAD_BYTES)

    @property
    def data_at(self) -> int:
        """Offset of the data, in bytes. The data extends to the end of the segment."""
        return self.metas_at + padded(self.slots * (SLOT_BYTES - HEAD_BYTES))

    @property
    def data_bytes(self) -> int:
        """Capacity for data, in bytes."""
        return self.size - self.data_at

    @classmethod
    def for_data(cls, data_bytes: int, *, slots: int | None = None) -> Layout:
        """Return the layout of a segment with this capacity for data, rounded up to whole pages."""
        if slots is None:
            slots = min(max(data_bytes // BYTES_PER_SLOT, SLOTS_MIN), SLOTS_MAX)
        return cls(cls(0, slots).data_at + padded(data_bytes), slots)

    @classmethod
    def for_size(cls, size: int) -> Layout:
        """Return the layout of a segment of this total size, table included, rounded down to whole pages."""
        slots = min(max(size // BYTES_PER_SLOT, SLOTS_MIN), SLOTS_MAX)
        return cls(size // PAGE_BYTES * PAGE_BYTES, slots)


class Sums(NamedTuple):
    """Bytes of a segment by slot state, each slot rounded up to whole pages."""

    filling: int
    dirty: int
    clean: int


class Table:
    """The slots of one segment, in memory that other processes change concurrently. Fields are NumPy arrays.

    ``memory`` is the segment, or its beginning up to ``layout.data_at``.
    """

    def __init__(self, memory: memoryview | bytearray, layout: Layout) -> None:
        self.layout = layout
        self.heads: npt.NDArray[Any] = np.ndarray((layout.slots,), _HEAD, buffer=memory, offset=layout.heads_at)
        self._metas: npt.NDArray[np.uint8] = np.ndarray(
            (layout.slots, SLOT_BYTES - HEAD_BYTES), np.uint8, buffer=memory, offset=layout.metas_at
        )
        self.changes: npt.NDArray[np.uint64] = np.ndarray((1,), np.uint64, buffer=memory, offset=CHANGES_AT)
        self.owner: npt.NDArray[np.uint64] = np.ndarray((1,), np.uint64, buffer=memory, offset=OWNER_AT)
        self._state: npt.NDArray[np.uint8] = self.heads["state"]
        self.kind: npt.NDArray[np.uint8] = self.heads["kind"]
        self.hidden: npt.NDArray[np.uint8] = self.heads["hidden"]
        self.serial: npt.NDArray[np.uint64] = self.heads["serial"]
        self.length: npt.NDArray[np.uint64] = self.heads["length"]
        self.stamp_ns: npt.NDArray[np.uint64] = self.heads["stamp_ns"]
        self.used_s: npt.NDArray[np.uint32] = self.heads["used_s"]

    @classmethod
    def nothing(cls) -> Table:
        """Return a table without slots, for a segment that was closed."""
        layout = Layout(PAGE_BYTES, 0)
        return cls(bytearray(PAGE_BYTES), layout)

    def row(self, index: int) -> SlotRow:
        """Return the current head of a slot."""
        row = SlotRow._make(self.heads[index].tolist())
        return row._replace(state=int(_CORRECTED[row.state]))

    def states(self) -> npt.NDArray[np.uint8]:
        """Return a copy of the slots' states."""
        return _CORRECTED[self._state]

    def state(self, index: int) -> int:
        return int(_CORRECTED[self._state[index]])

    def set_state(self, which: int | npt.NDArray[np.bool_], state: SlotState) -> None:
        self._state[which] = state

    def begin(self, index: int, *, kind: SlotKind, serial: int, offset: int, length: int, used_s: int) -> None:
        """Turn a free slot into one that is being filled."""
        self.heads[index] = (SlotState.FREE, kind, 0, 0, 0, serial, offset, length, 0, used_s, b"")
        self.set_state(index, SlotState.FILLING)

    def describe(self, index: int, name: bytes, meta: bytes, *, length: int, stamp_ns: int, used_s: int) -> None:
        """Write the head fields and the metadata of a slot that has been filled. Its state does not change."""
        head = self.heads[index : index + 1]
        head["name"] = np.void(name.ljust(NAME_BYTES_MAX, b"\0"))
        head["name_length"] = len(name)
        head["meta_length"] = len(meta)
        head["length"] = length
        head["stamp_ns"] = stamp_ns
        head["used_s"] = used_s
        self._metas[index, : len(meta)] = np.frombuffer(meta, np.uint8)

    def meta(self, index: int) -> bytes:
        """Return the metadata of a slot; empty if its length is damaged."""
        length = int(self.heads["meta_length"][index])
        return self._metas[index, :length].tobytes() if length <= META_BYTES_MAX else b""

    def sums(self) -> Sums:
        """Return the allocated bytes by state. Approximate while other processes change the table."""
        states = self.states()
        pages = (self.length.astype(np.int64) + (PAGE_BYTES - 1)) // PAGE_BYTES

        def total(wanted: Iterable[int]) -> int:
            return sum(int(pages[states == state].sum()) for state in wanted) * PAGE_BYTES

        return Sums(total([SlotState.FILLING]), total(DIRTY_STATES), total([SlotState.CLEAN]))

    def unused(self) -> list[tuple[int, int]]:
        """Return (begin, end) of the page ranges that only free slots use; an empty list if a slot is damaged."""
        layout = self.layout
        used = [(0, layout.metas_at)]
        for index in np.nonzero(self.states())[0].tolist():
            row = self.row(index)
            if not row.is_sound(layout):
                return []
            meta_at = layout.metas_at + index * (SLOT_BYTES - HEAD_BYTES)
            used += [(meta_at, meta_at + SLOT_BYTES - HEAD_BYTES), (row.offset, row.offset + row.length)]
        found, at = [], 0
        for begin, end in [*sorted(used), (layout.size, layout.size)]:
            if padded(at) < (last := begin // PAGE_BYTES * PAGE_BYTES):
                found.append((padded(at), last))
            at = max(at, end)
        return found

    def has(self, states: Iterable[int]) -> bool:
        there = self.states()
        return any(bool((there == state).any()) for state in states)


def padded(length: int) -> int:
    """Return a length rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


@contextlib.contextmanager
def changing(table: Table) -> Iterator[None]:
    """Mark the table as changing for readers that hold no lock. The caller holds the lock.

    If a process died in here, the counter is odd already.
    """
    odd = (int(table.changes[0]) + 1) | 1
    table.changes[0] = odd
    try:
        yield
    finally:
        table.changes[0] = odd + 1
