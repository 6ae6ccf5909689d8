"""The checkpoints at one URL, kept up to date cheaply: only those that changed are looked at again."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierfs.checkpoint.catalog import Candidate, Standing, candidates, natural_key, standing
from tierfs.checkpoint.notes import DAMAGED, NOTES, Lines, read_lines
from tierfs.checkpoint.prune import check_metrics, facts_of
from tierfs.checkpoint.retention import Best, Decision, Rule, SavedCheckpoint, decide
from tierfs.cli.commands._checkpoint_catalog import list_document, order
from tierfs.cli.files.places import StorePlace
from tierfs.cli.files.transfer import run_in_parallel
from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format.checkpoint import ROOT, is_save_id
from tierfs.format.keys import inside, is_at_or_below
from tierfs.host.pending.levels import Level
from tierfs.store import Usage, stat, usages
from tierfs.store.announced_saves import PENDING
from tierfs.store.tree.records import observe_to_read
from tierfs.store.tree.references import vanished_roots
from tierfs.store.tree.walk import foreign_objects, live_records
from tierfs.ui.files import file_document

BATCH = 200
"""Checkpoints that are looked at before the page gets them."""
FILES_MAX = 200
"""Single files that the page gets."""
_SINGLE = ".ckpt"
"""How the names of checkpoints end that are one file, as Lightning saves them without tierfs's plug."""
_LEVELS = (Level.STAGED, Level.LOCAL, Level.PEER, Level.OBJECT)
_NOTHING = Best(1, "\0")  # no checkpoint has this metric: the reasons remain that need no rule


@dataclass(slots=True)
class _ListedCheckpoint:
    """A checkpoint of the list, with the document that the page gets and the list's version when that changed."""

    mark: int  # changes whenever a file of the checkpoint does
    candidate: Candidate
    seen: Standing
    saved: SavedCheckpoint
    document: dict[str, Any] = field(default_factory=dict)
    version: int = 0


