"""Whose local tiers those of a host are: the store's where it lies, not those of a copy of it, which has its id."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tierfs.errors import CapacityError, InvalidInputError, ReadOnlyError, StoreError
from tierfs.host.filesystems import flush_directory
from tierfs.host.host import Host
from tierfs.host.private import refused

__all__ = ["PLACE_FILE", "DamagedPlaceError", "check", "claim", "places_in"]

PLACE_FILE = "place.json"
_logger = logging.getLogger("tierfs.local")


class DamagedPlaceError(StoreError):
    """The file that says whose local tiers these are cannot be read."""


def claim(host: Host, uuid: str, places: Sequence[str], url: str, *, anew: bool = False) -> Path:
    """The directory of a store's local tiers, if they are those of the store that is there.

    What is pending in them is to get to the store that it was saved to. The first one of this id that is opened on the host
    has them from then on.

    Args:
        host: Whose tiers.
        uuid: The store's.
        places: See `ObjectTier.places`.
        url: For errors.
        anew: Whether to replace what says whose they are. Nothing may be pending in them then.

    Raises:
        InvalidInputError: They belong to another one.
        DamagedPlaceError: It cannot be told whose they are.
        ReadOnlyError, CapacityError, StoreError: The state directory cannot be used.
    """
    directory = host.store_directory(uuid)
    path, names = directory / PLACE_FILE, list(places)
    if anew:
        with host.locked("places"):
            _write(path, names)
        return directory
    if places_in(path) == names:
        return directory
    with host.locked("places"):
        is_known = check(directory, names, url)
        try:
            _write(path, names)  # by one of them it was known, and the others may have changed
        except (StoreError, CapacityError, ReadOnlyError) as error:
            if not is_known:
                raise
            _logger.warning("where %s lies now is not kept: %s", url, error)
    return directory


def check(directory: Path, places: Sequence[str], url: str) -> bool:
    """See that local tiers are those of the store that is there, and leave what says so as it is: see `claim`.

    Returns whether something says so.
    """
    path = directory / PLACE_FILE
    known = places_in(path)
    if known and set(places).isdisjoint(known):
        raise InvalidInputError(
            f"{url} has the id of a store that this host keeps local tiers for, and lies elsewhere: at {places[0]}, not at "
            f"{known[0]}. A copy needs a state directory of its own (state_dir=, --state-dir), or none (ram=0, nvme=0); if it "
            f"is the same one under another name, or has moved for good, end its flusher and remove {path}",
            path=url,
        )
    return bool(known)


def places_in(path: Path) -> list[str]:
    """The places of the store whose local tiers these are; none where nothing says so.

    Raises:
        DamagedPlaceError: It cannot be read.
    """
    try:
        text = path.read_bytes()
        kept = json.loads(text) if text else []
        if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
            raise ValueError("it is no list of names")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DamagedPlaceError(
            f"{path} does not say whose local tiers these are ({error}): what is pending in them waits, and is not read, until "
            "this file is removed; then they are those of the store of this id that is opened next",
            path=str(path),
        ) from error
    return kept


def _write(path: Path, names: list[str]) -> None:
    temporary = path.with_suffix(".new")  # nobody else writes one: the lock is held
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(names))
            file.flush()
            os.fsync(file.fileno())  # what is pending there outlives the host's power, and so must this
        temporary.replace(path)
        flush_directory(path.parent)
    except OSError as error:
        raise refused(error, path, "cannot be written") from error
