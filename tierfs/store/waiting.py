"""Wait for what this host wrote to become safer, and say how safe it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierfs.errors import NotFoundError
from tierfs.format.manifest import Manifest
from tierfs.host.pending.levels import Level
from tierfs.store.read.reader import Reader, open_manifest
from tierfs.store.store import Store
from tierfs.store.tree.listing import stat_to_read

if TYPE_CHECKING:
    from tierfs.host.tiers import Tiers

__all__ = ["discard_conflict", "level_of", "open_conflict", "wait"]


def wait(store: Store, path: str, level: Level, timeout_s: float | None = None) -> None:
    """Wait until what this host wrote at or below ``path`` so far has reached ``level``.

    What was never written here, and what another host wrote, is in the object tier already, or is not there.

    Raises:
        TimeoutError: It has not, in time; names what is pending.
        ConflictError: Somebody else changed a path before it was flushed; theirs stands, this one is kept.
        TierfsError: The reason why it cannot get there.
    """
    tiers = _tiers_of(store)
    if tiers is not None:
        store.hand_over(writes=False)
        tiers.wait(path, level, timeout_s)


def level_of(store: Store, path: str) -> Level:
    """The level that the file at ``path``, as this host sees it, has reached.

    Raises:
        NotFoundError: Nothing is there, or a directory.
        StoreError, CorruptionError: As `stat`.
    """
    tiers = _tiers_of(store)
    level = tiers.drafts.level(path) if tiers is not None else Level.OBJECT
    if stat_to_read(store, path).is_directory:
        raise NotFoundError(f"{store.where(path)} is a directory: levels are a file's", path=path)
    return level


def _tiers_of(store: Store) -> Tiers | None:
    """The local tiers of a store, if there are any.

    Raises:
        TierfsError: There may be, but they cannot be used: whether something is pending cannot be told.
    """
    if store.tiers is None and store.hidden is not None:
        raise store.hidden.with_traceback(None)
    return store.tiers


def open_conflict(store: Store, path: str) -> Reader:
    """Open what is kept of this host's own change of ``path`` that somebody else was faster than.

    Raises:
        NotFoundError: Nothing is, or it was a removal.
    """
    draft = store.tiers.drafts.kept(path) if store.tiers is not None else None
    if draft is None or not isinstance(draft.record, Manifest):
        raise NotFoundError(
            f"no conflict is kept for {store.where(path)}: `tierfs status {store.url}` lists those that are", path=path
        )
    return open_manifest(store, path, draft.record)


def discard_conflict(store: Store, path: str) -> int:
    """Give up what cannot be flushed of this host's changes of ``path``: somebody else was faster, or it is damaged.

    Returns:
        How many changes were discarded, with those that were made on top of them.
    """
    if store.tiers is None:
        return 0
    return int(store.tiers.flusher.request("discard", {"path": path})["discarded"])
