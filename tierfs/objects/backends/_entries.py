"""Read an object's version and time from the dictionaries with which fsspec filesystems describe files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from tierfs.objects.protocol import ObjectInfo, Version

# In order of preference. Fields that ``info`` has and listings may lack, like S3's version id, come last: an object
# must have the same version in both.
_TAGS = ("generation", "ETag", "etag", "versionId", "VersionId", "checksum")
_TIMES = (
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "modify",
    "modificationTime",
    "last_write_time",
    "created",
)
_MILLISECONDS_FROM = 1e11  # in seconds this is the year 5138; WebHDFS counts milliseconds


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file.

    Attributes:
        info: The file as an object.
        stamp: The time in its version, empty if unknown; None if the filesystem has a tag for the version.
    """

    info: ObjectInfo
    stamp: str | None

    @classmethod
    def of(cls, key: str, fields: Mapping[str, Any]) -> FileEntry:
        """Make an entry from the filesystem's description of ``key``."""
        size = int(fields.get("size") or 0)
        stamp, modified_ns = _time(fields)
        for name in _TAGS:
            if fields.get(name):
                return cls(ObjectInfo(key, size, Version(str(fields[name]).strip('"')), modified_ns), None)
        version = Version(f"t{stamp}-{size:x}-{int(fields.get('ino') or 0):x}")
        return cls(ObjectInfo(key, size, version, modified_ns), stamp)


def is_directory(fields: Mapping[str, Any]) -> bool:
    """Return whether a filesystem describes a directory."""
    return fields.get("type") == "directory"


def _time(fields: Mapping[str, Any]) -> tuple[str, int]:
    """Return the time of the last change, as text for the version and in nanoseconds; empty and 0 if unknown."""
    for name in _TIMES:
        value = fields.get(name)
        if not value:
            continue
        seconds = _seconds(value)
        if seconds is None:
            return str(value), 0
        # Microseconds: listings describe a file with a float, other calls with a datetime.
        modified_ns = round(seconds * 1_000_000) * 1000
        return f"{modified_ns:x}", modified_ns
    return "", 0


def _seconds(value: object) -> float | None:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(value, int | float):
        return value / 1000 if value > _MILLISECONDS_FROM else value
    return None