class CheckpointList:
    """The checkpoints at or below a place. One thread updates it, others read it.

    ``rules`` of what to keep give the reasons in the rows. ``version`` counts the changes of rows. ``looked`` of the
    ``found`` checkpoints were looked at since they changed.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.version = self.found = self.looked = 0
        self._lock = threading.Lock()
        self._rows: dict[str, _ListedCheckpoint] = {}
        self._gone: list[tuple[int, str]] = []
        self._changed: set[str] = set()
        # By path, with the mark of what it counted.
        self._held: dict[str, tuple[int, Usage]] = {}
        self._held_version = 0
        self._marks: dict[str, int] = {}
        self._best: dict[str, dict[str, str]] = {}
        self._versions: dict[str, object] = {}
        self._files: list[dict[str, Any]] = []
        self._files_version = 0

    def changes(self, since: int, limit: int | None = None) -> dict[str, Any]:
        """Return rows that changed after a version, the newest checkpoint first, and the paths of those removed.

        ``files`` are the checkpoints that are one file; ``None`` if none of them changed after that version.
        """
        with self._lock:
            rows = [row for row in self._rows.values() if row.version > since]
            rows.sort(key=lambda row: order(row.seen), reverse=True)
            return {
                "version": self.version,
                "found": self.found,
                "looked": self.looked,
                "best": self._best,
                "checkpoints": [row.document for row in rows[:limit]],
                "gone": [path for version, path in self._gone if version > since] if since else [],
                "files": self._files[:FILES_MAX] if self._files_version > since or not since else None,
                "files_left_out": len(self._files[FILES_MAX:]),
            }

    def roots_of(self, path: str) -> tuple[tuple[str, bytes], ...]:
        """Return the write ids of a checkpoint's metadata, which identify its content; none if it is not known."""
        with self._lock:
            return tuple(sorted(self._rows[path].seen.roots.items())) if path in self._rows else ()

    def decisions(self, place: StorePlace, rules: Sequence[Rule]) -> list[Decision]:
        """Return what rules would keep, as ``tierfs prune --dry-run`` does. Raises as `prune` does."""
        with self._lock:
            saved = [row.saved for row in self._rows.values()]
        check_metrics(place.store, place.path, rules, saved)
        return decide(saved, rules, place.store.clock.now_ns())

    def refresh(self, place: StorePlace) -> None:
        """List everything again, and look at what changed, the newest first. Raises `TierfsError` if that fails."""
        files = _files(place)
        marks = _marks(files)
        if marks == self._marks:
            return
        self._list_files(place, {path: version for path, version in files if path.endswith(_SINGLE)})
        found = {candidate.directory: candidate for candidate in candidates(place.store, place.path)}
        vanished = {path for path in vanished_roots(place.store) if is_at_or_below(path, place.path)}
        found |= {path: Candidate(path, ()) for path in vanished - found.keys()}
        with self._lock:
            known = {path: row.mark for path, row in self._rows.items()}
        self._drop(known.keys() - found.keys())
        new = [each for path, each in found.items() if known.get(path) != _mark_of(marks, path)]
        new.sort(key=lambda candidate: -1 if candidate.step is None else candidate.step, reverse=True)
        self.found, self.looked = len(found), len(found) - len(new)
        for start in range(0, len(new), BATCH):
            self._look(place, new[start : start + BATCH], marks, vanished)
        self._marks = marks
        self._judge(place)
        if self.version != self._held_version:
            rows = {row.seen.directory: row.mark for row in self._ordered()}
            self._held = {path: (rows[path], usage) for path, usage in usages(place.store, list(rows)).items()}
            self._judge(place)
            self._held_version = self.version

    def look_at(self, place: StorePlace, directories: Iterable[str]) -> None:
        """Look at single directories again. Raises `TierfsError` if that fails."""
        # Only a full listing finds what is new below a run's own directory.
        with self._lock:
            known = set(self._rows)
        runs = {path.rpartition("/")[0] for path in known} - known
        directories = [path for path in directories if path not in runs]
        for directory in directories:
            marks = _marks(_files(StorePlace(place.url, place.store, directory)))
            found = [each for each in candidates(place.store, directory) if each.directory == directory]
            self._drop({directory} & known if not found else ())
            self._look(place, found, marks, ())
        if directories:
            self.looked = self.found = len(self._rows)
            self._judge(place)

    def look_up(self, place: StorePlace, directories: Iterable[str]) -> None:
        """Drop those of some rows whose checkpoint has gone. It takes a request for each, and any thread may call it.

        `take_changed` returns those that were saved again. Checkpoints that other programs wrote are not looked up.
        Raises `TierfsError` if a look fails.
        """
        with self._lock:
            rows = [row for path in directories if (row := self._rows.get(path)) is not None and row.seen.roots]
        gone: list[str] = []
        changed: list[str] = []

        def look(row: _ListedCheckpoint, _stop: threading.Event) -> None:
            path, write_id = min(row.seen.roots.items())
            try:  # `stat` would go on to list a directory of that name
                manifest = observe_to_read(place.store, path).manifest
            except (CorruptionError, FormatError):
                changed.append(row.seen.directory)
                return
            if manifest is None:
                gone.append(row.seen.directory)
            elif manifest.write_id != write_id:
                changed.append(row.seen.directory)

        run_in_parallel(look, rows)
        self._drop(gone)
        with self._lock:
            self._changed.update(changed)

    def take_changed(self) -> set[str]:
        """Return the rows to look at again that `look_up` has found since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
        return changed

    def _list_files(self, place: StorePlace, versions: dict[str, object]) -> None:
        """Read the records of single files that changed, those of the last `FILES_MAX` names."""
        if versions == self._versions:
            return
        paths = sorted(versions, key=natural_key, reverse=True)
        known = {
            file["path"]: file for file in self._files if self._versions.get(file["path"]) == versions.get(file["path"])
        }
        known |= {path: {"name": place.relative(path), "path": path} for path in paths[FILES_MAX:]}

        def look(path: str, _stop: threading.Event) -> None:
            try:
                known[path] = file_document(place, stat(place.store, path))
            except (NotFoundError, CorruptionError, FormatError):
                known[path] = {
                    "name": place.relative(path),
                    "path": path,
                    "size": None,
                    "modified": None,
                    "level": None,
                }

        run_in_parallel(look, [path for path in paths if path not in known])
        with self._lock:
            self.version += 1
            self._versions, self._files, self._files_version = versions, [known[path] for path in paths], self.version

    def _ordered(self) -> list[_ListedCheckpoint]:
        with self._lock:
            rows = [*self._rows.values()]
        return sorted(rows, key=lambda row: order(row.seen))

    def _look(
        self, place: StorePlace, found: Sequence[Candidate], marks: Mapping[str, int], vanished: Collection[str]
    ) -> None:
        above = {candidate.directory.rpartition("/")[0] for candidate in found}
        lines = {directory: read_lines(place.store, directory) or Lines() for directory in above}
        rows: dict[str, _ListedCheckpoint] = {}

        def look(candidate: Candidate, _stop: threading.Event) -> None:
            seen, path = standing(place.store, candidate), candidate.directory
            if path in vanished:
                seen.damage.append(f"{ROOT} has vanished without a tombstone: copy its record back")
            old, saved = self._rows.get(path), facts_of(place.store, candidate, seen, (), lines)
            kept = (old.document, old.version) if old is not None else ({}, 0)
            rows[path] = _ListedCheckpoint(_mark_of(marks, path), candidate, seen, saved, *kept)

        run_in_parallel(look, found)
        with self._lock:
            self._rows |= rows
        self.looked = min(self.found, self.looked + len(rows))
        self._write(place, rows.values(), {})

    def _judge(self, place: StorePlace) -> None:
        """Decide which checkpoints are kept and which are the best, and write all rows again."""
        rows = self._ordered()
        decisions = decide([row.saved for row in rows], [*self.rules, _NOTHING], place.store.clock.now_ns())
        able = [
            row.saved
            for row in rows
            if row.seen.state == "complete" and not row.saved.is_left and DAMAGED not in row.candidate.listed
        ]
        metrics = sorted({metric for each in able for metric in each.metrics})
        self._best = {
            metric: {mode: best.path for mode in ("min", "max") for best in Best(1, metric, mode).select(able, 0)}
            for metric in metrics
        }
        self._write(place, rows, {each.saved.path: each for each in decisions})

    def _write(self, place: StorePlace, rows: Iterable[_ListedCheckpoint], decisions: Mapping[str, Decision]) -> None:
        """Write the documents of rows, and count a new version for those that changed."""
        with self._lock:
            version = self.version + 1
            for row in rows:
                path, reasons, kept = row.saved.path, row.document.get("reasons", []), row.document.get("kept")
                if decision := decisions.get(path):
                    reasons = list(decision.reasons)
                    kept = decision.is_kept if reasons or self.rules else None
                document = {
                    **list_document(place, row.seen, self._usage_of(row)),
                    "path": path,
                    "metrics": dict(row.saved.metrics),
                    "pinned": row.saved.is_pinned,
                    "left": row.saved.is_left,
                    "marked_damaged": DAMAGED in row.candidate.listed,
                    "reached": _reached(place, row),
                    "kept": kept,
                    "reasons": reasons,
                }
                if document != row.document:
                    row.document, row.version, self.version = document, version, version

    def _usage_of(self, row: _ListedCheckpoint) -> Usage | None:
        """Return what is stored of a checkpoint; ``None`` while the object tier lacks some of it, or it was not counted."""
        mark, usage = self._held.get(row.seen.directory, (0, None))
        is_there = row.seen.level is Level.OBJECT or (row.seen.level is None and not row.seen.waiting)
        if usage is None or mark != row.mark or not is_there:
            return None
        return usage if usage.stored_bytes + usage.foreign_bytes or not row.seen.length else None

    def _drop(self, directories: Iterable[str]) -> None:
        with self._lock:
            for directory in directories:
                if self._rows.pop(directory, None) is not None:
                    self.version += 1
                    self._gone.append((self.version, directory))
                    self.found, self.looked = self.found - 1, min(self.looked, self.found - 1)


def _reached(place: StorePlace, row: _ListedCheckpoint) -> dict[str, float]:
    """Return by level the share of a checkpoint's files that have reached it."""
    tiers, names = place.store.tiers, [name for name in row.candidate.listed if name not in NOTES]
    if row.seen.level is Level.OBJECT or tiers is None or not names:
        return {level.label: float(row.seen.level is Level.OBJECT or bool(names)) for level in _LEVELS}
    files = [tiers.level(inside(row.candidate.directory, name)) for name in names]
    return {level.label: sum(each >= level for each in files) / len(files) for level in _LEVELS}


