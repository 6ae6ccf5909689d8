"""Look-ups of one path that is to be written, also while the object tier is unreachable."""

from __future__ import annotations

from functools import partial
from typing import Literal

from tierfs.errors import NotFoundError, StoreError
from tierfs.store.offline import ask, ask_briefly, writes_go_on
from tierfs.store.store import Store
from tierfs.store.tree.listing import Entry, has_below, pending_at, stat, stat_to_read
from tierfs.store.tree.records import last_seen, observe_draft, was_directory

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
    kind = _pending_kind(store, path) if writes_go_on(store) else None
    if kind is not None:
        return kind
    try:
        entry: Entry | None = look(store, path)
    except NotFoundError:
        return None
    except StoreError as error:
        entry = last_known(store, path, error)
    return None if entry is None else "directory" if entry.is_directory else "file"


def look(store: Store, path: str, *, to_read: bool = False) -> Entry:
    """Describe one path. If saves go on while the object tier is unreachable, wait for it for LOOK_S seconds at most.

    With ``to_read``, fail as `stat_to_read` does if its file may be hidden from this process.

    Raises:
        NotFoundError: Nothing is there.
        StoreError: The object tier failed, and nothing is pending at the path. `last_known` may help if it is transient.
        InvalidInputError, CorruptionError, FormatError, ReadOnlyError: As `stat`.
    """
    describe = partial(stat_to_read if to_read else stat, store, path)
    try:
        return ask(store, describe) if path else describe()
    except StoreError as error:
        draft = observe_draft(store, path) if error.transient else None
        if draft is None or draft.manifest is None:
            raise
        return Entry(path, is_directory=False, manifest=draft.manifest)


def last_known(store: Store, path: str, error: StoreError) -> Entry | None:
    """Describe one path by what this host knows, because the object tier does not answer. Logged and counted.

    Only for a path that is to be written: the flusher publishes the change on the condition that the answer was right.

    Raises:
        StoreError: ``error``, if it is not transient or saves do not go on without the object tier.
    """
    if store.tiers is None or not writes_go_on(store) or not error.transient:
        raise error
    store.tiers.counters.fall_back(
        "blind_looks", "the object tier does not answer; the state that this host saw last is used: %s", error
    )
    pending = pending_at(store, path)
    manifest = pending[path] if path in pending else last_seen(store, path).manifest
    if manifest is not None:
        return Entry(path, is_directory=False, manifest=manifest)
    is_directory = any(found is not None for found in pending.values()) or was_directory(store, path)
    return Entry(path, is_directory=True) if is_directory else None


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


def _pending_kind(store: Store, path: str) -> Kind | None:
    """Return the kind of ``path`` by this host's pending changes alone, or None if they do not tell."""
    pending = pending_at(store, path)
    if pending.get(path) is not None:
        return "file"
    return "directory" if any(manifest is not None for manifest in pending.values()) else None
