"""The content of checkpoints, as the commands describe it. This module loads torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tierfs.checkpoint.catalog import candidates
from tierfs.checkpoint.diff import compare
from tierfs.cli.commands._checkpoint_content import Placement, content_document, describe_tensors, difference_document
from tierfs.cli.files.places import StorePlace
from tierfs.dcp.checkpoint import Checkpoint, open_checkpoint
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError
from tierfs.train.run import RunDirectory

if TYPE_CHECKING:
    from tierfs.ui.server import Job


def show(place: StorePlace, job: Job, *, codecs: bool) -> dict[str, Any]:
    """Return the output of ``tierfs checkpoint show --json``, with ``--codecs`` if asked for."""
    checkpoint = _open(place)
    job.total = len(checkpoint.tensors)
    where, note = Placement(checkpoint), lambda _text: job.advance()
    tensors = describe_tensors(checkpoint, checkpoint.tensors, where, note, shards=False, codecs=codecs)
    return content_document(place, checkpoint, tensors, checkpoint.objects)


def diff(a: StorePlace, b: StorePlace, job: Job) -> dict[str, Any]:
    """Return the output of ``tierfs checkpoint diff --json``."""
    one, other = _open(a), _open(b)
    job.total = one.length
    return difference_document(compare(one, other, progress=job.advance), a, b)


def times(places: Sequence[StorePlace], job: Job) -> dict[str, Any]:
    """Return how long saves blocked training and took, by the records in those checkpoints that can be read."""
    job.total, found = len(places), list[dict[str, Any]]()
    for place in places:
        job.advance()
        try:
            about = RunDirectory.about(_open(place))
        except (NotFoundError, CorruptionError, FormatError, InvalidInputError):
            continue
        if about is not None:
            found.append({"path": place.path, "step": about.step, "blocked_s": about.blocked_s, "save_s": about.save_s})
    blocked = [float(each["blocked_s"]) for each in found if each["blocked_s"]]
    return {"times": found, "median_blocked_s": statistics.median(blocked) if blocked else None}


def _open(place: StorePlace) -> Checkpoint:
    """Open a checkpoint; of one whose ranks saved on their own, the part of the lowest rank."""
    found = [
        each.ranks[0] for each in candidates(place.store, place.path) if each.directory == place.path and each.ranks
    ]
    return open_checkpoint(place.store, place.path, rank=found[0] if found else None)
