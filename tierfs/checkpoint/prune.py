"""Remove checkpoints by policy: their metadata first, so that no listed checkpoint lacks a part. gc frees the bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from tierfs.checkpoint.catalog import Candidate, Standing, candidates, standing
from tierfs.checkpoint.notes import (
    FILES,
    METRICS,
    NOTES,
    PINNED,
    Lines,
    metrics_of,
    object_in,
    read_lines,
    remove_logged,
)
from tierfs.checkpoint.retention import Best, Decision, Rule, SavedCheckpoint, decide
from tierfs.dcp.facts import read_facts
from tierfs.errors import ConflictError, NotFoundError
from tierfs.format.checkpoint import metadata_file
from tierfs.format.keys import inside
from tierfs.store import Store, delete
from tierfs.store.tree.records import observe
from tierfs.store.write.staging import bury

NAMED_MAX = 5


def prune(
    store: Store, path: str, keep: Sequence[Rule], *, pinned: Collection[str] = (), dry_run: bool = False
) -> list[Decision]:
    """Remove the checkpoints at or below a path that no rule keeps.

    Args:
        store: The store.
        path: A directory. The rules look at all checkpoints below it together, so it should hold those of one run.
        keep: The rules.
        pinned: Paths of checkpoints to keep in addition to those with a file `PINNED`.
        dry_run: Remove nothing.

    Returns:
        The outcome for each checkpoint, the oldest first.

    Raises:
        InvalidInputError: There is no rule.
        NotFoundError: A path in ``pinned`` holds no checkpoint, or no checkpoint has the metric of a rule. Nothing was
            removed.
        FormatError, CorruptionError: The file with a run's lines is invalid or damaged. Nothing was removed.
        StoreError, ReadOnlyError: The object tier failed. Some checkpoints may be removed already.
    """
    found = {candidate.directory: (candidate, standing(store, candidate)) for candidate in candidates(store, path)}
    _check_pins(store, path, pinned, list(found))
    lines = {above: read_lines(store, above) or Lines() for above in {path.rpartition("/")[0] for path in found}}
    saved = [facts_of(store, *each, pinned, lines) for each in found.values()]
    check_metrics(store, path, keep, saved)
    decisions = decide(saved, keep, store.clock.now_ns())
    for decision in decisions if not dry_run else ():
        if decision.is_kept:
            continue
        candidate, seen = found[decision.saved.path]
        try:
            remove(store, candidate, seen.roots)
            decision.removed = True
        except (ConflictError, NotFoundError) as error:
            decision.problem = f"another writer changed it: {error}"
    for above in lines if not dry_run else ():
        stay = [each.saved for each in decisions if not each.removed and each.saved.path.rpartition("/")[0] == above]
        full = [each.step or 0 for each in stay if each.is_complete and each.kind == "full"]
        remove_logged(store, above, max(full, default=-1 if stay else math.inf))
    return decisions


def _check_pins(store: Store, path: str, pinned: Collection[str], found: Sequence[str]) -> None:
    """Raise if a pinned path holds no checkpoint: otherwise a misspelled pin would let its checkpoint be removed."""
    for pin in sorted(set(pinned) - set(found)):
        names = ", ".join(found[-NAMED_MAX:]) or "none"
        raise NotFoundError(
            f"{store.where(pin)} is to be pinned, but holds no checkpoint: nothing was removed; "
            f"at or below {store.where(path)} there are {len(found)} checkpoints, the last ones: {names}",
            path=pin,
        )


def check_metrics(store: Store, path: str, keep: Sequence[Rule], found: Collection[SavedCheckpoint]) -> None:
    """Raise if a rule names a metric that no checkpoint has: it would keep nothing, as a misspelled one would."""
    metrics = {metric for saved in found for metric in saved.metrics}
    for rule in keep if found else ():
        if isinstance(rule, Best) and rule.metric not in metrics:
            raise NotFoundError(
                f"no checkpoint at or below {store.where(path)} has the metric {rule.metric!r}: nothing was "
                f"removed; their metrics are: {', '.join(sorted(metrics)[:NAMED_MAX]) or 'none'}",
                path=path,
            )


def facts_of(
    store: Store, candidate: Candidate, found: Standing, pinned: Collection[str], lines: Mapping[str, Lines]
) -> SavedCheckpoint:
    directory = candidate.directory
    step = -1 if found.step is None else found.step
    return SavedCheckpoint(
        path=directory,
        step=found.step,
        created_ns=found.created_ns,
        level=found.level,
        # An announced save to the same directory is still in flight.
        is_complete=found.state == "complete" and not found.waiting and bool(candidate.ranks),
        is_pinned=directory in pinned or PINNED in candidate.listed,
        metrics=metrics_of(store, directory) if METRICS in candidate.listed else {},
        kind=found.kind or "full",
        is_left=found.line is not None and lines[directory.rpartition("/")[0]].left(found.line, step),
    )


def roots_of(store: Store, candidate: Candidate) -> dict[str, bytes]:
    """Return the write id of each metadata file of a checkpoint by path. They identify the save for `remove`."""
    paths = [inside(candidate.directory, metadata_file(rank)) for rank in candidate.ranks]
    observed = {path: observe(store, path).manifest for path in paths}
    return {path: manifest.write_id for path, manifest in observed.items() if manifest is not None}


def remove(store: Store, candidate: Candidate, seen: dict[str, bytes]) -> None:
    """Remove a checkpoint unless it was saved again: the metadata first, then the files that it names and the notes.

    ``seen`` is `Standing.roots`, or the result of `roots_of`, at the time of the decision.

    Raises:
        ConflictError: The checkpoint was saved again in the meantime.
        NotFoundError: The checkpoint is already gone.
    """
    names: set[str] = set()
    for rank in candidate.ranks:
        names |= set(read_facts(store, candidate.directory, rank=rank).files)
    names |= object_in(store, candidate.directory, FILES).keys()
    roots = []
    for path, write_id in seen.items():
        observed = observe(store, path)
        if observed.record is None or observed.record.write_id != write_id:
            raise ConflictError(f"{store.where(path)} was saved again in the meantime: it is kept", path=path)
        roots.append(observed)
    after = None  # if a tombstone of the metadata is pending, the files go later: another host may read them
    for observed in roots:
        after = bury(store, observed, after=after) or after
    for name in (*sorted(names), *NOTES):
        try:
            delete(store, inside(candidate.directory, name), after=after)
        except NotFoundError:  # noqa: PERF203 - a missing file must not stop the loop
            continue
