"""Where a host's folder of segments is: written down in the state directory, so that all its processes have the same one.

Two processes with two folders would not see what the other has pending, and take what was there before for the newest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import NamedTuple

import xxhash

from tierfs.clock import boot_id
from tierfs.errors import StoreError, TierfsError
from tierfs.host.private import entries_of, make_private, refused

__all__ = ["FALLBACK", "SegmentFolder"]

SEGMENT_FOLDERS_MAX = 16
NOTE_BYTES_MAX = 8192
FALLBACK = "segments"
_NOTE_FILE = "segments.at"
_STATE_FILE = "state"
_logger = logging.getLogger("tierfs.local")


class SegmentFolder:
    """The folder of a host. To be made by one process at a time.

    The first one that uses the state directory says where it is; who comes while others use it has the same one. When nobody
    does, it stays where it was while segments are left in it, since something may be pending in them.

    Args:
        directory: The state directory, absolute.
        shm: Where it is to be.

    Attributes:
        path: The folder; where there can be none in ``shm``, the one in the state directory.
        why_not: Why there is none in ``shm``, where that was tried.
        locks: Open files that keep others from taking the folder for unused. The caller's to close.

    Raises:
        ReadOnlyError: The one that others use is somebody else's; or it, or the one that they used last, is open to others.
        StoreError: Others use one that this process cannot see.
        CapacityError: There is no room to write down where it is.
    """

    def __init__(self, directory: Path, shm: Path) -> None:
        status = directory.stat()
        self._mine = f"{status.st_dev}:{status.st_ino}\n".encode()
        self._directory = directory
        self.why_not: str | None = None
        self.locks: list[int] = []
        try:
            self.path = self._find(shm)
        except BaseException:
            # Closing is not enough: a child that was forked meanwhile has the open files, too, and would keep all others waiting.
            for fd in self.locks:
                fcntl.flock(fd, fcntl.LOCK_UN)
            self.close()
            raise

    def __repr__(self) -> str:
        return f"SegmentFolder({str(self.path)!r})"

    def close(self) -> None:
        """Close the locks."""
        while self.locks:
            os.close(self.locks.pop())

    def _find(self, shm: Path) -> Path:
        path = self._directory / _NOTE_FILE
        try:
            fd, is_writable = _open_note(path)
            self.locks.append(fd)
            is_used = not _is_alone(fd)
            note = _Note.decode(os.pread(fd, NOTE_BYTES_MAX, 0))
            found = None if note is None else self._follow(note, shm, is_used=is_used)
            if found is None and note is not None and is_used:
                raise StoreError(
                    f"{self._directory} is in use by processes that have their segments of shared memory in {note.folder}, "
                    "which this one cannot see: it is not there, or is another one of that name. Give all of them the same shared "
                    "memory (docker: --ipc) and TIERFS_SHM_DIR, or this one a state directory of its own",
                    path=str(self._directory),
                    tier="ram",
                )
            if found is None or not (is_used or found.parent == shm or _holds_segments(found)):
                found = self._choose(shm)
                if is_writable:
                    _write(fd, _Note.of(found).encode())
            elif found.parent != shm:
                _logger.warning(
                    "segments are not in %s but in %s, where other processes of this host have theirs, or left some",
                    shm,
                    found,
                )
            fcntl.flock(fd, fcntl.LOCK_SH)
        except TierfsError:
            raise
        except OSError as error:
            raise refused(error, path, "cannot be written", tier="ram") from error
        return found

    def _follow(self, note: _Note, shm: Path, *, is_used: bool) -> Path | None:
        """The folder that is written down, if it is there; in ``shm`` it may go by another path than for others."""
        noted, ours = self._directory / note.folder, shm / note.folder.name
        for folder in (noted, ours):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                is_there = os.stat(noted.parent if folder is noted else ours / _STATE_FILE).st_dev == note.device
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
            return self._directory / FALLBACK

    def _claim(self, folder: Path, *, is_new: bool) -> bool:
        """Whether a folder says that it is ours. It is made to where it says nothing, or a new one is wanted and nobody uses it."""
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        make_private(folder, follow_links=False)
        fd = os.open(folder / _STATE_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        is_ours = False
        try:
            if _is_alone(fd) and (is_new or not os.pread(fd, 1, 0)):
                _write(fd, self._mine)
            # Changing to a shared lock may let somebody else in between: what counts is what it says when we have that.
            fcntl.flock(fd, fcntl.LOCK_SH)
            is_ours = os.pread(fd, len(self._mine) + 1, 0) == self._mine
        finally:
            if is_ours:
                self.locks.append(fd)
            else:
                os.close(fd)
        return is_ours


class _Note(NamedTuple):
    """What the state directory says.

    Attributes:
        device: Of what the folder lies in: tells one container's shared memory from another's.
        folder: Its path, or its name in the state directory.
    """

    device: int
    folder: Path

    @classmethod
    def of(cls, folder: Path) -> _Note:
        is_instead = folder.name == FALLBACK
        return cls(os.stat(folder.parent).st_dev, Path(FALLBACK) if is_instead else folder)

    @classmethod
    def decode(cls, data: bytes) -> _Note | None:
        """None where it says nothing, or something of a run of the kernel before this one."""
        boot, _, rest = data.partition(b" ")
        device, _, folder = rest.removesuffix(b"\n").partition(b" ")
        if boot != boot_id().encode() or not device.isdigit() or not folder or not data.endswith(b"\n"):
            return None
        return cls(int(device), Path(os.fsdecode(folder)))

    def encode(self) -> bytes:
        return f"{boot_id()} {self.device} ".encode() + os.fsencode(self.folder) + b"\n"


def _open_note(path: Path) -> tuple[int, bool]:
    """The file, and whether it can be written: a disk that failed is made read-only by the kernel."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), True
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW), False


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
