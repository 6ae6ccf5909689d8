"""The location of a host's folder of segments: all processes follow a link in the state directory to the same folder.

Two processes with two folders would not see each other's pending changes, and would take older content for the newest.
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

SEGMENT_FOLDERS_MAX = 16
STATE_BYTES_MAX = 16384
FALLBACK = "segments"
"""Name of the folder in the state directory."""

STATE_FILE = "state"
"""File in a folder that records its state directory. All users of the folder hold a shared lock on it."""

_logger = logging.getLogger("tierfs.local")


class SegmentFolder:
    """The folder of segments of a host. One process at a time creates this object.

    The link is ``segments-<boot id>-<device>``, with the device of the filesystem that holds the folder. The first
    process creates it, and all others follow it. All of them hold a shared lock on the state directory. When no process
    does, the folder stays where it is while it holds segments, because these may hold pending changes.

    Args:
        directory: The state directory, absolute.
        shm: The preferred parent directory.

    Attributes:
        path: The folder; the one in the state directory if there can be none in ``shm``.
        why_not: Why there is none in ``shm``, if that was tried.
        locks: Descriptors whose locks keep other processes from taking the folder for unused. The caller closes them.

    Raises:
        ReadOnlyError: The folder in use belongs to another user; or it, or the one used last, is open to others.
        StoreError: Other processes use a folder that this one cannot see.
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
            # Closing is not enough: a child that was forked meanwhile has the open files, too, and would block all
            # other processes.
            for fd in self.locks:
                fcntl.flock(fd, fcntl.LOCK_UN)
            self.close()
            if isinstance(error, OSError) and not isinstance(error, TierfsError):
                raise refused(error, directory, "cannot be used", tier="ram") from error
            raise

    def __repr__(self) -> str:
        return f"SegmentFolder({str(self.path)!r})"

    def close(self) -> None:
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
                f"{self._directory} is in use by processes whose segments of shared memory are in "
                f"{os.readlink(link)}, which this process cannot see: that folder does not exist here, or is another "
                "one of the same name. Give all processes the same shared memory (docker: --ipc) and TIERFS_SHM_DIR, "
                "or this one a state directory of its own",
                path=str(self._directory),
                tier="ram",
            )
        if found is None or not (is_used or found.parent == shm or _holds_segments(found)):
            found = self._choose(shm)
            self._point_to(found)
        elif found.parent != shm:
            _logger.warning(
                "segments are not in %s but in %s, where other processes of this host keep theirs, or left some",
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
        """Replace the link, and remove links of earlier boots."""
        link = self._directory / f"{self._begin}{os.stat(folder.parent).st_dev}"
        is_inside = folder.parent == self._directory
        new = self._directory / "segments.new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(FALLBACK if is_inside else folder)
            if link.is_dir() and not link.is_symlink():
                # The state directory is a copy that was made by following links.
                link.rename(self._directory / f"copied-{link.name}")
            new.replace(link)
            for old in self._links("segments-"):
                if old != link:
                    old.unlink()
        except OSError as error:
            # The kernel makes a failed disk read-only.
            if error.errno != errno.EROFS:
                raise refused(error, link, "cannot be made", tier="ram") from error

    def _follow(self, link: Path, shm: Path, *, is_used: bool) -> Path | None:
        """Return the folder that a link names, if it exists. Its path in ``shm`` may differ between processes."""
        device = link.name.removeprefix(self._begin)
        linked = self._directory / os.readlink(link)
        ours = shm / linked.name
        for folder in (linked, ours):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                # A removed folder is created again if other processes use it.
                place = os.stat(folder.parent if folder is linked else ours / STATE_FILE)
                is_there = str(place.st_dev) == device
                if is_there and not is_used and _is_foreign(folder):
                    # the host's folder was removed, and another user took its name
                    continue
                if is_there and self._claim(folder, is_new=False):
                    return folder
        return None

    def _choose(self, shm: Path) -> Path:
        """Return a folder in ``shm`` that no other state directory uses, or else the one in the state directory.

        It is named after the path of the state directory, so that a recreated state directory finds it again, as in a
        restarted container. Containers that share their host's memory may each have a state directory at that path. So
        the folder records its state directory, and its users lock it.
        """
        name = f"tierfs-{os.geteuid()}-{xxhash.xxh3_64_hexdigest(os.fsencode(self._directory))}"
        try:
            for number in range(SEGMENT_FOLDERS_MAX):
                folder = shm / (f"{name}-{number}" if number else name)
                if self._claim(folder, is_new=True):
                    return folder
            raise StoreError(
                f"{shm} already has {SEGMENT_FOLDERS_MAX} folders of other state directories at {self._directory}"
            )
        except OSError as error:
            self.why_not = str(error)
            fallback = self._directory / FALLBACK
            make_private(fallback)
            return fallback

    def _claim(self, folder: Path, *, is_new: bool) -> bool:
        """Return whether a folder belongs to this state directory.

        If no process uses the folder, record this state directory in it: always if ``is_new``, otherwise only if it has
        no record.
        """
        fd = _open_state(folder)
        is_ours = False
        try:
            if _is_alone(fd) and (is_new or not os.pread(fd, 1, 0)):
                _write(fd, self._description())
            # Conversion to a shared lock may let another process in between: the record read after that counts.
            fcntl.flock(fd, fcntl.LOCK_SH)
            if not os.fstat(fd).st_nlink:
                return self._claim(folder, is_new=is_new)  # another process removed it while this one waited
            is_ours = said_of(fd).get("is") == _identity(self._directory)
        finally:
            if is_ours:
                self.locks.append(fd)
            else:
                os.close(fd)
        return is_ours

    def _description(self) -> bytes:
        """Return the record; see `said_of`."""
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
    """Return a folder's record of the state directory that it belongs to; empty if it cannot be read.

    ``is`` identifies that directory, and ``above`` its parents from the nearest to the root. ``directory`` is
    its path, and ``host`` the name of the machine or container.
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
    """Try to lock a file exclusively. Return whether no other process has it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(fd: int, data: bytes) -> None:
    os.pwrite(fd, data, 0)  # overwrites the old record, which needs no room
    os.ftruncate(fd, len(data))


def _is_foreign(folder: Path) -> bool:
    return os.stat(folder, follow_symlinks=False).st_uid != os.geteuid()


def _holds_segments(folder: Path) -> bool:
    return any(entry.name.endswith(".slab") for entry in entries_of(folder))