def _mark_of(marks: Mapping[str, int], directory: str) -> int:
    return hash((marks.get(directory), marks.get(inside(directory, PENDING))))


def _files(place: StorePlace) -> list[tuple[str, object]]:
    """Return each file, and what changes whenever it does. It takes listings, and reads no record."""
    files: list[tuple[str, object]] = [(path, info.version) for path, info in live_records(place.store, place.path)]
    files += [(info.key, info.version) for info in foreign_objects(place.store, place.path)]
    files += sorted(pending_in(place).items())
    return files


def _marks(files: Iterable[tuple[str, object]]) -> dict[str, int]:
    """Return a number for each directory that changes when a file in it does."""
    marks: dict[str, int] = {}
    for path, version in files:
        directory = path.rpartition("/")[0]
        marks[directory] = hash((marks.get(directory), path, version))
    return marks


def pending_in(place: StorePlace) -> dict[str, Level]:
    """Return the level of each change of this host at a place that the object tier lacks. It sends no request."""
    drafts = place.store.tiers.drafts.pending_below(place.path) if place.store.tiers is not None else {}
    return {path: pending.level for path, pending in drafts.items()}


def directory_of(path: str) -> str:
    """Return the directory of the checkpoint that a file belongs to, if it belongs to one."""
    directory, _, name = path.rpartition("/")
    is_announced = directory.rpartition("/")[2] == PENDING and is_save_id(name)
    return directory[: -len(PENDING)].rstrip("/") if is_announced else directory
