"""Where a host's folder of segments is: a link in the state directory leads there, so that all its processes have the same one.

Two processes with two folders would not see what the other has pending, and take what was there before for the newest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any

import xxhash

from tierfs.clock import boot_id
from tierfs.errors import StoreError, TierfsError
from tierfs.host.private import entries_of, make_private, refused

__all__ = ["FALLBACK", "STATE_FILE", "SegmentFolder", "said_of"]

SEGMENT_FOLDERS_MAX = 16
STATE_BYTES_MAX = 16384
FALLBACK = "segments"
"""The folder in the state directory."""

STATE_FILE = "state"
"""Says of a folder whose it is; locked, shared, by those who use it."""

_logger = logging.getLogger("tierfs.local")


class SegmentFolder:
    """The folder of a host. To be made by one process at a time.

    The link is ``segments-<boot id>-<device>``, where the device is that of the filesystem that the folder lies in. The first process
    makes it, and all others follow it. All of them hold a shared lock on the state directory. When nobody does, the folder stays where
    it was while segments are left in it, since something may be pending in them.

    Args:
        directory: The state directory, absolute.
        shm: Where the folder is to be.

    Attributes:
        path: The folder; where there can be none in ``shm``, the one in the state directory.
        why_not: Why there is none in ``shm``, where that was tried.
        locks: Open files that keep others from taking the folder for unused. The caller's to close.

    Raises:
        ReadOnlyError: The one that others use is somebody else's; or it, or the one that they used last, is open to others.
        StoreError: Others use one that this process cannot see.
        CapacityError: There is no room for the link.
    """

    def __init__(self, directory: Path, shm: Path) -> None:
        self._directory = directory
        self._begin = f"segments-{boot_id()}-"
        self.why_not: str | None = None
        self.locks: list[int] = []
        try:
            self.path = self._find(shm)
        except BaseException as error:
            # Closing is not enough: a child that was forked meanwhile has the open files, too, and would keep all others waiting.
            for fd in self.locks:
                fcntl.flock(fd, fcntl.LOCK_UN)
            self.close()
            if isinstance(error, OSError) and not isinstance(error, TierfsError):
                raise refused(error, directory, "cannot be used", tier="ram") from error
            raise

    def __repr__(self) -> str:
        return f"SegmentFolder({str(self.path)!r})"

    def close(self) -> None:
        """Close the locks."""
        while self.locks:
            os.close(self.locks.pop())

    def _find(self, shm: Path) -> Path:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.locks.append(fd)
        is_used = not _is_alone(fd)
        link = next(iter(self._links(self._begin)), None)
        found = None if link is None else self._follow(link, shm, is_used=is_used)
        if found is None and link is not None and is_used:
            raise StoreError(
                f"{self._directory} is in use by processes that have their segments of shared memory in {os.readlink(link)}, "
                "which this one cannot see: it is not there, or is another one of that name. Give all of them the same shared "
                "memory (docker: --ipc) and TIERFS_SHM_DIR, or this one a state directory of its own",
                path=str(self._directory),
                tier="ram",
            )
        if found is None or not (is_used or found.parent == shm or _holds_segments(found)):
            found = self._choose(shm)
            self._point_to(found)
        elif found.parent != shm:
            _logger.warning(
                "segments are not in %s but in %s, where other processes of this host have theirs, or left some",
                shm,
                found,
            )
        fcntl.flock(fd, fcntl.LOCK_SH)
        return found

    def _links(self, begin: str) -> list[Path]:
        return [
            Path(entry.path)
            for entry in entries_of(self._directory)
            if entry.name.startswith(begin) and entry.is_symlink()
        ]

    def _point_to(self, folder: Path) -> None:
        """Replace the link, and those of earlier runs of the kernel."""
        link = self._directory / f"{self._begin}{os.stat(folder.parent).st_dev}"
        is_inside = folder.parent == self._directory
        new = self._directory / "segments.new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(FALLBACK if is_inside else folder)
            if link.is_dir() and not link.is_symlink():
                # A copy of the state directory was made by following links.
                link.rename(self._directory / f"copied-{link.name}")
            new.replace(link)
            for old in self._links("segments-"):
                if old != link:
                    old.unlink()
        except OSError as error:
            # A disk that failed is made read-only by the kernel.
            if error.errno != errno.EROFS:
                raise refused(error, link, "cannot be made", tier="ram") from error

    def _follow(self, link: Path, shm: Path, *, is_used: bool) -> Path | None:
        """The folder that a link leads to, if it is there; in ``shm`` it may go by another path than for others."""
        device = link.name.removeprefix(self._begin)
        linked = self._directory / os.readlink(link)
        ours = shm / linked.name
        for folder in (linked, ours):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                # A folder that somebody removed is made again while others use it.
                place = os.stat(folder.parent if folder is linked else ours / STATE_FILE)
                is_there = str(place.st_dev) == device
                if is_there and not is_used and _is_foreign(folder):
                    continue  # ours was removed, and anybody may take its name then: nothing of ours is in it
                if is_there and self._claim(folder, is_new=False):
                    return folder
        return None

    def _choose(self, shm: Path) -> Path:
        """A folder in ``shm`` that no other state directory uses, or else the one in the state directory.

        It is named after our path, so that it is found again when the state directory was made anew, as that of a
        container that was restarted. But containers that share their host's memory each have a directory by that name:
        so the folder says whose it is, and is locked by those who use it.
        """
        name = f"tierfs-{os.geteuid()}-{xxhash.xxh3_64_hexdigest(os.fsencode(self._directory))}"
        try:
            for number in range(SEGMENT_FOLDERS_MAX):
                folder = shm / (f"{name}-{number}" if number else name)
                if self._claim(folder, is_new=True):
                    return folder
            raise StoreError(f"{shm} has {SEGMENT_FOLDERS_MAX} folders of other state directories at {self._directory}")
        except OSError as error:
            self.why_not = str(error)
            fallback = self._directory / FALLBACK
            make_private(fallback)
            return fallback

    def _claim(self, folder: Path, *, is_new: bool) -> bool:
        """Whether a folder says that it is ours. It is made to where it says nothing, or a new one is wanted and nobody uses it."""
        fd = _open_state(folder)
        is_ours = False
        try:
            if _is_alone(fd) and (is_new or not os.pread(fd, 1, 0)):
                _write(fd, self._description())
            # Changing to a shared lock may let somebody else in between: what counts is what it says when we have that.
            fcntl.flock(fd, fcntl.LOCK_SH)
            if not os.fstat(fd).st_nlink:
                return self._claim(folder, is_new=is_new)  # somebody removed it while we waited
            is_ours = said_of(fd).get("is") == _identity(self._directory)
        finally:
            if is_ours:
                self.locks.append(fd)
            else:
                os.close(fd)
        return is_ours

    def _description(self) -> bytes:
        """See `said_of`."""
        said = {
            "is": _identity(self._directory),
            "directory": str(self._directory),
            "above": [_identity(path) for path in self._directory.parents],
            "host": os.uname().nodename,
        }
        return json.dumps(said).encode()


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev}:{status.st_ino}"


def said_of(fd: int) -> dict[str, Any]:
    """What a folder says of the state directory that it belongs to; nothing where that cannot be read.

    ``is`` tells that directory from others, ``above`` those above it, from the nearest to the root, ``directory`` is its path, ``host`` the
    machine or container.
    """
    try:
        said = json.loads(os.pread(fd, STATE_BYTES_MAX, 0))
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _open_state(folder: Path) -> int:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    make_private(folder, follow_links=False)
    return os.open(folder / STATE_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _is_alone(fd: int) -> bool:
    """Lock a file, unless others have."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(fd: int, data: bytes) -> None:
    os.pwrite(fd, data, 0)  # over what it says, which needs no room
    os.ftruncate(fd, len(data))


def _is_foreign(folder: Path) -> bool:
    return os.stat(folder, follow_symlinks=False).st_uid != os.geteuid()


def _holds_segments(folder: Path) -> bool:
    return any(entry.name.endswith(".slab") for entry in entries_of(folder))
