"""The content of checkpoints and files, as plain values. The documents are those of the commands."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from tierfs.cli.arguments import require_torch
from tierfs.cli.commands.ls import entry_document
from tierfs.cli.files.places import StorePlace
from tierfs.codec.layout.safetensors import read_table
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError
from tierfs.store import Entry, level_of, list_directory, open_entry, stat
from tierfs.ui.jobs import Job

TEXT_BYTES_MAX = 64 << 10
ENTRIES_MAX = 5000
PIECE_BYTES = 1 << 20
TIMED_MAX = 200
"""Checkpoints whose own records of times are read, the newest ones: each takes a few requests."""


def show(place: StorePlace, job: Job, *, codecs: bool) -> dict[str, Any]:
    """Return the output of ``tierfs checkpoint show --json``, with ``--codecs`` if asked for.

    Raises:
        InvalidInputError: torch is not installed, or there is no checkpoint that can be read.
        TierfsError: See `tierfs.dcp.checkpoint.open_checkpoint`.
    """
    require_torch("checkpoints are read")
    from tierfs.checkpoint.placement import Placement  # noqa: PLC0415 - it loads torch
    from tierfs.cli.commands._checkpoint_content import content_document, describe_tensors  # noqa: PLC0415
    from tierfs.dcp.checkpoint import open_checkpoint  # noqa: PLC0415

    checkpoint = open_checkpoint(place.store, place.path, rank=_rank(place))
    names = list(checkpoint.tensors)
    job.total = len(names)
    tensors = describe_tensors(
        checkpoint, names, Placement(checkpoint), shards=False, codecs=codecs, note=lambda _text: job.advance()
    )
    return content_document(place, checkpoint, tensors, checkpoint.objects)


def diff(a: StorePlace, b: StorePlace, job: Job) -> dict[str, Any]:
    """Return the output of ``tierfs checkpoint diff --json``. Raises as `show` does, or if bytes are damaged."""
    require_torch("checkpoints are read")
    from tierfs.checkpoint.diff import compare  # noqa: PLC0415 - it loads torch
    from tierfs.cli.commands._checkpoint_content import difference_document  # noqa: PLC0415
    from tierfs.dcp.checkpoint import open_checkpoint  # noqa: PLC0415

    one, other = (open_checkpoint(place.store, place.path, rank=_rank(place)) for place in (a, b))
    job.total = one.length
    return difference_document(compare(one, other, progress=job.advance), a, b)


def times(places: list[StorePlace], job: Job) -> dict[str, Any]:
    """Return for checkpoints how long saves blocked training and took, as the training manager recorded it in each.

    Checkpoints that cannot be read are left out. Raises `InvalidInputError` if torch is not installed.
    """
    require_torch("checkpoints are read")
    from tierfs.dcp.checkpoint import open_checkpoint  # noqa: PLC0415 - it loads torch
    from tierfs.train.run import RunDirectory  # noqa: PLC0415

    found: list[dict[str, Any]] = []
    job.total, unread = len(places), 0
    for place in places[:TIMED_MAX]:
        job.advance()
        try:
            about = RunDirectory.about(open_checkpoint(place.store, place.path))
        except (NotFoundError, CorruptionError, FormatError, InvalidInputError):
            unread += 1
            continue
        if about is not None:
            found.append({"path": place.path, "step": about.step, "blocked_s": about.blocked_s, "save_s": about.save_s})
    blocked = [each["blocked_s"] for each in found if each["blocked_s"]]
    return {"times": found, "unread": unread, "median_blocked_s": statistics.median(blocked) if blocked else None}


def _rank(place: StorePlace) -> int | None:
    """Return the lowest rank of a checkpoint whose ranks saved on their own; ``None`` if one file describes all."""
    from tierfs.checkpoint.catalog import candidates  # noqa: PLC0415 - with the rest

    for candidate in candidates(place.store, place.path):
        if candidate.directory == place.path and candidate.ranks:
            return candidate.ranks[0]
    return None


def files(place: StorePlace) -> dict[str, Any]:
    """Return the output of ``tierfs ls --json`` with the level of each file. At most `ENTRIES_MAX` entries are listed.

    Raises:
        NotFoundError: Nothing is there.
        TierfsError: The directory cannot be read.
    """
    entries = list_directory(place.store, place.path)
    listed = [
        {**entry_document(place, entry), "path": entry.path, "level": _level(place, entry)}
        for entry in entries[:ENTRIES_MAX]
    ]
    return {"url": place.url, "path": place.path, "entries": listed, "left_out": len(entries) - len(listed)}


def _level(place: StorePlace, entry: Entry) -> str | None:
    if entry.is_directory:
        return None
    try:
        return level_of(place.store, entry.path).label
    except NotFoundError:
        return None  # deleted since the listing


def preview(place: StorePlace) -> dict[str, Any]:
    """Return what a file begins with: the table of a safetensors file, or up to `TEXT_BYTES_MAX` bytes of text.

    Returns:
        ``kind``: ``safetensors`` with ``tensors``, ``text`` with ``text`` and ``is_whole``, or ``binary``.

    Raises:
        NotFoundError: No file is there.
        CorruptionError: It is not what its name says, or stored bytes are damaged.
    """
    entry = stat(place.store, place.path)
    reader = open_entry(place.store, entry, exact=True)
    about = {"path": place.path, "size": entry.length}
    if place.path.endswith(".safetensors"):
        table, _ = read_table(reader.read_into, reader.length, place.url)
        tensors = [
            {"name": name, "dtype": each.dtype, "shape": list(each.shape), "at": each.at, "size": each.length}
            for name, each in table.items()
        ]
        return {**about, "kind": "safetensors", "tensors": tensors}
    head = bytearray(min(reader.length, TEXT_BYTES_MAX))
    reader.read_into(0, memoryview(head))
    is_whole = len(head) == reader.length
    try:
        text = head.decode(errors="strict" if is_whole else "ignore")
    except UnicodeDecodeError:
        return {**about, "kind": "binary"}
    if "\0" in text:
        return {**about, "kind": "binary"}
    return {**about, "kind": "text", "text": text, "is_whole": is_whole}


def pieces(place: StorePlace, entry: Entry) -> Iterator[bytes]:
    """Yield a file's bytes, verified. Raises `TierfsError` in the middle if bytes are damaged."""
    reader = open_entry(place.store, entry)
    for at in range(0, reader.length, PIECE_BYTES):
        piece = bytearray(min(PIECE_BYTES, reader.length - at))
        reader.read_into(at, memoryview(piece))
        yield bytes(piece)
