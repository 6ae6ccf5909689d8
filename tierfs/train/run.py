"""`RunDirectory`: the checkpoints of a run, the state of each one, and the notes beside them."""

from __future__ import annotations

import io
import json
import logging
import operator
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from tierfs.checked_json import parse_object
from tierfs.checkpoint.catalog import Candidate, Standing, standing
from tierfs.checkpoint.notes import (
    ABOUT,
    DAMAGED,
    FIRST,
    LINES,
    PINNED,
    RECORD,
    Lines,
    is_pinned,
    line_of,
    metrics_of,
    object_in,
    read_lines,
)
from tierfs.checkpoint.prune import remove, roots_of
from tierfs.checkpoint.retention import Best, SavedCheckpoint
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import Checkpoint, open_checkpoint
from tierfs.dcp.planner import unpickle_safely
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, TierfsError
from tierfs.format.keys import inside
from tierfs.host.pending.levels import Level
from tierfs.repeated_warnings import hide_passwords
from tierfs.store import (
    Store,
    Writer,
    delete,
    directories_in,
    list_directory,
    open_entry,
    save,
    stat_to_read,
    while_reachable,
)
from tierfs.store.commit import Commits
from tierfs.store.read.prefetch import is_held
from tierfs.threads import transfers

OWN = "rank_"
"""Prefix of the names of values that belong to one rank: random generators, the data loader."""
NOTE_BYTES_MAX = 256 << 20
STEP_MAX = 10**18 - 1
_STEP = re.compile(r"step_([0-9]{1,18})")
_logger = logging.getLogger("tierfs.train")
_logger.addFilter(hide_passwords)


