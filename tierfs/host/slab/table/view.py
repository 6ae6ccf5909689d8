"""What one process last saw in the table of a segment, kept for as long as the table does not change."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tierfs.host.slab.table.table import DATA_STATES, Layout, SlotKind, SlotRow, SlotState, Table

__all__ = ["TableView"]

_TAKEN = frozenset(SlotState) - {SlotState.FREE}


class TableView:
    """What one process saw in a table when it last looked. Not thread-safe.

    Attributes:
        changes: The table's counter of changes at that time; -1 before the first look.
        rows: The slots that are not free and make sense, by index.
        unsound: How many slots did not make sense.
        changed_drafts: Slots that hold a draft, or did, and changed since somebody emptied this set.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.changes = -1
        self.rows: dict[int, SlotRow] = {}
        self.unsound: set[int] = set()
        self.changed_drafts: set[int] = set()
        self._names: dict[bytes, list[int]] = {}
        self._state = np.zeros(layout.slots, np.uint8)
        self._hidden = np.zeros(layout.slots, np.uint8)
        self._serial = np.zeros(layout.slots, np.uint64)

    def update(self, table: Table, *, stable: bool) -> bool:
        """Look again at what changed.

        Args:
            table: Where to look.
            stable: Whether nobody can change it meanwhile; else what was seen counts only if nobody did.

        Returns:
            Whether the look is good: taken while nobody changed anything.
        """
        before = int(table.changes[0])
        if before % 2 and not stable:
            return False
        state, hidden, serial = table.state.copy(), table.hidden.copy(), table.serial.copy()
        differs = (state != self._state) | (hidden != self._hidden) | (serial != self._serial)
        rows = {index: table.row(index) for index in np.nonzero(differs)[0].tolist()}
        if not stable and int(table.changes[0]) != before:
            return False
        for index, row in rows.items():
            self._forget(index)
            self._note(index, row)
        self._state, self._hidden, self._serial = state, hidden, serial
        self.changes = before
        return True

    def find(self, name: bytes) -> tuple[int, SlotRow] | None:
        """The chunk of this name that was sealed last."""
        indices = self._names.get(name)
        return (indices[-1], self.rows[indices[-1]]) if indices else None

    def select(self, kind: int | None, states: Collection[int] | None) -> list[tuple[int, SlotRow]]:
        """The slots of a kind and in one of these states, in the order of the table."""
        wanted = np.zeros(self._layout.slots, np.bool_)
        for state in _TAKEN if states is None else states:
            wanted |= self._state == state
        chosen = ((index, self.rows.get(index)) for index in np.nonzero(wanted)[0].tolist())
        return [(index, row) for index, row in chosen if row is not None and (kind is None or row.kind == kind)]

    def _forget(self, index: int) -> None:
        self.unsound.discard(index)
        row = self.rows.pop(index, None)
        if row is None:
            return
        if row.kind == SlotKind.DRAFT:
            self.changed_drafts.add(index)
        indices = self._names.get(row.name, [])
        if index in indices:
            indices.remove(index)
            if not indices:
                del self._names[row.name]

    def _note(self, index: int, row: SlotRow) -> None:
        if row.state == SlotState.FREE:
            return
        if not row.is_sound(self._layout):
            self.unsound.add(index)
            return
        self.rows[index] = row
        if row.kind == SlotKind.DRAFT:
            self.changed_drafts.add(index)
        if row.kind == SlotKind.CHUNK and row.state in DATA_STATES and not row.hidden:
            self._names.setdefault(row.name, []).append(index)
