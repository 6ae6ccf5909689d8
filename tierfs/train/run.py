"""A run's directory: which steps it has, how each one stands, and what is noted beside them."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tierfs.checkpoint.catalog import Candidate, Standing, standing
from tierfs.checkpoint.notes import DAMAGED, METRICS, PINNED, RECORD, is_pinned, metrics_of, read_note
from tierfs.checkpoint.prune import remove, roots_of
from tierfs.checkpoint.retention import Best, SavedCheckpoint
from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import Checkpoint, open_checkpoint
from tierfs.dcp.planner import unpickle_safely
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, TierfsError
from tierfs.format.keys import inside
from tierfs.store import Store, delete, directories_in, list_directory, open_entry, save, stat_to_read
from tierfs.store.commit import Commits
from tierfs.store.transfers import transfers

__all__ = ["ABOUT", "About", "RunDirectory", "SavedStep"]

ABOUT = "tierfs.about"
"""Name of the value in a checkpoint that says what it is."""
NOTE_BYTES_MAX = 256 << 20
_STEP = re.compile(r"step_([0-9]{1,18})")
_logger = logging.getLogger("tierfs.train")


@dataclass(frozen=True, slots=True)
class About:
    """A checkpoint's own description, published with it in one piece.

    Attributes:
        step: Of the training.
        kind: ``full``, or ``light`` for one that training goes on from only approximately.
        world_size: How many ranks saved it.
        run: Of which run it is: an id drawn at random, kept by those who resume.
        blocked_s: How long a save blocked training then, for the policies of who goes on from here.
        save_s: How long a save took then.
        state: What the saved state says of itself.
    """

    step: int
    kind: str = "full"
    world_size: int = 1
    run: str = ""
    blocked_s: float = 0.0
    save_s: float = 0.0
    state: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        """As JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    def added_to(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a state and this one, as they are saved.

        Raises:
            InvalidInputError: The state has a value of this one's name.
        """
        section, _, name = ABOUT.partition(".")
        if section in values:
            raise InvalidInputError(f"the state has an entry called {section!r}, which is the manager's")
        return {**values, section: {name: self.encode()}}

    @classmethod
    def decode(cls, text: str, where: str) -> About:
        """Read it.

        Raises:
            FormatError: It is none.
        """
        try:
            values = json.loads(text)
            return cls(
                step=int(values["step"]),
                kind=str(values["kind"]),
                world_size=int(values["world_size"]),
                run=str(values["run"]),
                blocked_s=float(values["blocked_s"]),
                save_s=float(values["save_s"]),
                state=dict(values["state"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{where}: {ABOUT} says nothing that this version understands: {error}") from error


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint of a run, as this host sees it.

    Attributes:
        step: Of the training.
        created_ns: When it was saved, in nanoseconds since the epoch.
        level: The lowest that a part of it has reached; ``none`` where one is missing.
        is_complete: Whether all of it is there.
        length: Bytes of its tensors and objects.
        metrics: By name.
        is_pinned: Whether retention leaves it.
        problem: Why it cannot be loaded; empty where nothing is known against it.
    """

    step: int
    created_ns: int
    level: str
    is_complete: bool
    length: int
    metrics: Mapping[str, float]
    is_pinned: bool
    problem: str


class RunDirectory:
    """The directory in a store under which a run has one checkpoint a step, ``step_N``.

    Args:
        address: Where.
    """

    def __init__(self, address: Address) -> None:
        self._address = address

    def __repr__(self) -> str:
        return f"RunDirectory({self._address.url!r})"

    @property
    def url(self) -> str:
        """Where it is."""
        return self._address.url

    def url_of(self, step: int) -> str:
        """Where a step's checkpoint is."""
        return f"{self._address.url.rstrip('/')}/step_{step}"

    def open(self, *, write: bool = False) -> tuple[Store, str]:
        """The store, and the path in it. Raises as `Address.open` does."""
        return self._address.open(write=write)

    def path_of(self, step: int) -> tuple[Store, str]:
        """The store, and the path of a step's checkpoint in it."""
        store, path = self.open()
        return store, inside(path, f"step_{step}")

    def steps(self) -> list[int]:
        """The steps that have a directory, ascending, whatever is in there. A listing for each one; no record is read.

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
        """The same, and steps that were removed lately; two listings, however many there are."""
        found = (_STEP.fullmatch(name) for name in directories_in(*self.open()))
        return sorted(int(match[1]) for match in found if match is not None)

    def standing(self, step: int) -> Standing:
        """How a step's checkpoint stands, as this host sees it.

        A save whose last part has arrived, and that nobody published yet, is published now.
        """
        store, path = self.path_of(step)
        candidate = Candidate(path, (None,))
        found = standing(store, candidate)
        if found.state != "complete":
            try:
                Commits(store).advance(path)
            except TierfsError as error:
                _logger.warning("%s: a save that is complete by now may go unseen: %s", self.url_of(step), error)
            else:
                found = standing(store, candidate)
        return found

    def problem_of(self, step: int) -> str:
        """The reason why a step cannot be loaded, as far as is seen without reading it; empty for none."""
        found = self.standing(step)
        if found.state != "complete":
            return "; ".join(found.damage + found.missing)
        return self.damage_of(step)

    def was_saved(self, step: int) -> bool:
        """Whether a step was published at some time, whatever is wrong with it now."""
        found = self.standing(step)
        return bool(found.damage) or found.format is not None

    def complete(self) -> Iterator[tuple[int, Standing]]:
        """Steps that can be loaded as far as is seen without reading them, the newest first. Looked at one by one."""
        for step in reversed(self.candidates()):
            found = self.standing(step)
            if found.state == "complete" and not self.damage_of(step):
                yield step, found

    def describe(self, step: int) -> SavedStep:
        """Describe a step."""
        found = self.standing(step)
        return SavedStep(
            step=step,
            created_ns=found.created_ns,
            level=found.level.label if found.level is not None else "none",
            is_complete=found.state == "complete",
            length=found.length or 0,
            metrics=self.metrics_of(step),
            is_pinned=self.is_pinned(step),
            problem="; ".join(found.damage + found.missing) or self.damage_of(step),
        )

    def checkpoint(self, step: int) -> Checkpoint:
        """A step's metadata. Raises as `open_checkpoint` does."""
        return open_checkpoint(*self.path_of(step))

    def about(self, step: int) -> About | None:
        """Read a checkpoint's own description; ``None`` where no manager saved it.

        Raises:
            NotFoundError, CorruptionError, FormatError: It cannot be read.
        """
        checkpoint = self.checkpoint(step)
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

    def note_of(self, step: int, name: str) -> dict[str, Any]:
        """A small file of JSON beside a checkpoint; empty where there is none that can be read."""
        store, path = self.path_of(step)
        try:
            value = json.loads(read_note(store, path, name, NOTE_BYTES_MAX) or b"{}")
        except (CorruptionError, FormatError, ValueError) as error:
            _logger.warning("%s/%s cannot be read: %s", self.url_of(step), name, error)
            return {}
        return value if isinstance(value, dict) else {}

    def write_note(self, step: int, name: str, value: Mapping[str, Any]) -> None:
        """Write one. Raises as `tierfs.store.save` does."""
        store, path = self.path_of(step)
        save(store, inside(path, name), json.dumps(value).encode())

    def remove_note(self, step: int, name: str) -> None:
        """Remove one, if it is there."""
        store, path = self.path_of(step)
        try:
            delete(store, inside(path, name))
        except NotFoundError:
            return

    def record_of(self, step: int) -> dict[str, Any] | None:
        """The record of the state at a step's save; ``None`` where there is none, or it belongs to another save of the step."""
        record = self.note_of(step, RECORD)
        if not record:
            return None
        note = self.checkpoint(step).note
        return record if note is not None and record.get("save_id") == note.save_id else None

    def mark_damaged(self, step: int, why: str) -> None:
        """Note that a step could not be loaded, so that nobody takes it for a good one. Another save of it is not concerned."""
        self.write_note(step, DAMAGED, {"save_id": self._save_id(step), "why": why})

    def damage_of(self, step: int) -> str:
        """Why a step was marked as damaged; empty where it was not."""
        mark = self.note_of(step, DAMAGED)
        return str(mark.get("why")) if mark and mark.get("save_id") == self._save_id(step) else ""

    def metrics_of(self, step: int) -> dict[str, float]:
        """The metrics that were noted beside a checkpoint."""
        return metrics_of(*self.path_of(step))

    def metrics(self) -> dict[int, dict[str, float]]:
        """The same of all steps."""
        steps = self.steps()
        return dict(zip(steps, transfers().map(self.metrics_of, steps), strict=True))

    def best(self, rule: Best) -> int | None:
        """The best step by a metric of those that can be loaded, as far as is seen without reading them."""
        saved = [SavedCheckpoint(str(step), step, step, metrics=metrics) for step, metrics in self.metrics().items()]
        while found := list(rule.select(saved, 0)):
            step = found[0].step
            if step is not None and not self.problem_of(step):
                return step
            saved.remove(found[0])
        return None

    def is_pinned(self, step: int) -> bool:
        """Whether retention leaves a step."""
        return is_pinned(*self.path_of(step))

    def pin(self, step: int) -> None:
        """Have retention leave a step. Raises as `checkpoint` does."""
        self.checkpoint(step)
        self.write_note(step, PINNED, {})

    def unpin(self, step: int) -> None:
        """Let retention decide on it again."""
        self.remove_note(step, PINNED)

    def remove(self, step: int) -> None:
        """Remove a step's checkpoint.

        Raises:
            InvalidInputError: It is pinned.
            NotFoundError: It is not there.
            ConflictError: It was saved anew meanwhile.
        """
        if self.is_pinned(step):
            raise InvalidInputError(f"{self.url_of(step)} is pinned: unpin it first")
        self.checkpoint(step)
        store, path = self.path_of(step)
        candidate = Candidate(path, (None,))
        remove(store, candidate, roots_of(store, candidate))

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note a checkpoint's metrics, for `tierfs prune` too."""
        self.write_note(step, METRICS, metrics)

    def _save_id(self, step: int) -> str:
        try:
            note = self.checkpoint(step).note
        except (NotFoundError, CorruptionError, FormatError, InvalidInputError):
            return ""
        return note.save_id if note is not None else ""
