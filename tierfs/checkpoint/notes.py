"""Notes, small files beside a checkpoint: its metrics, a pin, a damage mark, the training manager's record."""

from __future__ import annotations

import json

from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format.keys import inside
from tierfs.store import Store
from tierfs.store.read.reader import open_manifest
from tierfs.store.tree.listing import check_hidden
from tierfs.store.tree.records import observe

METRICS = ".metrics"
"""A JSON object with a number for each metric."""
PINNED = ".pinned"
"""Its existence forbids the deletion of the checkpoint."""
RECORD = ".record"
"""A JSON object: the record that the training manager made of the state."""
DAMAGED = ".damaged"
"""A JSON object with the reason why the checkpoint could not be loaded."""
NOTES = (METRICS, RECORD, DAMAGED, PINNED)
METRICS_BYTES_MAX = 1 << 20


def read_note(store: Store, directory: str, name: str, bytes_max: int) -> bytes | None:
    """Read a note; ``None`` if there is none. A missing note costs one request, because only tierfs writes notes.

    Raises:
        FormatError: The note is longer than ``bytes_max``.
        CorruptionError: The note is damaged, or a damaged segment of this host may hold a newer one.
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
    """Return a checkpoint's metrics by name; none if they are missing or cannot be read."""
    try:
        values = json.loads(read_note(store, directory, METRICS, METRICS_BYTES_MAX) or b"{}")
    except (NotFoundError, CorruptionError, FormatError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: float(value) for name, value in values.items() if type(value) in {int, float}}


def is_pinned(store: Store, directory: str) -> bool:
    """Return whether a checkpoint is pinned. A note that cannot be read counts as a pin."""
    try:
        return observe(store, inside(directory, PINNED)).manifest is not None
    except (CorruptionError, FormatError):
        return True
