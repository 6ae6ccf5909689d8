"""Find the checkpoint that ``latest`` or ``best`` names among those of a run. No shard file is read."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from tierfs.checkpoint.catalog import Candidate, candidates, standing
from tierfs.checkpoint.notes import DAMAGED, METRICS, metrics_of, read_lines
from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.store import Store


def named_checkpoint(store: Store, directory: str, name: str) -> str:
    """Return the path of the complete checkpoint that a name means.

    Checkpoints that could not be loaded once, and those that the run left behind, do not count.

    Args:
        store: The store.
        directory: The run: the directory that holds the checkpoints themselves.
        name: ``latest``: the newest complete checkpoint. ``best``, ``best:METRIC`` or ``best:METRIC:max``: the one with
            the smallest, or greatest, value of the metric.

    Raises:
        NotFoundError: No complete checkpoint is there, or none has the metric.
        InvalidInputError: ``best`` is to be one by a metric, and the checkpoints have several.
        CorruptionError, FormatError, StoreError, ReadOnlyError: The run cannot be read.
    """
    found = [each for each in candidates(store, directory) if each.directory.rpartition("/")[0] == directory]
    found = sorted(
        (each for each in found if DAMAGED not in each.listed), key=lambda each: (each.step or 0, each.directory)
    )
    lines, foreign = read_lines(store, directory), ""
    kind, _, metric = name.partition(":")
    ordered = found[::-1] if kind == "latest" else _by_metric(store, directory, found, metric)
    for candidate in ordered:
        state = standing(store, candidate)
        if state.state != "complete":
            continue
        if lines is None or (state.line is not None and lines.holds(state.line, state.step or 0)):
            return candidate.directory
        foreign = foreign or (candidate.directory if state.line is None else "")  # no training manager saved it
    if foreign:
        return foreign
    having = f" with the metric {metric!r}" if metric else ""
    where = store.where(directory)
    raise NotFoundError(
        f"no complete checkpoint{having} lies in {where}: `tierfs checkpoint ls {shlex.quote(where)}` shows their states",
        path=directory,
    )


def _by_metric(store: Store, directory: str, found: Sequence[Candidate], wanted: str) -> list[Candidate]:
    """Return the candidates that have a finite value of ``METRIC`` or ``METRIC:max``, the best one first."""
    metric, _, mode = wanted.partition(":")
    metrics = {each.directory: metrics_of(store, each.directory) for each in found if METRICS in each.listed}
    known = sorted({name for values in metrics.values() for name in values})
    if not metric and len(known) > 1:
        raise InvalidInputError(
            f"the checkpoints in {store.where(directory)} have several metrics ({', '.join(known[:5])}): name one, as in "
            f"best:{known[0]} or, if the greatest is the best, best:{known[0]}:max",
            path=directory,
        )
    metric, sign = metric or next(iter(known), ""), -1 if mode == "max" else 1
    values = {path: sign * each.get(metric, math.nan) for path, each in metrics.items()}
    # Among equal values, the newest wins.
    having = [each for each in found[::-1] if math.isfinite(values.get(each.directory, math.nan))]
    return sorted(having, key=lambda each: values[each.directory])
