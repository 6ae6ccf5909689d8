"""A process's copy of a segment's table, valid for as long as the table does not change."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tierfs.host.slab.table import DATA_STATES, Layout, SlotKind, SlotRow, SlotState, Table

_TAKEN = frozenset(SlotState) - {SlotState.FREE}


class TableView:
    """One process's last consistent copy of a table. Not thread-safe.

    Attributes:
        changes: The table's counter of changes when it was copied; -1 before the first copy.
        rows: The slots that are not free and pass `SlotRow.is_sound`, by index. Of the others, those that
            `SlotRow.salvage` returns.
        unsound: The slots that fail `SlotRow.is_sound`, by index.
        changed_drafts: Slots that hold or held a draft, and changed since a caller last emptied this set.
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
        """Copy the slots that changed.

        Args:
            stable: Whether the caller keeps other processes from changing the table. If not, the copy counts only if
                the counter of changes is even and did not move meanwhile.

        Returns:
            Whether the copy is consistent.
        """
        before = int(table.changes[0])
        if before % 2 and not stable:
            return False
        state, hidden, serial = table.states(), table.hidden.copy(), table.serial.copy()
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
        """Return the most recently noted chunk of this name that is not hidden."""
        indices = self._names.get(name)
        return (indices[-1], self.rows[indices[-1]]) if indices else None

    def select(self, kind: int | None, states: Collection[int] | None) -> list[tuple[int, SlotRow]]:
        """Return the slots of this kind and in these states, in table order. None means any that is not free."""
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
            salvaged = row.salvage(self._layout)
            if salvaged is None:
                return
            row = salvaged
        self.rows[index] = row
        if row.kind == SlotKind.DRAFT:
            self.changed_drafts.add(index)
        if row.kind == SlotKind.CHUNK and row.state in DATA_STATES and not row.hidden:
            self._names.setdefault(row.name, []).append(index)
