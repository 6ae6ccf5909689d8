"""The identity of local tiers: they belong to the store at one place, not to a copy of it with the same id."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tierfs.errors import CapacityError, InvalidInputError, ReadOnlyError, StoreError
from tierfs.host.filesystems import flush_directory, open_lock_file, refused
from tierfs.host.host import Host

PLACE_FILE = "place.json"
USE_FILE = "use.lock"
"""File of a store's directory that each process with its local tiers open holds a shared lock on."""
_logger = logging.getLogger("tierfs.local")


class DamagedPlaceError(StoreError):
    """The file that says which store the local tiers belong to cannot be read."""


def claim(host: Host, uuid: str, places: Sequence[str], url: str) -> Path:
    """Return the directory of a store's local tiers, if they belong to the store at these places.

    Pending changes must reach the store that they were saved to. The first store of an id that is opened on a host gets
    the local tiers. For the places see `ObjectTier.places`.

    Raises:
        InvalidInputError: They belong to another store.
        DamagedPlaceError: The recorded places cannot be read.
        ReadOnlyError, CapacityError, StoreError: The state directory cannot be used.
    """
    directory = host.store_directory(uuid)
    path, names = directory / PLACE_FILE, list(places)
    if places_in(path) == names:
        return directory
    with host.locked("places"):
        is_known = check(directory, names, url)
        try:
            _write(path, names)  # one of the names matched, and the others may have changed
        except (StoreError, CapacityError, ReadOnlyError) as error:
            if not is_known:
                raise
            _logger.warning("the new location of %s cannot be recorded: %s", url, error)
    return directory


def use(directory: Path) -> int | None:
    """Keep `tierfs.host.local_state.forget` from removing a store's directory.

    Returns:
        The descriptor to close at the end; None if the directory has just been removed.

    Raises:
        ReadOnlyError, CapacityError, StoreError: The lock file cannot be opened.
    """
    path = directory / USE_FILE
    try:
        fd = open_lock_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(error, path, "cannot be locked") from error
    fcntl.flock(fd, fcntl.LOCK_SH)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    os.close(fd)
    return None


def check(directory: Path, places: Sequence[str], url: str) -> bool:
    """Check that local tiers belong to the store at these places, without recording them. Raises as `claim` does.

    Returns whether a place is recorded.
    """
    path = directory / PLACE_FILE
    known = places_in(path)
    if known and set(places).isdisjoint(known):
        raise InvalidInputError(
            f"{url} has the id of a store that this host has local tiers for, but is at {places[0]}, not at "
            f"{known[0]}. A copy needs a state directory of its own (state_dir=, --state-dir), or no local tiers "
            "(ram=0, nvme=0); if it is the same store under another name, or was moved permanently, stop its flusher "
            f"and remove {path}",
            path=url,
        )
    return bool(known)


def places_in(path: Path) -> list[str]:
    """Return the recorded places of the store that the local tiers belong to; an empty list if there is no record.

    Raises:
        DamagedPlaceError: The record cannot be read.
    """
    try:
        text = path.read_bytes()
        kept = json.loads(text) if text else []
        if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
            raise ValueError("not a list of names")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DamagedPlaceError(
            f"{path} does not say which store these local tiers belong to ({error}): changes pending in them are "
            "neither read nor flushed until this file is removed; then the tiers belong to the next store with this "
            "id that is opened",
            path=str(path),
        ) from error
    return kept


def _write(path: Path, names: list[str]) -> None:
    temporary = path.with_suffix(".new")  # no other process writes it: the lock is held
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(names))
            file.flush()
            os.fsync(file.fileno())  # pending changes survive a power failure of the host, so this record must, too
        temporary.replace(path)
        flush_directory(path.parent)
    except OSError as error:
        raise refused(error, path, "cannot be written") from error
