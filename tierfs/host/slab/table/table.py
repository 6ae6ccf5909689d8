"""The table of slots in a segment: where its fields lie and what they mean.

A segment is a header page, then the *heads* of all slots side by side (so that looking at all of them touches little
memory), then their metadata, then the data. The table is shared by processes that write to it at the same time, under
the rules that `tierfs.host.slab.segment` keeps: here are only the bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierfs.host.ground import PAGE_BYTES

__all__ = [
    "DATA_STATES",
    "DIRTY_STATES",
    "META_BYTES_MAX",
    "NAME_BYTES_MAX",
    "SLOT_BYTES",
    "Layout",
    "SlotKind",
    "SlotRow",
    "SlotState",
    "Sums",
    "Table",
    "padded",
]

HEAD_BYTES = 96
SLOT_BYTES = 1024
NAME_BYTES_MAX = 33
META_BYTES_MAX = 900

CHANGES_AT = 512  # in the header page, after the part that never changes
OWNER_AT = 520
RETIRED_AT = 528

# One slot for so much of a segment: smaller files lie in their manifests, so this is about what the smallest slots take
# together with their drafts.
BYTES_PER_SLOT = 64 << 10
SLOTS_MIN = 64
SLOTS_MAX = 8192


class SlotState(enum.IntEnum):
    """What a slot is worth."""

    FREE = 0
    FILLING = 1
    """Taken; its bytes are on their way and nobody reads them."""
    SEALED = 2
    """Whole, and no other tier is known to have it: dirty."""
    CLEAN = 3
    """Whole, and safe elsewhere: may go at any time."""
    CONFLICT = 4
    """Whole, and refused by the object tier: kept until the user decides."""


class SlotKind(enum.IntEnum):
    """What a slot holds."""

    CHUNK = 1
    DRAFT = 2


DIRTY_STATES = frozenset({SlotState.SEALED, SlotState.CONFLICT})
DATA_STATES = frozenset({SlotState.SEALED, SlotState.CLEAN, SlotState.CONFLICT})

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
        """Whether what it says can be."""
        return (
            self.state <= SlotState.CONFLICT
            and self.kind in {SlotKind.CHUNK, SlotKind.DRAFT}
            and self.name_length <= NAME_BYTES_MAX
            and self.meta_length <= META_BYTES_MAX
            and self.offset % PAGE_BYTES == 0
            and layout.data_at <= self.offset
            and self.offset + self.length <= layout.size
        )


class Layout(NamedTuple):
    """Where the parts of a segment lie, in bytes from its start."""

    size: int
    slots: int

    @property
    def heads_at(self) -> int:
        """The heads of the slots."""
        return PAGE_BYTES

    @property
    def metas_at(self) -> int:
        """The metadata of the slots."""
        return self.heads_at + padded(self.slots * HEAD_BYTES)

    @property
    def data_at(self) -> int:
        """The data; it goes to the end."""
        return self.metas_at + padded(self.slots * (SLOT_BYTES - HEAD_BYTES))

    @property
    def data_bytes(self) -> int:
        """How many bytes of data there is room for."""
        return self.size - self.data_at

    @classmethod
    def for_data(cls, data_bytes: int, *, slots: int | None = None) -> Layout:
        """The layout of a segment that holds so many bytes of data (rounded up to whole pages)."""
        if slots is None:
            slots = min(max(data_bytes // BYTES_PER_SLOT, SLOTS_MIN), SLOTS_MAX)
        return cls(cls(0, slots).data_at + padded(data_bytes), slots)

    @classmethod
    def for_size(cls, size: int) -> Layout:
        """The layout of a segment that is so large as a whole, table included (rounded down to whole pages)."""
        slots = min(max(size // BYTES_PER_SLOT, SLOTS_MIN), SLOTS_MAX)
        return cls(size // PAGE_BYTES * PAGE_BYTES, slots)


class Sums(NamedTuple):
    """Bytes of a segment by what they are worth, each slot rounded up to whole pages."""

    filling: int
    dirty: int
    clean: int


class Table:
    """The slots of one segment, in memory that other processes change meanwhile. Fields are plain arrays.

    Args:
        memory: The segment, or its beginning up to ``layout.data_at``.
        layout: Where the parts lie.
    """

    def __init__(self, memory: memoryview | bytearray, layout: Layout) -> None:
        self.layout = layout
        self.heads: npt.NDArray[Any] = np.ndarray((layout.slots,), _HEAD, buffer=memory, offset=layout.heads_at)
        self._metas: npt.NDArray[np.uint8] = np.ndarray(
            (layout.slots, SLOT_BYTES - HEAD_BYTES), np.uint8, buffer=memory, offset=layout.metas_at
        )
        self.changes: npt.NDArray[np.uint64] = np.ndarray((1,), np.uint64, buffer=memory, offset=CHANGES_AT)
        self.owner: npt.NDArray[np.uint64] = np.ndarray((1,), np.uint64, buffer=memory, offset=OWNER_AT)
        self.retired: npt.NDArray[np.uint8] = np.ndarray((1,), np.uint8, buffer=memory, offset=RETIRED_AT)
        self.state: npt.NDArray[np.uint8] = self.heads["state"]
        self.kind: npt.NDArray[np.uint8] = self.heads["kind"]
        self.hidden: npt.NDArray[np.uint8] = self.heads["hidden"]
        self.serial: npt.NDArray[np.uint64] = self.heads["serial"]
        self.length: npt.NDArray[np.uint64] = self.heads["length"]
        self.stamp_ns: npt.NDArray[np.uint64] = self.heads["stamp_ns"]
        self.used_s: npt.NDArray[np.uint32] = self.heads["used_s"]

    @classmethod
    def nothing(cls) -> Table:
        """A table without slots: what is left of a segment that was closed."""
        layout = Layout(PAGE_BYTES, 0)
        return cls(bytearray(PAGE_BYTES), layout)

    def row(self, index: int) -> SlotRow:
        """The head of a slot as it is now."""
        return SlotRow._make(self.heads[index].tolist())

    def begin(self, index: int, *, kind: SlotKind, serial: int, offset: int, length: int, used_s: int) -> None:
        """Make a free slot one that is being filled."""
        self.heads[index] = (SlotState.FREE, kind, 0, 0, 0, serial, offset, length, 0, used_s, b"")
        self.state[index] = SlotState.FILLING

    def describe(self, index: int, name: bytes, meta: bytes, *, length: int, stamp_ns: int, used_s: int) -> None:
        """Write what is known of a slot when it has been filled."""
        head = self.heads[index : index + 1]
        head["name"] = np.void(name.ljust(NAME_BYTES_MAX, b"\0"))
        head["name_length"] = len(name)
        head["meta_length"] = len(meta)
        head["length"] = length
        head["stamp_ns"] = stamp_ns
        head["used_s"] = used_s
        self._metas[index, : len(meta)] = np.frombuffer(meta, np.uint8)

    def meta(self, index: int) -> bytes:
        """The metadata of a slot."""
        length = min(int(self.heads["meta_length"][index]), META_BYTES_MAX)
        return self._metas[index, :length].tobytes()

    def sums(self) -> Sums:
        """How many bytes are taken, and for what. As of about now."""
        states = self.state.copy()
        pages = (self.length.astype(np.int64) + (PAGE_BYTES - 1)) // PAGE_BYTES

        def total(wanted: Iterable[int]) -> int:
            return sum(int(pages[states == state].sum()) for state in wanted) * PAGE_BYTES

        return Sums(total([SlotState.FILLING]), total(DIRTY_STATES), total([SlotState.CLEAN]))

    def unused(self) -> list[tuple[int, int]]:
        """Where the pages begin and end in which nothing lies but what belongs to free slots; nowhere if a slot is damaged."""
        layout = self.layout
        used = [(0, layout.metas_at)]
        for index in np.nonzero(self.state)[0].tolist():
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
        """Whether a slot is in one of these states."""
        return any(bool((self.state == state).any()) for state in states)


def padded(length: int) -> int:
    """Rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES
