"""Checks that all backends make on an object, with the same messages."""

from __future__ import annotations

from datetime import datetime

from tierfs.errors import ConflictError, CorruptionError
from tierfs.objects.protocol import Version


def check_version(key: str, found: Version | None, wanted: Version | None) -> None:
    """Check that an object has the wanted version, if one is given.

    Raises:
        ConflictError: The object has another version, or ``found`` is None: no object is there.
    """
    if wanted is None or found == wanted:
        return
    if found is None:
        raise ConflictError(f"{key} no longer exists", path=key)
    raise ConflictError(f"{key} is at version {found}, not at {wanted}", path=key)


def check_end(key: str, size: int, end: int) -> None:
    """Check that an object of ``size`` bytes reaches offset ``end``.

    Raises:
        CorruptionError: The object is too short.
    """
    if size < end:
        raise CorruptionError(f"{key} ends at byte {size}, before byte {end}: cut short", path=key)


def check_limit(key: str, size: int, limit: int) -> None:
    """Check that an object of ``size`` bytes may be read whole.

    Raises:
        CorruptionError: The object is larger than ``limit`` bytes.
    """
    if size > limit:
        raise CorruptionError(f"{key} has {size} bytes, over the limit of {limit}", path=key)


def nanoseconds(time: datetime | None) -> int:
    """Return a time in nanoseconds since the epoch; 0 if it is unknown."""
    return int(time.timestamp() * 1_000_000_000) if time else 0
