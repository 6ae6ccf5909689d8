"""Lines: which checkpoints of a root follow from each other. A run that goes back to an earlier step begins a new line.

Decision: docs/decisions/0064-lines-of-a-run.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierfs.checkpoint.notes import read_note
from tierfs.errors import FormatError
from tierfs.format.keys import inside
from tierfs.store import Store

if TYPE_CHECKING:
    from tierfs.dcp.checkpoint import Checkpoint  # it loads torch
    from tierfs.dcp.facts import Facts

LINES = ".run/lines"
"""The file in a run's directory that holds its lines. Without it, all checkpoints there count as one line.

It has a directory of its own, so that it can be published while saves below the run's directory are pending.
"""
ABOUT = "tierfs.about"
"""The name of the value that holds a checkpoint's own description."""
FIRST = ""
"""The line of all checkpoints whose line has no entry in the file."""
NOTHING = -1
"""The step at which a line begins if no checkpoint was restored before."""
BYTES_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of the checkpoints in a directory.

    Attributes:
        current: The line in which training goes on.
        begins: By line, the line that it left and the step that was restored there. `FIRST` has no entry.
    """

    current: str = FIRST
    begins: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def begun(self, line: str, parent: str, step: int) -> Lines:
        """Return these lines with a new current one that begins after a step of another one."""
        return Lines(line, {**self.begins, line: (parent if parent in self.begins else FIRST, step)})

    def holds(self, line: str, step: int) -> bool:
        """Return whether the current line goes through a checkpoint."""
        line = line if line in self.begins else FIRST
        at, last = self.current, math.inf
        while at != line and at in self.begins:
            at, begin = self.begins[at]
            last = min(last, begin)
        return at == line and step <= last

    def left(self, line: str, step: int) -> bool:
        """Return whether the run has left a checkpoint behind: it is not on the current line, but of the same run."""
        return not self.holds(line, step) and self._origin(line) == self._origin(self.current)

    def _origin(self, line: str) -> str:
        while self.begins.get(line, (FIRST, NOTHING))[1] > NOTHING:
            line, _ = self.begins[line]
        return line if line in self.begins else FIRST

    def encode(self) -> bytes:
        """Return the content of the file."""
        return json.dumps({"current": self.current, "begins": self.begins}).encode()


def read_lines(store: Store, directory: str) -> Lines | None:
    """Read the lines of the checkpoints in a directory; ``None`` if there is no file.

    Raises:
        FormatError: The file is invalid, or a newer tierfs wrote it.
        CorruptionError, StoreError, ReadOnlyError: As for `read_note`.
    """
    data = read_note(store, directory, LINES, BYTES_MAX)
    if data is None:
        return None
    try:
        document = json.loads(data)
        lines = Lines()
        for line, (parent, step) in document["begins"].items():
            lines = lines.begun(line, str(parent), int(step))  # a parent comes before its children: there is no circle
        return Lines(str(document["current"]), lines.begins)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        where = store.where(inside(directory, LINES))
        raise FormatError(f"{where} is invalid: remove it, then restore the step to go on from", path=where) from error


def line_of(checkpoint: Checkpoint | Facts) -> str | None:
    """Return the line of a checkpoint; `FIRST` if an early training manager saved it, ``None`` if none did."""
    if checkpoint.note is not None and checkpoint.note.run is not None:
        return checkpoint.note.run
    return FIRST if ABOUT in checkpoint.objects else None
