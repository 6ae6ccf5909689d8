"""Small files beside a checkpoint that say something of it: its metrics, that it is pinned or damaged, the manager's record."""

from __future__ import annotations

import json

from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format.keys import inside
from tierfs.store import Store
from tierfs.store.read.reader import open_manifest
from tierfs.store.tree.listing import check_hidden
from tierfs.store.tree.records import observe

__all__ = ["DAMAGED", "METRICS", "NOTES", "PINNED", "RECORD", "is_pinned", "metrics_of", "read_note"]

METRICS = ".metrics"
"""A JSON object with a number for each metric."""
PINNED = ".pinned"
"""Has the checkpoint kept."""
RECORD = ".record"
"""The record that the training manager made of the state."""
DAMAGED = ".damaged"
"""Why the checkpoint could not be loaded."""
NOTES = (METRICS, RECORD, DAMAGED, PINNED)
METRICS_BYTES_MAX = 1 << 20


def read_note(store: Store, directory: str, name: str, bytes_max: int) -> bytes | None:
    """Read a note; ``None`` where there is none. One request where there is none: nothing but tierfs writes notes.

    Raises:
        FormatError: It is longer than ``bytes_max``.
        CorruptionError: It is damaged, or what this host wrote last cannot be seen.
        StoreError, ReadOnlyError: The object tier failed.
    """
    path = inside(directory, name)
    manifest = observe(store, path).manifest
    if manifest is None:
        check_hidden(store, path)
        return None
    if manifest.length > bytes_max:
        raise FormatError(f"{store.where(path)}: {manifest.length} bytes are too many for a note", path=path)
    data = bytearray(manifest.length)
    open_manifest(store, path, manifest).read_into(0, memoryview(data))
    return bytes(data)


def metrics_of(store: Store, directory: str) -> dict[str, float]:
    """The metrics that were noted beside a checkpoint, by name; none where they cannot be read."""
    try:
        values = json.loads(read_note(store, directory, METRICS, METRICS_BYTES_MAX) or b"{}")
    except (NotFoundError, CorruptionError, FormatError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: float(value) for name, value in values.items() if type(value) in {int, float}}


def is_pinned(store: Store, directory: str) -> bool:
    """Whether a checkpoint is to be kept; so it is where that cannot be read."""
    try:
        return observe(store, inside(directory, PINNED)).manifest is not None
    except (CorruptionError, FormatError):
        return True
