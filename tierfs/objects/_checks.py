"""Checks of an object that all backends make, with the same words for what does not fit."""

from __future__ import annotations

from datetime import datetime

from tierfs.errors import ConflictError, CorruptionError
from tierfs.objects.protocol import Version

__all__ = ["check_end", "check_limit", "check_version", "nanoseconds"]


def check_version(key: str, found: Version | None, wanted: Version | None) -> None:
    """Check that an object has the version that was asked for, if one was.

    Raises:
        ConflictError: It has another one, or, where ``found`` is ``None``, it is not there.
    """
    if wanted is None or found == wanted:
        return
    if found is None:
        raise ConflictError(f"{key} is not there any more", path=key)
    raise ConflictError(f"{key} is at version {found}, not at {wanted}", path=key)


def check_end(key: str, size: int, end: int) -> None:
    """Check that an object of ``size`` bytes has those before offset ``end``.

    Raises:
        CorruptionError: It is too short.
    """
    if size < end:
        raise CorruptionError(f"{key} ends at byte {size}, before byte {end}: cut short", path=key)


def check_limit(key: str, size: int, limit: int) -> None:
    """Check that an object of ``size`` bytes may be read whole.

    Raises:
        CorruptionError: It is larger than ``limit`` bytes.
    """
    if size > limit:
        raise CorruptionError(f"{key} has {size} bytes, over the limit of {limit}", path=key)


def nanoseconds(time: datetime | None) -> int:
    """A time in nanoseconds since the epoch; 0 where it is unknown."""
    return int(time.timestamp() * 1_000_000_000) if time else 0