def checked_step(step: Any) -> int:
    """Return a step as an integer.

    Raises:
        InvalidInputError: It is not an integer from 0 to `STEP_MAX`. A checkpoint of any other step would not be found.
    """
    try:
        found = operator.index(step)
    except TypeError:
        found = -1
    if not 0 <= found <= STEP_MAX:
        raise InvalidInputError(f"step={step!r}: a step is an integer from 0 to {STEP_MAX}")
    return found


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of metrics, which later changes do not affect. It may hold tensors: they are not read here.

    Raises:
        InvalidInputError: A metric is not a number.
    """
    found: dict[str, Any] = {}
    for name, value in (metrics or {}).items():
        is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        try:
            found[name] = value.detach().clone() if is_tensor else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidInputError(f"metrics: {name!r} is not a number: {error}") from error
    return found


@dataclass(frozen=True, slots=True)
class About:
    """A checkpoint's own description. It is a value of the checkpoint, so both are published together.

    Attributes:
        step: The training step.
        kind: ``full``, or ``light`` for a checkpoint from which training resumes only approximately.
        world_size: The number of ranks that saved it.
        run: The id of the run. It is random, and a resumed run keeps it.
        blocked_s: Seconds for which a save blocked training at that time, for the policies of a resumed run.
        save_s: Seconds that a save took at that time.
        state: Facts about the saved state, such as its epoch and learning rates.
    """

    step: int
    kind: str = "full"
    world_size: int = 1
    run: str = ""
    blocked_s: float = 0.0
    save_s: float = 0.0
    state: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        """Return the description as JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    def added_to(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a state together with this description, as they are saved.

        Raises:
            InvalidInputError: The state has an entry of the same name.
        """
        section, _, name = ABOUT.partition(".")
        if section in values:
            raise InvalidInputError(f"the state has an entry {section!r}, which is reserved for the manager: rename it")
        return {**values, section: {name: self.encode()}}

    @classmethod
    def decode(cls, text: str, where: str) -> About:
        """Parse the JSON of a description.

        Raises:
            FormatError: The text is not a description that this version understands.
        """
        try:
            values = parse_object(text, where, numbers="any")
            return cls(
                step=int(values["step"]),
                kind=str(values["kind"]),
                world_size=int(values["world_size"]),
                run=str(values["run"]),
                blocked_s=float(values["blocked_s"]),
                save_s=float(values["save_s"]),
                state=dict(values["state"]),
            )
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise FormatError(f"{where}: {ABOUT} is invalid, or a newer tierfs wrote it: {error}") from error


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint of a run, as this host sees it.

    Attributes:
        step: The training step.
        kind: ``full`` or ``light``; ``None`` if no manager saved it, or an early one.
        created_ns: The time of the save, in nanoseconds since the epoch.
        level: The lowest level that a part of it has reached; ``none`` if a part is missing.
        is_complete: Whether all its files exist in their full length.
        length: Bytes of its tensors and objects; 0 if unknown.
        metrics: The recorded numbers by name.
        is_pinned: Whether its deletion is forbidden.
        problem: The reason why it cannot be loaded; empty if none is known.
    """

    step: int
    kind: str | None
    created_ns: int
    level: str
    is_complete: bool
    length: int
    metrics: Mapping[str, float]
    is_pinned: bool
    problem: str


class RunDirectory:
    """The directory in a store that holds a run's checkpoints, one directory ``step_N`` for each saved step."""

    def __init__(self, address: Address) -> None:
        self._address = address

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def state_dir(self) -> str | None:
        """The host's state directory as an option or the environment names it; ``None`` for the default."""
        given = self._address.tiers.state_dir
        return os.environ.get("TIERFS_STATE_DIR") if given is None else str(given)

    def url_of(self, step: int) -> str:
        return f"{self._address.url.rstrip('/')}/step_{step}"

    def open(self, *, write: bool = False) -> tuple[Store, str]:
        """Return the store, and the directory's path in it. Raises as `Address.open` does."""
        return self._address.open(write=write)

    def path_of(self, step: int) -> tuple[Store, str]:
        """Return the store, and the path of a step's checkpoint in it."""
        store, path = self.open()
        return store, inside(path, f"step_{step}")

    def steps(self) -> list[int]:
        """Return the steps that have a directory, ascending, complete or not.

        It costs one listing for each directory, and reads no record.

        Raises:
            StoreNotFoundError: There is no store.
            StoreError, ReadOnlyError: The object tier failed.
        """
        store, path = self.open()
        try:
            entries = list_directory(store, path, detail=False)
        except NotFoundError:
            return []
        found = (_STEP.fullmatch(entry.path.rpartition("/")[2]) for entry in entries if entry.is_directory)
        return sorted(int(match[1]) for match in found if match is not None)

    def candidates(self) -> list[int]:
        """Return the same steps with two listings in all. Recently removed steps may be among them."""
        found = (_STEP.fullmatch(name) for name in directories_in(*self.open()))
        return sorted(int(match[1]) for match in found if match is not None)

    def standing(self, step: int) -> Standing:
        """Return the state of a step's checkpoint, as this host sees it.

        If all parts of an announced save have arrived and no process has published it yet, this call publishes it.
        """
        store, path = self.path_of(step)
        candidate = Candidate(path, (None,))
        found = standing(store, candidate)
        if found.state != "complete":
            try:
                Commits(store).advance(path)
            except TierfsError as error:
                _logger.warning("%s: cannot check for a complete save to publish: %s", self.url_of(step), error)
            else:
                found = standing(store, candidate)
        return found

    def problem_of(self, step: int, *, to_load: bool = False) -> str:
        """Return why a step cannot be loaded; empty if no reason is known. No shard file is read.

        With ``to_load``, a mark of damage does not count if this host holds all chunks of the step: another host's
        copies may have been damaged, and each chunk is verified when it is read.
        """
        found = self.standing(step)
        if found.state != "complete":
            return "; ".join(found.damage + found.missing)
        damage = self.damage_of(step)
        if damage and to_load and is_held(*self.path_of(step)):
            _logger.warning(
                "%s was marked as damaged, and this host's own copy is tried: %s", self.url_of(step), damage
            )
            return ""
        return damage

    def was_saved(self, step: int) -> bool:
        """Return whether a step was ever published, even if it is damaged or incomplete now."""
        found = self.standing(step)
        return bool(found.damage) or found.format is not None

    def before(self, step: int) -> int:
        """Return a step if it was ever saved; else the newest complete full one before it, or itself without one."""
        if self.was_saved(step):
            return step
        return next((each for each, found in self.complete() if each < step and found.kind != "light"), step)

    def complete(self) -> Iterator[tuple[int, Standing]]:
        """Yield complete steps of the current line without a damage mark, the newest first.

        Each is looked up only when it is asked for. Steps that no manager saved come last if the root has lines.
        """
        lines, foreign = self.lines(), list[tuple[int, Standing]]()
        for step in reversed(self.candidates()):
            found = self.standing(step)
            if found.state != "complete" or self.damage_of(step):
                continue
            if lines is not None and found.line is None:
                foreign.append((step, found))
            elif lines is None or lines.holds(found.line or FIRST, step):
                yield step, found
        yield from foreign

    def lines(self) -> Lines | None:
        """Return the lines of the root's checkpoints; ``None`` if none are recorded. Raises as `read_lines` does."""
        return read_lines(*self.open())

    def write_lines(self, lines: Lines) -> None:
        """Record the lines of the root's checkpoints, at the level ``object``. Raises as `Writer` does."""
        store, path = self.open(write=True)

        def write() -> None:
            writer = Writer(store, inside(path, LINES), level=Level.OBJECT)
            writer.write(lines.encode())
            writer.commit()

        while_reachable(store, write)

    def describe(self, step: int) -> SavedStep:
        found = self.standing(step)
        return SavedStep(
            step=step,
            kind=found.kind,
            created_ns=found.created_ns,
            level=found.level.label if found.level is not None else "none",
            is_complete=found.state == "complete",
            length=found.length or 0,
            metrics=self.metrics_of(step),
            is_pinned=self.is_pinned(step),
            problem="; ".join(found.damage + found.missing) or self.damage_of(step),
        )

    def checkpoint(self, step: int) -> Checkpoint:
        """Return the metadata of a step. Raises as `open_checkpoint` does."""
        return open_checkpoint(*self.path_of(step))

    @staticmethod
    def about(checkpoint: Checkpoint) -> About | None:
        """Read a checkpoint's own description; ``None`` if no manager saved it.

        Raises:
            NotFoundError, CorruptionError, FormatError: The description cannot be read.
        """
        if ABOUT not in checkpoint.metadata.state_dict_metadata:
            return None
        place = checkpoint.object(ABOUT)
        if place.length > NOTE_BYTES_MAX:
            raise FormatError(f"{checkpoint.where}: {place.length} bytes are too many for {ABOUT}")
        store = checkpoint.store
        data = bytearray(place.length)
        reader = open_entry(store, stat_to_read(store, inside(checkpoint.directory, place.file)))
        reader.read_into(place.at, memoryview(data))
        return About.decode(str(unpickle_safely(ABOUT, io.BytesIO(data))), checkpoint.where)

    def kind_of(self, step: int, lines: Lines | None) -> str:
        """Return the kind of a checkpoint: ``full`` or ``light``.

        If the root has lines, it is ``left`` if the current line does not go through the checkpoint, else ``foreign``
        if no manager saved it. Raises as `checkpoint` and `about` do.
        """
        checkpoint = self.checkpoint(step)
        if lines is not None:
            line = line_of(checkpoint)
            if not lines.holds(line or FIRST, step):
                return "left"
            if line is None:
                return "foreign"
        return (checkpoint.note.kind if checkpoint.note is not None else None) or "full"

    def note_of(self, step: int, name: str) -> dict[str, Any]:
        """Return the JSON object in a note beside a checkpoint; empty if there is no readable one."""
        return object_in(*self.path_of(step), name, NOTE_BYTES_MAX)

    def write_note(self, step: int, name: str, value: Mapping[str, Any]) -> None:
        """Write a note. Raises as `tierfs.store.save` does."""
        self.write_file(step, name, json.dumps(value).encode())

    def write_file(self, step: int, name: str, data: bytes) -> None:
        """Write a file beside a checkpoint. Raises as `tierfs.store.save` does."""
        store, path = self.path_of(step)
        save(store, inside(path, name), data)

    def record_of(self, step: int) -> dict[str, Any] | None:
        """Return the record of a step's state; ``None`` if there is none for the present save of the step.

        Another host may have removed the step since it was loaded. Then there is none either.
        """
        record = self.note_of(step, RECORD)
        save_id = self._save_id(step) if record else ""
        return record if save_id and record.get("save_id") == save_id else None

    def mark_damaged(self, step: int, why: str) -> None:
        """Note that the present save of a step could not be loaded. A later save of the step makes the note invalid."""
        self.write_note(step, DAMAGED, {"save_id": self._save_id(step), "why": why})

    def damage_of(self, step: int) -> str:
        """Return why a step was marked as damaged; empty if it was not."""
        mark = self.note_of(step, DAMAGED)
        return str(mark.get("why")) if mark and mark.get("save_id") == self._save_id(step) else ""

    def metrics_of(self, step: int) -> dict[str, float]:
        return metrics_of(*self.path_of(step))

    def best(self, rule: Best) -> int | None:
        """Return the best complete step of the current line by a metric; ``None`` if there is none."""
        lines, steps = self.lines(), self.steps()
        metrics = transfers().map(self.metrics_of, steps)
        saved = [
            SavedCheckpoint(str(step), step, step, metrics=each) for step, each in zip(steps, metrics, strict=True)
        ]
        while found := list(rule.select(saved, 0)):
            step = found[0].step
            if step is not None and not self.problem_of(step) and self.kind_of(step, lines) != "left":
                return step
            saved.remove(found[0])
        return None

    def is_pinned(self, step: int) -> bool:
        return is_pinned(*self.path_of(step))

    def pin(self, step: int) -> None:
        """Forbid the deletion of a step. Raises as `checkpoint` does if there is no checkpoint."""
        self.checkpoint(step)
        self.write_note(step, PINNED, {})

    def unpin(self, step: int) -> None:
        store, path = self.path_of(step)
        with suppress(NotFoundError):
            delete(store, inside(path, PINNED))

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step.

        Raises:
            InvalidInputError: The checkpoint is pinned.
            NotFoundError: There is no such checkpoint.
            ConflictError: The step was saved again in the meantime.
        """
        if self.is_pinned(step):
            raise InvalidInputError(f"{self.url_of(step)} is pinned: unpin it first")
        self.checkpoint(step)
        store, path = self.path_of(step)
        candidate = Candidate(path, (None,))
        remove(store, candidate, roots_of(store, candidate))

    def _save_id(self, step: int) -> str:
        try:
            note = self.checkpoint(step).note
        except (NotFoundError, CorruptionError, FormatError, InvalidInputError):
            return ""
        return note.save_id if note is not None else ""
