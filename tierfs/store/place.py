"""Whose local tiers those of a host are: the store's where it lies, not those of a copy of it, which has its id."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path

from tierfs.errors import CapacityError, InvalidInputError, StoreError
from tierfs.local.host import Host

__all__ = ["claim"]

_NAME = "place.json"


def claim(host: Host, uuid: str, places: Sequence[str], url: str) -> Path:
    """The directory of a store's local tiers, if they are those of the store that is there.

    What is pending in them is to get to the store that it was saved to. The first one of this id that is opened on the host
    has them from then on.

    Args:
        host: Whose tiers.
        uuid: The store's.
        places: See `ObjectTier.places`.
        url: For errors.

    Raises:
        InvalidInputError: They belong to another one.
        ReadOnlyError, CapacityError, StoreError: The state directory cannot be used.
    """
    directory = host.store_directory(uuid)
    path = directory / _NAME
    with host.locked("places"):
        try:
            known = json.loads(path.read_bytes())
        except FileNotFoundError:
            known = None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} does not say whose local tiers these are: {error}", path=str(path)) from error
        if known is None:
            temporary = path.with_suffix(".new")  # nobody else writes one: the lock is held
            try:
                temporary.unlink(missing_ok=True)
                temporary.touch(0o600)
                temporary.write_text(json.dumps(list(places)), encoding="utf-8")
                temporary.replace(path)
            except OSError as error:
                problem = f"{path} cannot be written: {error.strerror}"
                if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                    raise CapacityError(f"{problem}: free some room and try again", path=str(path)) from error
                raise StoreError(problem, path=str(path)) from error
            return directory
    if set(places).isdisjoint(known):
        raise InvalidInputError(
            f"{url} has the id of a store that this host keeps local tiers for, and lies elsewhere: at {places[0]}, not at "
            f"{known[0]}. A copy needs a state directory of its own (state_dir=, --state-dir), or none (ram=0, nvme=0); if it is "
            f"the same one under another name, or has moved for good, remove {path}",
            path=url,
        )
    return directory
