"""Find this host's pending changes for a store that is gone from its place: its disk may not be mounted."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from tierfs.errors import StoreError, TierfsError
from tierfs.host.host import Host
from tierfs.host.identity import PLACE_FILE, places_in
from tierfs.objects.backends.local import DIRECTORY

_logger = logging.getLogger("tierfs.store")


def check_nothing_is_left(state: Path, places: Collection[str]) -> None:
    """Check that nothing is pending for a store at one of these places, where no store is found.

    Args:
        state: The state directory.
        places: See `ObjectTier.places`. Inode numbers of directories are ignored: an unmounted directory has another
            number, or the number was reused.

    Raises:
        StoreError: Changes are pending, or that cannot be determined.
    """
    for kept in sorted((state / "stores").glob(f"*/{PLACE_FILE}")):
        here = [name for name in _places_in(kept) if name in places and not name.startswith(DIRECTORY)]
        if here and is_pending(state, kept.parent):
            where = here[0].removeprefix("file:")
            raise StoreError(
                f"this host has changes pending for the store that was at {where}, but no store is there now: mount "
                "it or put it back, and they are flushed; to discard them, end its flusher, if `pgrep -f "
                f"{kept.parent.name}` finds one, and remove {kept.parent}{_segments_of(state, kept.parent)} while no "
                "process uses it",
                transient=True,
                path=where,
            )


def _places_in(kept: Path) -> list[str]:
    try:
        return places_in(kept)
    except StoreError as error:
        # Opening that store raises this error. Other stores are not affected.
        _logger.warning("the pending changes of one store are unknown: %s", error)
        return []


def _segments_of(state: Path, directory: Path) -> str:
    """Return the segment files that hold the changes, as text: their memory stays allocated without the directory."""
    try:
        folders = Host(state).folders
    except TierfsError:
        return ""
    name = f"{directory.name[:8]}-*.slab"
    return "".join(f" and {folder / name}" for folder in folders if list(folder.glob(name)))


def is_pending(state: Path, directory: Path) -> bool:
    """Return whether changes are pending, as far as that can be looked up. If not, assume that they are."""
    from tierfs.host.pending.scan import paths_pending  # noqa: PLC0415 - imports numpy, which takes a while

    try:
        return bool(paths_pending(state, directory))
    except TierfsError:
        return True  # unreadable tiers may have pending changes
