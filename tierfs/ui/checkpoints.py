"""The checkpoints at one URL, kept up to date cheaply: only those that changed are looked at again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierfs.checkpoint.catalog import Candidate, Standing, candidates, standing
from tierfs.checkpoint.notes import DAMAGED, NOTES, Lines, read_lines
from tierfs.checkpoint.prune import check_metrics, facts_of
from tierfs.checkpoint.retention import Best, Decision, Rule, SavedCheckpoint, decide
from tierfs.cli.commands._checkpoint_catalog import list_document, order
from tierfs.cli.files.parallel import Stopped, run_in_parallel
from tierfs.cli.files.places import StorePlace
from tierfs.format.checkpoint import ROOT
from tierfs.format.keys import is_at_or_below
from tierfs.host.pending.levels import Level
from tierfs.store import Usage, usages
from tierfs.store.announced_saves import PENDING
from tierfs.store.tree.references import vanished_roots
from tierfs.store.tree.walk import foreign_objects, live_records

BATCH = 200
"""Checkpoints that are looked at before the page gets them."""


@dataclass(slots=True)
class _Row:
    """A checkpoint of the list.

    Attributes:
        mark: Changes whenever a file of the checkpoint does.
        candidate: Where it is.
        seen: Its state.
        saved: The same, for the rules of what to keep.
        document: The row as the page gets it.
        version: The list's version when the document last changed.
    """

    mark: int
    candidate: Candidate
    seen: Standing
    saved: SavedCheckpoint
    document: dict[str, Any] = field(default_factory=dict)
    version: int = 0


class KeepsNothing:
    """A rule that keeps no checkpoint, so that only the reasons that need no rule are given."""

    def select(self, saved: Sequence[SavedCheckpoint], now_ns: int) -> Iterable[SavedCheckpoint]:
        return ()

    def __str__(self) -> str:
        return ""


class CheckpointList:
    """The checkpoints at or below a place. One thread updates it, others read it.

    Args:
        rules: The rules of what to keep, whose reasons the rows have.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.version = 0
        self.found = self.looked = 0
        self._lock = threading.Lock()
        self._rows: dict[str, _Row] = {}
        self._gone: list[tuple[int, str]] = []
        self._held: dict[str, Usage] = {}
        self._marks: dict[str, int] = {}
        self._best: dict[str, dict[str, str]] = {}

    def __repr__(self) -> str:
        return f"CheckpointList({self.looked} of {self.found}, version {self.version})"

    def changes(self, since: int) -> dict[str, Any]:
        """Return the rows that changed after a version, the newest checkpoint first, and the names of those removed."""
        with self._lock:
            rows = [row for row in self._rows.values() if row.version > since]
            rows.sort(key=lambda row: order(row.seen), reverse=True)
            return {
                "version": self.version,
                "found": self.found,
                "looked": self.looked,
                "has_rules": bool(self.rules),
                "best": self._best,
                "checkpoints": [row.document for row in rows],
                "gone": [name for version, name in self._gone if version > since] if since else [],
            }

    def row(self, directory: str) -> tuple[Candidate, Standing] | None:
        """Return what is known of one checkpoint."""
        with self._lock:
            row = self._rows.get(directory)
            return None if row is None else (row.candidate, row.seen)

    def decisions(self, place: StorePlace, rules: Sequence[Rule]) -> list[Decision]:
        """Return what rules would keep, as ``tierfs prune --dry-run`` does.

        Raises:
            NotFoundError: No checkpoint has the metric of a rule.
            InvalidInputError: There is no rule.
        """
        with self._lock:
            saved = [row.saved for row in self._rows.values()]
        check_metrics(place.store, place.path, rules, saved)
        return decide(saved, rules, place.store.clock.now_ns())

    def refresh(self, place: StorePlace, stop: Callable[[], bool]) -> None:
        """List everything again, and look at what changed since the last time, the newest checkpoint first.

        Args:
            place: The place that the checkpoints are at or below.
            stop: Returns whether to end early.

        Raises:
            StoreError, ReadOnlyError, CorruptionError, FormatError: The store cannot be read.
        """
        marks = _marks(place)
        if marks == self._marks:
            return
        found = {candidate.directory: candidate for candidate in candidates(place.store, place.path)}
        vanished = {path for path in vanished_roots(place.store) if is_at_or_below(path, place.path)}
        found |= {path: Candidate(path, ()) for path in vanished - found.keys()}
        self._drop(self._rows.keys() - found.keys(), place)
        new = [
            candidate
            for path, candidate in found.items()
            if path not in self._rows or self._rows[path].mark != _mark_of(marks, path)
        ]
        new.sort(key=lambda candidate: -1 if candidate.step is None else candidate.step, reverse=True)
        self.found, self.looked = len(found), len(found) - len(new)
        for start in range(0, len(new), BATCH):
            if stop():
                return
            self._look(place, new[start : start + BATCH], marks, vanished, stop)
        self._marks = marks
        self._judge(place)

    def look_at(self, place: StorePlace, directories: Iterable[str]) -> None:
        """Look at single directories again. Raises as `refresh` does."""
        for directory in directories:
            if directory not in self._rows and any(path.startswith(f"{directory}/") for path in self._rows):
                continue  # a run's own directory, in which only a full listing finds what is new
            marks = _marks(StorePlace(place.url, place.store, directory))
            found = [each for each in candidates(place.store, directory) if each.directory == directory]
            if not found:
                self._drop({directory} & self._rows.keys(), place)
            self.found += len({each.directory for each in found} - self._rows.keys())
            self._look(place, found, marks, set(), lambda: False)
        self.looked = self.found = len(self._rows)
        self._judge(place)

    def weigh(self, place: StorePlace) -> None:
        """Count the stored bytes of every checkpoint. Raises `StoreError` or `ReadOnlyError` if that fails."""
        with self._lock:
            directories = sorted((row.seen for row in self._rows.values()), key=order)
        self._held = usages(place.store, [seen.directory for seen in directories])
        self._judge(place)

    def _look(
        self,
        place: StorePlace,
        found: Sequence[Candidate],
        marks: Mapping[str, int],
        vanished: set[str],
        stop: Callable[[], bool],
    ) -> None:
        above = {candidate.directory.rpartition("/")[0] for candidate in found}
        lines = {directory: read_lines(place.store, directory) or Lines() for directory in above}
        rows: dict[str, _Row] = {}

        def look(candidate: Candidate, _stop: threading.Event) -> None:
            if stop():
                raise Stopped
            seen = standing(place.store, candidate)
            if candidate.directory in vanished:
                seen.damage.append(f"{ROOT} has vanished without a tombstone: copy its record back")
            saved = facts_of(place.store, candidate, seen, (), lines)
            mark = _mark_of(marks, candidate.directory)
            rows[candidate.directory] = _Row(mark, candidate, seen, saved)

        run_in_parallel(look, found)
        with self._lock:
            for directory, row in rows.items():
                old = self._rows.get(directory)
                if old is not None:
                    row.document, row.version = old.document, old.version
                self._rows[directory] = row
        self.looked = min(self.found, self.looked + len(rows))
        self._write(place, rows, {})

    def _judge(self, place: StorePlace) -> None:
        """Decide which checkpoints are kept and which are the best, and write all rows again."""
        with self._lock:
            rows = dict(self._rows)
        saved = [row.saved for row in rows.values()]
        decisions = decide(saved, [*self.rules, KeepsNothing()], place.store.clock.now_ns())
        able = [
            row.saved
            for row in rows.values()
            if row.seen.state == "complete" and not row.saved.is_left and DAMAGED not in row.candidate.listed
        ]
        self._best = {
            metric: {
                mode: place.relative(each.path) or place.name
                for mode in ("min", "max")
                for each in Best(1, metric, mode).select(sorted(able, key=lambda one: one.order), 0)
            }
            for metric in sorted({metric for each in able for metric in each.metrics})
        }
        self._write(place, rows, {each.saved.path: each for each in decisions})

    def _write(self, place: StorePlace, rows: Mapping[str, _Row], decisions: Mapping[str, Decision]) -> None:
        """Write the documents of rows, and count a new version for those that changed."""
        with self._lock:
            version = self.version + 1
            for directory, row in rows.items():
                decision = decisions.get(directory)
                kept = (row.document.get("kept"), row.document.get("reasons", []))
                if decision is not None:
                    kept = (decision.is_kept if decision.is_kept or self.rules else None, list(decision.reasons))
                document = {
                    **list_document(place, row.seen, self._held.get(directory)),
                    "path": directory,
                    "metrics": dict(row.saved.metrics),
                    "pinned": row.saved.is_pinned,
                    "left": row.saved.is_left,
                    "marked_damaged": DAMAGED in row.candidate.listed,
                    "reached": _reached(place, row),
                    "kept": kept[0],
                    "reasons": kept[1],
                }
                if document != row.document:
                    row.document, row.version, self.version = document, version, version

    def _drop(self, directories: set[str], place: StorePlace) -> None:
        with self._lock:
            for directory in directories:
                self._rows.pop(directory)
                self._held.pop(directory, None)
                self.version += 1
                self._gone.append((self.version, place.relative(directory) or place.name))


