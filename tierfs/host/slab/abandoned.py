"""Unused folders of segments: those of this user's other state directories, existing or removed.

A folder records its state directory, and its users hold a lock on it. Its memory stays allocated after its users and
its state directory are gone, so the next process of the user removes such a folder. A folder stays if it is not certain
that its state directory was removed, and `tierfs status` lists it.
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

_logger = logging.getLogger("tierfs.local")


class UnusedFolder(NamedTuple):
    """A folder of segments that no process uses.

    Attributes:
        folder: Its path.
        bytes: Memory that its files occupy.
        state_directory: The state directory that it belongs to; empty if unknown.
    """

    folder: str
    bytes: int
    state_directory: str


def unused_folders(own: Path) -> list[UnusedFolder]:
    """Return the folders of this user beside ``own`` that no process uses."""
    return [
        UnusedFolder(str(folder), _bytes_in(folder), str(said.get("directory", ""))) for folder, said in _unused(own)
    ]


def remove_gone(own: Path) -> None:
    """Remove this user's unused folders beside ``own`` whose state directory was removed, with their pending data."""
    for folder, said in _unused(own):
        if _is_gone(said):
            size = _bytes_in(folder)
            with contextlib.suppress(OSError):
                # Remove the lock file last: a process that waits for the lock then finds that the file has no name.
                for entry in sorted(entries_of(folder), key=lambda entry: entry.name == STATE_FILE):
                    os.unlink(entry.path)
                folder.rmdir()
                _logger.info(
                    "%s was removed (%s): its state directory, %s, no longer exists",
                    folder,
                    format_bytes(size),
                    said["directory"],
                )


def drop_copies(own: Path) -> None:
    """Remove segments without dirty data from this user's unused folders beside ``own``.

    Dirty segments stay for the next process that opens that state directory.
    """
    for folder, _ in _unused(own):
        with contextlib.suppress(OSError):
            for entry in entries_of(folder):
                if _is_worthless(entry):
                    os.unlink(entry.path)


def _unused(own: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each unused folder with its recorded description. It is locked until the next one is requested."""
    siblings: list[os.DirEntry[str]] = []
    with contextlib.suppress(ReadOnlyError):  # if this user may not list the shared directory
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
    """Return whether the state directory that a folder names was certainly removed, and is not merely invisible.

    A state directory that is not mounted, or lies in another container, is invisible. So its nearest existing parent
    must be the directory that was there when the folder was made, on the filesystem of the state directory.
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
    """Return whether a file in an unused folder holds no dirty data."""
    name = FileName.parse(entry.name)
    if name is None or name.suffix != "slab":
        return name is not None
    try:
        segment = Segment.attach(Path(entry.path))
    except OldSegmentError:
        return True
    except (TierfsError, OSError, MemoryError):
        return False  # it may be a dirty segment of another version
    try:
        return not segment.is_dirty()
    finally:
        segment.close()
