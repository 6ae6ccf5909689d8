"""Small files that describe checkpoints.

Notes lie beside a checkpoint: its metrics, a pin, a damage mark, the training manager's record. A file in the run's
directory has its lines, which say which checkpoints follow from each other. A run that goes back to an earlier step
begins a new line.

The files below `DIRECTORY` are logged steps, from which training makes the steps after a checkpoint again. One file has
what one rank logged of one step. Steps that follow each other without another full save are a *chain*, which has a
directory. A file's name says which step it follows, so that a listing shows how far the log goes.

Decisions: docs/decisions/0064-lines-of-a-run.md, docs/decisions/0071-a-log-of-gradients.md.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierfs.checked_json import parse_object
from tierfs.checkpoint.step_logs import logs_of, remove_files
from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format.keys import inside
from tierfs.store import Store, find
from tierfs.store.read.reader import open_manifest
from tierfs.store.tree.listing import check_hidden
from tierfs.store.tree.records import observe_to_read

if TYPE_CHECKING:
    from tierfs.dcp.checkpoint import Checkpoint  # it loads torch
    from tierfs.dcp.facts import Facts

METRICS = ".metrics"
"""A JSON object with a number for each metric."""
PINNED = ".pinned"
"""Its existence forbids the deletion of the checkpoint."""
RECORD = ".record"
"""A JSON object: the record that the training manager made of the state."""
DAMAGED = ".damaged"
"""A JSON object with the reason why the checkpoint could not be loaded."""
FILES = ".files"
"""A JSON object: the names of files that a save wrote beside the checkpoint, with their lengths in bytes."""
NOTES = (METRICS, RECORD, DAMAGED, PINNED, FILES)
OBJECT_BYTES_MAX = 1 << 20
_logger = logging.getLogger("tierfs.train")
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
LINES_BYTES_MAX = 1 << 24
DIRECTORY = "replay"
"""The directory in a run's directory that holds its logged steps."""
_NAME = re.compile(r"([0-9a-f-]{1,80})/([0-9]{1,18})-([0-9]{1,18})\.rank-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")


def read_note(store: Store, directory: str, name: str, bytes_max: int) -> bytes | None:
    """Read a note; ``None`` if there is none. A missing note costs one request, because only tierfs writes notes.

    Raises:
        FormatError: The note is longer than ``bytes_max``.
        CorruptionError: The note is damaged, or a damaged segment of this host may hold a newer one.
        StoreError, ReadOnlyError: The object tier failed.
    """
    path = inside(directory, name)
    manifest = observe_to_read(store, path).manifest
    if manifest is None:
        check_hidden(store, path)
        return None
    if manifest.length > bytes_max:
        raise FormatError(f"{store.where(path)}: {manifest.length} bytes are too many for a note", path=path)
    data = bytearray(manifest.length)
    open_manifest(store, path, manifest).read_into(0, memoryview(data))
    return bytes(data)


def metrics_of(store: Store, directory: str) -> dict[str, float]:
    """Return a checkpoint's metrics by name; none if they are missing or cannot be read."""
    values = object_in(store, directory, METRICS)
    return {name: float(value) for name, value in values.items() if type(value) in {int, float}}


def object_in(store: Store, directory: str, name: str, bytes_max: int = OBJECT_BYTES_MAX) -> dict[str, Any]:
    """Return the JSON object in a note; empty if it is missing or cannot be read. The latter is logged."""
    try:
        data = read_note(store, directory, name, bytes_max)
        return {} if not data else parse_object(data, "its content", numbers="any")
    except (NotFoundError, CorruptionError, FormatError) as error:
        _logger.warning("%s cannot be read: %s", store.where(inside(directory, name)), error)
        return {}


