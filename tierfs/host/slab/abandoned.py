"""Folders of segments that no process uses: of other state directories of this user, or of one that is gone.

A folder says which state directory it belongs to, and is locked by those who use it. Memory stays taken after both are gone, so the
next process of the user removes such folders. In doubt a folder stays, and `tierfs status` lists it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tierfs.errors import ReadOnlyError, TierfsError
from tierfs.host.private import entries_of
from tierfs.host.segment_folder import STATE_FILE, said_of
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.segment_file import SECTOR_BYTES, FileName, OldSegmentError
from tierfs.units import format_bytes

__all__ = ["UnusedFolder", "drop_copies", "remove_gone", "unused_folders"]

_logger = logging.getLogger("tierfs.local")


class UnusedFolder(NamedTuple):
    """A folder of segments that no process uses.

    Attributes:
        folder: Its path.
        bytes: Memory that its files take.
        state_directory: Whose it is; empty where it does not say.
    """

    folder: str
    bytes: int
    state_directory: str


def unused_folders(own: Path) -> list[UnusedFolder]:
    """The folders of this user beside ``own`` that no process uses."""
    return [
        UnusedFolder(str(folder), _bytes_in(folder), str(said.get("directory", ""))) for folder, said in _unused(own)
    ]


def remove_gone(own: Path) -> None:
    """Remove the folders of this user beside ``own`` whose state directory was removed, with what was pending there."""
    for folder, said in _unused(own):
        if _is_gone(said):
            size = _bytes_in(folder)
            with contextlib.suppress(OSError):
                # The lock goes last: who waits for it sees that the file has no name any more.
                for entry in sorted(entries_of(folder), key=lambda entry: entry.name == STATE_FILE):
                    os.unlink(entry.path)
                folder.rmdir()
                _logger.info(
                    "%s was removed (%s): its state directory, %s, is gone",
                    folder,
                    format_bytes(size),
                    said["directory"],
                )


def drop_copies(own: Path) -> None:
    """Remove segments that hold only copies, or nothing, from the folders of this user beside ``own`` that no process uses.

    What is dirty there stays, for whoever opens that state directory again.
    """
    for folder, _ in _unused(own):
        with contextlib.suppress(OSError):
            for entry in entries_of(folder):
                if _is_worthless(entry):
                    os.unlink(entry.path)


def _unused(own: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each such folder, locked until the next one is asked for, and what it says of itself."""
    siblings: list[os.DirEntry[str]] = []
    with contextlib.suppress(ReadOnlyError):  # where nobody may list what all share
        siblings = entries_of(own.parent)
    user = os.geteuid()
    for sibling in siblings:
        if not sibling.name.startswith(f"tierfs-{user}-") or sibling.path == str(own):
            continue
        try:
            if sibling.stat(follow_symlinks=False).st_uid != user or not sibling.is_dir(follow_symlinks=False):
                continue
            fd = os.open(f"{sibling.path}/{STATE_FILE}", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(sibling.path), said_of(fd)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)


def _is_gone(said: Mapping[str, Any]) -> bool:
    """Whether the state directory that a folder names was certainly removed, and is not merely out of sight.

    What is not mounted, or lies in another container, is out of sight. So the nearest directory above it that is there has to be
    the one that was there when the folder was made, on the filesystem that the state directory was on.
    """
    directory, above = said.get("directory"), said.get("above")
    if not isinstance(directory, str) or not isinstance(above, list) or said.get("host") != os.uname().nodename:
        return False
    device = str(said.get("is", "")).partition(":")[0]
    expectations: list[str | None] = [None, *map(str, above)]
    for path, expected in zip((Path(directory), *Path(directory).parents), expectations, strict=False):
        try:
            status = os.stat(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.ENOTDIR:
                return False
            continue
        return expected == f"{status.st_dev}:{status.st_ino}" and str(status.st_dev) == device
    return False


def _bytes_in(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(entry.stat(follow_symlinks=False).st_blocks * SECTOR_BYTES for entry in entries_of(folder))
    return 0


def _is_worthless(entry: os.DirEntry[str]) -> bool:
    """Whether a file in a folder that nobody uses holds only copies, or nothing."""
    name = FileName.parse(entry.name)
    if name is None or name.suffix != "slab":
        return name is not None
    try:
        segment = Segment.attach(Path(entry.path))
    except OldSegmentError:
        return True
    except (TierfsError, OSError, MemoryError):
        return False  # may be another version's, and dirty
    try:
        return not segment.is_dirty()
    finally:
        segment.close()
