"""Whether a path is a file or a directory, also while the object tier is unreachable."""

from __future__ import annotations

from typing import Literal

from tierfs.errors import NotFoundError, StoreError
from tierfs.host.pending.levels import Level
from tierfs.store.offline import ask_briefly
from tierfs.store.store import Store
from tierfs.store.tree.listing import has_below, pending_at, stat
from tierfs.store.tree.records import last_seen

Kind = Literal["file", "directory"]


def kind_of(store: Store, path: str) -> Kind | None:
    """Return the kind of ``path``, or None if nothing is there.

    A process that saves below `Level.OBJECT` calls this before and after each save, so an unreachable object tier must
    not fail it. The answer then comes from this host's pending changes, or else from the version that this host saw
    last. That is logged and counted. If another host changed the path, the flusher finds out when it publishes the
    save, and keeps the save as a conflict.

    Raises:
        InvalidInputError: The path is invalid.
        CorruptionError, FormatError: The record is damaged, or of another version.
        StoreError, ReadOnlyError: The object tier failed.
    """
    if store.tiers is None or store.ack is Level.OBJECT:
        return _look(store, path)
    kind = _pending_kind(store, path)
    if kind is not None:
        return kind
    try:
        return ask_briefly(store, lambda: _look(store, path))
    except StoreError as error:
        if not error.transient:
            raise
        store.tiers.counters.fall_back(
            "blind_looks", "the object tier does not answer; the state that this host saw last is used: %s", error
        )
        is_gone = store.tiers.drafts.pending(path) is not None
        return None if is_gone or last_seen(store, path).manifest is None else "file"


def is_directory_nearby(store: Store, path: str) -> bool:
    """Return whether ``path``, where no file is, is a directory, as far as that takes no request to a server.

    A bucket is not asked, because that costs a request or two for each new file. So in a bucket a file can get the name
    of a directory, as with any tool. The same holds if the directory of the object tier is not mounted.

    Raises:
        CorruptionError, FormatError, StoreError, ReadOnlyError: The directory cannot be read.
    """
    pending = pending_at(store, path)
    if pending.get(path) is None and any(manifest is not None for manifest in pending.values()):
        return True
    if not store.url.startswith(("file://", "local://")):
        return False
    if store.tiers is None:
        return has_below(store, path, pending)
    try:
        return ask_briefly(store, lambda: has_below(store, path, pending))
    except StoreError as error:
        if not error.transient:
            raise
        return False


def _look(store: Store, path: str) -> Kind | None:
    try:
        return "directory" if stat(store, path).is_directory else "file"
    except NotFoundError:
        return None


def _pending_kind(store: Store, path: str) -> Kind | None:
    """Return the kind of ``path`` by this host's pending changes alone, or None if they do not tell."""
    pending = pending_at(store, path)
    if pending.get(path) is not None:
        return "file"
    return "directory" if any(manifest is not None for manifest in pending.values()) else None