def is_pinned(store: Store, directory: str) -> bool:
    """Return whether a checkpoint is pinned. A note that cannot be read counts as a pin."""
    try:
        return observe_to_read(store, inside(directory, PINNED)).manifest is not None
    except (CorruptionError, FormatError):
        return True


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
    data = read_note(store, directory, LINES, LINES_BYTES_MAX)
    if data is None:
        return None
    try:
        document, begins = parse_object(data, "its content"), dict[str, tuple[str, int]]()
        for line, (parent, step) in document["begins"].items():
            if line == FIRST:
                raise ValueError("a line has no name")
            # A parent comes before its children: there is no circle.
            begins[line] = (parent if parent in begins else FIRST, int(step))
        return Lines(str(document["current"]), begins)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        where = store.where(inside(directory, LINES))
        raise FormatError(f"{where} is invalid: remove it, then restore the step to go on from", path=where) from error


def line_of(checkpoint: Checkpoint | Facts) -> str | None:
    """Return the line of a checkpoint; `FIRST` if an early training manager saved it, ``None`` if none did."""
    if checkpoint.note is not None and checkpoint.note.run is not None:
        return checkpoint.note.run
    return FIRST if ABOUT in checkpoint.objects else None


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One file of the log.

    Attributes:
        store: The log in memory, or the run's store, that has the file.
        chain: The name of its chain. Names sort by the time at which their chains began.
        after: The step that it follows.
        step: The training step that it leads to.
        rank: The rank that logged it.
        ranks: The number of ranks that logged the step.
    """

    store: Store = field(compare=False, repr=False)
    chain: str
    after: int
    step: int
    rank: int
    ranks: int

    def path(self, run: str) -> str:
        """Return the file's path, for the path of the run's directory; both relative to the store."""
        name = f"{self.after}-{self.step}.rank-{self.rank:05d}-of-{self.ranks:05d}.safetensors"
        return inside(inside(inside(run, DIRECTORY), self.chain), name)


def logged_steps(run: str, *places: Store) -> list[LoggedStep]:
    """Return the files of a run's log that this host sees, in the order of their chains and steps. Reads no file.

    ``places`` are the run's store, and its log in memory.

    Raises:
        StoreError, ReadOnlyError: The object tier cannot be listed.
    """
    below = inside(run, DIRECTORY)
    entries = [(store, entry) for store in places for entry in find(store, below, detail=False)]
    found = [one for store, entry in entries for one in parse(store, [entry.path], below) if not entry.is_directory]
    return sorted(found, key=lambda one: (one.chain, one.after, one.rank))


def parse(store: Store, paths: Iterable[str], below: str) -> list[LoggedStep]:
    """Return the files of a log among paths of a store. ``below`` is the directory of the log."""
    matches = (_NAME.fullmatch(path[len(below) + 1 :]) for path in paths if path.startswith(f"{below}/"))
    return [LoggedStep(store, match[1], *map(int, match.groups()[1:])) for match in matches if match is not None]


def count_after(logged: Collection[LoggedStep], step: int | None) -> int:
    """Return how many files follow a checkpoint's step in the log without a gap, counting those of all ranks once."""
    ranks: dict[tuple[int, int, str], set[int]] = {}
    for one in logged:
        ranks.setdefault((one.after, one.step, one.chain), set()).add(one.rank)
    whole = {(one.after, one.step) for one in logged if len(ranks[one.after, one.step, one.chain]) == one.ranks}
    count = 0
    while nexts := [later for after, later in whole if step is not None and after == step < later]:
        step, count = min(nexts), count + 1
    return count


def remove_logged(store: Store, run: str, until: float) -> None:
    """Remove the files that lead to a step of a run, or to an earlier one. Raises as `delete` does."""
    with logs_of(store) as logs:
        remove_steps(run, [one for one in logged_steps(run, store, *logs) if one.step <= until])


def remove_steps(run: str, steps: Collection[LoggedStep]) -> None:
    """Remove files of a run's log. Raises as `delete` does."""
    for store in {id(one.store): one.store for one in steps}.values():
        remove_files(store, [one.path(run) for one in steps if one.store is store])
