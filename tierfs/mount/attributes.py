"""Convert between a manifest and the attributes that ``stat`` shows.

A manifest has no field for a mode, and its time is the time of publication. So both lie in the manifest's metadata
under ``posix``: ``{"mode": 420, "mtime_ns": 1764000000000000000}``. Owner and group are those of the user who mounted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tierfs.store import Entry

KEY = "posix"
MODE_BITS = 0o777
FILE_MODE, DIRECTORY_MODE, FOREIGN_MODE = 0o644, 0o755, 0o444
_TIME_NS_MAX = (1 << 63) - 1
"""The last time that a file can have, in the year 2262. The first one is as far from the epoch, in 1677."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """The fields of ``struct stat`` that differ from file to file.

    Attributes:
        mode: The permissions and the bits of the file type.
        is_gone: Whether no name refers to the inode any more. ``stat`` shows a link count of 0 then.
    """

    ino: int
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    uid: int
    gid: int
    is_gone: bool = False

    def at(
        self, *, size: int | None = None, mode: int | None = None, mtime_ns: int | None = None, now_ns: int
    ) -> Attributes:
        """Return the attributes after a change. ``mode`` has only the permissions. ``None`` keeps a field.

        A time that is too far from the epoch becomes the nearest one that a file can have, as on a disk.
        """
        return replace(
            self,
            size=self.size if size is None else size,
            mode=self.mode if mode is None else stat.S_IFMT(self.mode) | (mode & MODE_BITS),
            mtime_ns=self.mtime_ns if mtime_ns is None else max(-_TIME_NS_MAX, min(_TIME_NS_MAX, mtime_ns)),
            ctime_ns=now_ns,
        )

    @property
    def posix(self) -> dict[str, int]:
        """The attributes that a manifest keeps in its metadata."""
        return {"mode": self.mode & MODE_BITS, "mtime_ns": self.mtime_ns}


def attributes_of(entry: Entry, ino: int, *, started_ns: int) -> Attributes:
    """Return the attributes of an entry. A directory without a marker has the time ``started_ns``."""
    mode, mtime_ns, ctime_ns = (DIRECTORY_MODE if entry.is_directory else FILE_MODE), started_ns, started_ns
    if entry.foreign is not None:
        mode, mtime_ns = FOREIGN_MODE, entry.foreign.modified_ns
        ctime_ns = mtime_ns
    elif entry.manifest is not None:
        mtime_ns = ctime_ns = entry.manifest.modified_ns
        posix = entry.manifest.metadata.get(KEY)
        if isinstance(posix, Mapping):
            mode = _number(posix.get("mode"), mode) & MODE_BITS
            mtime_ns = _number(posix.get("mtime_ns"), mtime_ns)
    kind = stat.S_IFDIR if entry.is_directory else stat.S_IFREG
    return Attributes(ino, kind | mode, entry.length, mtime_ns, ctime_ns, os.getuid(), os.getgid())


def new_attributes(ino: int, mode: int, now_ns: int) -> Attributes:
    """Return the attributes of a new file or directory. ``mode`` includes the bits of the file type."""
    return Attributes(ino, stat.S_IFMT(mode) | (mode & MODE_BITS), 0, now_ns, now_ns, os.getuid(), os.getgid())


def with_posix(metadata: Mapping[str, object], attributes: Attributes) -> dict[str, object]:
    """Return metadata with the mode and time of ``attributes``. All other keys are kept."""
    return {**metadata, KEY: attributes.posix}


def _number(value: object, default: int) -> int:
    """Return a number from stored metadata, or ``default`` if it is invalid. Any writer may have stored it."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _TIME_NS_MAX:
        return default
    return value
