"""Wait until this host's changes reach a level, tell the level of a file, and resolve conflicts."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from tierfs.errors import NotFoundError, StoreError
from tierfs.format.manifest import Manifest
from tierfs.host.host import state_directory
from tierfs.host.local_state import PLACE_FILE, places_in
from tierfs.host.pending.levels import Level
from tierfs.store.read.reader import Reader, open_manifest
from tierfs.store.store import Store
from tierfs.store.tree.listing import stat_to_read
from tierfs.store.tree.records import observe_to_read
from tierfs.units import bounded_timeout

if TYPE_CHECKING:
    from tierfs.host.tiers import Tiers


def wait(store: Store, path: str, level: Level, timeout_s: float | None = None) -> None:
    """Wait until this host's changes at or below ``path``, made before the call, have reached ``level``.

    A path without such changes is not waited for: its file is in the object tier already, or does not exist. A timeout
    of ``None`` or infinity means no limit.

    Raises:
        StoreError: Changes are pending in local tiers that this process does not use: see `tiers_below`.
        TimeoutError: The level was not reached in time. The message names the pending changes.
        ConflictError: Another writer changed a path before this host's change was flushed. That version stands, and
            this change is kept as a conflict.
        TierfsError: The reason why a change cannot reach the level.
    """
    tiers = tiers_below(store, path)
    if tiers is not None:
        store.hand_over(writes=False)
        tiers.wait(path, level, bounded_timeout(timeout_s))


def tiers_below(store: Store, path: str) -> Tiers | None:
    """Return the local tiers of a store; None if there are none and this host has no changes pending below ``path``.

    Raises:
        StoreError: Changes are pending in local tiers that this process does not use: they belong to the place where
            another process found the store, or are switched off here.
        TierfsError: The local tiers cannot be used, and changes may be pending in them.
    """
    tiers, state = _tiers_of(store), store.state_dir or state_directory()
    directory = state / "stores" / store.descriptor.uuid
    if tiers is not None or not os.path.isdir(directory):
        return tiers
    from tierfs.host.pending.scan import paths_pending  # noqa: PLC0415 - loads numpy

    names = paths_pending(state, directory, path)
    if names:
        saved_at = next(iter(places_in(directory / PLACE_FILE)), store.url).removeprefix("file:")
        raise StoreError(
            f"files that this host saved at {saved_at} are pending ({len(names)}, {names[0]} among them), and the local "
            "tiers that hold them are not in use here: repeat this with the endpoint, ram= and nvme= of their writer",
            path=names[0],
        )
    return None


def level_of(store: Store, path: str) -> Level:
    """Return the level that the file at ``path``, as this host sees it, has reached.

    Raises:
        NotFoundError: Nothing is at the path, or a directory.
        StoreError, CorruptionError: As `stat`.
    """
    _tiers_of(store)
    level = level_seen(store, path)
    if stat_to_read(store, path).is_directory:
        raise NotFoundError(f"{store.where(path)} is a directory: only files have levels", path=path)
    return level


def level_seen(store: Store, path: str) -> Level:
    """Return the level of a file as `level_of` does. The file need not exist. Raises as `Tiers.level` and `observe`."""
    level = store.tiers.level(path) if store.tiers is not None else Level.OBJECT
    remote = store.tiers.remote if store.tiers is not None and level is Level.OBJECT else None
    is_held = remote is not None and remote.drafts(path) and observe_to_read(store, path).draft is not None
    return Level.PEER if is_held else level


def _tiers_of(store: Store) -> Tiers | None:
    """Return the local tiers of a store, if there are any.

    Raises:
        TierfsError: The local tiers cannot be used, and changes may be pending in them.
    """
    if store.tiers is None and store.hidden is not None:
        raise store.hidden.with_traceback(None)
    return store.tiers


def open_conflict(store: Store, path: str) -> Reader:
    """Open this host's change of ``path`` that is kept as a conflict, because another writer changed the path first.

    Raises:
        NotFoundError: No such change is kept, or it was a removal.
    """
    draft = store.tiers.drafts.kept(path) if store.tiers is not None else None
    if draft is None or not isinstance(draft.record, Manifest):
        raise NotFoundError(
            f"no conflict is kept for {store.where(path)}: `tierfs status {shlex.quote(store.url)}` lists all conflicts",
            path=path,
        )
    return open_manifest(store, path, draft.record)


def discard_conflict(store: Store, path: str) -> int:
    """Discard this host's changes of ``path`` that cannot be flushed because of a conflict or damage.

    Returns:
        The number of discarded changes, including changes that were based on them.
    """
    if store.tiers is None:
        return 0
    return int(store.tiers.flusher.request("discard", {"path": path})["discarded"])