def _reached(place: StorePlace, row: _Row) -> dict[str, float]:
    """Return by level which share of a checkpoint's files has reached it."""
    levels = (Level.STAGED, Level.LOCAL, Level.PEER, Level.OBJECT)
    names = [name for name in row.candidate.listed if name not in NOTES]
    if row.seen.level is Level.OBJECT or place.store.tiers is None or not names:
        return dict.fromkeys((level.label for level in levels), float(row.seen.level is Level.OBJECT or bool(names)))
    tiers, directory = place.store.tiers, row.candidate.directory
    files = [tiers.level(f"{directory}/{name}" if directory else name) for name in names]
    return {level.label: sum(each >= level for each in files) / len(files) for level in levels}


def _mark_of(marks: Mapping[str, int], directory: str) -> int:
    return hash((marks.get(directory), marks.get(f"{directory}/{PENDING}" if directory else PENDING)))


def _marks(place: StorePlace) -> dict[str, int]:
    """Return a number for each directory that changes when a file in it does. It takes listings, and reads no record."""
    store, marks = place.store, dict[str, int]()

    def add(path: str, version: object) -> None:
        directory = path.rpartition("/")[0]
        marks[directory] = hash((marks.get(directory), path, version))

    for path, info in live_records(store, place.path):
        add(path, info.version)
    for info in foreign_objects(store, place.path):
        add(info.key, info.version)
    for path, level in pending_in(place).items():
        add(path, level)
    return marks


def pending_in(place: StorePlace) -> dict[str, Level]:
    """Return the level of each change of this host at a place that the object tier lacks. It sends no request."""
    if place.store.tiers is None:
        return {}
    return {path: pending.level for path, pending in sorted(place.store.tiers.drafts.pending_below(place.path).items())}
