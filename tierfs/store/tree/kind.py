"""The kind of thing at a path, also while the object tier is unreachable and saves go on without it."""

from __future__ import annotations

from typing import Literal

from tierfs.errors import NotFoundError, StoreError
from tierfs.host.pending.levels import Level
from tierfs.store.offline import ask_briefly
from tierfs.store.store import Store
from tierfs.store.tree.listing import has_below, pending_at, stat
from tierfs.store.tree.records import last_seen

__all__ = ["Kind", "is_directory_nearby", "kind_of"]

Kind = Literal["file", "directory"]


def kind_of(store: Store, path: str) -> Kind | None:
    """The kind of ``path``; ``None`` for nothing.

    Who saves below `Level.OBJECT` asks this before and after each save, and is not kept from it by an object tier that is
    unreachable: then what is pending here counts, and else what this host last saw, which is logged and counted. A change that
    it did not see is found out when the save is to be published, and the save kept as a conflict.

    Raises:
        InvalidInputError: The path is no good.
        CorruptionError, FormatError: Its record is damaged, or of another version.
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
            "blind_looks", "the object tier cannot be asked what is there, what this host saw last counts: %s", error
        )
        is_gone = store.tiers.drafts.pending(path) is not None
        return None if is_gone or last_seen(store, path).manifest is None else "file"


def is_directory_nearby(store: Store, path: str) -> bool:
    """Whether a directory is at ``path``, where no file is, as far as that takes no request to a server.

    A bucket is not asked, because that would cost a request or two for each new file. There, as with any tool, a file
    can get the name of a directory. The same goes for a directory that is not mounted just now.

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
    """The same as far as what is pending here tells."""
    pending = pending_at(store, path)
    if pending.get(path) is not None:
        return "file"
    return "directory" if any(manifest is not None for manifest in pending.values()) else None
