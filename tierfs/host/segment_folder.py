"""The location of a host's folder of segments: a text file in the state directory names it for all processes.

Two processes with two folders would not see each other's pending changes, and would take older content for the newest.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from tierfs.clock import boot_id
from tierfs.errors import ReadOnlyError, StoreError, TierfsError
from tierfs.host.filesystems import entries_of, make_private, open_lock_file, refused

FALLBACK = "segments"
"""Name of the folder in the state directory, for segments that do not fit into shared memory."""

OVERFLOW = "overflow"
"""Name of the folder in the state directory for segments of files that do not fit into the ram budget."""

NAMING_FILE = "segments.txt"
"""File in the state directory. Its lines are the folder, and the device of the filesystem that holds it."""

STATE_FILE = "state"
"""File in a folder in shared memory that names its state directory. All users of the folder hold a lock on it."""

TEXT_BYTES_MAX = 16384
_SECTOR_BYTES = 512
_logger = logging.getLogger("tierfs.local")


class SegmentFolder:
    """The folder of segments of a host. One process at a time creates this object.

    The folder is named after the state directory's device and inode, and after the boot. So a copy of a state directory
    has a folder of its own, and so has the next boot. The first process chooses whether it lies in shared memory, and
    all others follow ``segments.txt``. All of them hold a shared lock on that file. When no process does, the folder
    stays where it is while it holds segments, because these may hold pending changes.

    Args:
        directory: The state directory, absolute.
        shm: The preferred parent directory.

    Attributes:
        path: The folder; the one in the state directory if there can be none in ``shm``.
        why_not: Why there is none in ``shm``, if that was tried.

    Raises:
        ReadOnlyError: The folder in use belongs to another user, or is open to others.
        StoreError: Other processes use a folder that this one cannot see.
        CapacityError: There is no room for the text file.
    """

    def __init__(self, directory: Path, shm: Path) -> None:
        self._directory = directory
        status = directory.stat()
        digest = xxhash.xxh3_64_hexdigest(f"{boot_id()} {status.st_dev}:{status.st_ino}".encode())
        self._name = f"tierfs-{os.geteuid()}-{digest}"
        self._locks: list[int] = []
        self.why_not: str | None = None
        try:
            self.path = self._find(shm)
        except BaseException as error:
            # Closing is not enough: a child that was forked meanwhile has the open files, too, and would block all
            # other processes.
            for fd in self._locks:
                fcntl.flock(fd, fcntl.LOCK_UN)
            self.close()
            if isinstance(error, OSError) and not isinstance(error, TierfsError):
                raise refused(error, directory / NAMING_FILE, "cannot be used", tier="ram") from error
            raise

    def close(self) -> None:
        """Release the locks, unless a forked child has them too."""
        while self._locks:
            os.close(self._locks.pop())

    def _find(self, shm: Path) -> Path:
        fd = open_lock_file(self._directory / NAMING_FILE)
        self._locks.append(fd)
        is_alone = _lock_alone(fd)
        said = os.pread(fd, TEXT_BYTES_MAX, 0)
        found = self._named(said, shm, is_alone=is_alone)
        if found is None and not is_alone:
            raise StoreError(
                f"{self._directory} is in use by processes whose segments of shared memory are in "
                f"{os.fsdecode(said).partition(chr(10))[0]}, which this process cannot see. Give all processes the "
                "same shared memory (docker: --ipc) and TIERFS_SHM_DIR, or this one a state directory of its own",
                path=str(self._directory),
                tier="ram",
            )
        if found is None or (
            is_alone and found.parent != shm and not any(each.name.endswith(".slab") for each in entries_of(found))
        ):
            found = self._choose(shm)
            text = FALLBACK if found.parent == self._directory else str(found)
            data = os.fsencode(f"{text}\n{os.stat(found).st_dev}\n")
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))
        elif found.parent != shm:
            _logger.warning(
                "segments are not in %s but in %s, where other processes of this host keep theirs, or left some",
                shm,
                found,
            )
        fcntl.flock(fd, fcntl.LOCK_SH)
        return found

    def _named(self, said: bytes, shm: Path, *, is_alone: bool) -> Path | None:
        """Return the folder that the text file names, if it is of this boot and of this state directory."""
        text, _, device = os.fsdecode(said).strip().partition("\n")
        named = self._directory / text
        if named.name != (FALLBACK if named.parent == self._directory else self._name):
            return None
        # Processes may see the folder by different paths.
        for folder in (named, shm / named.name):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                # A folder that was removed is created again.
                status = os.stat(folder.parent if folder == named else folder)
                if str(status.st_dev) == device and not (is_alone and _is_foreign(folder)):
                    self._make(folder)
                    return folder
        return None

    def _choose(self, shm: Path) -> Path:
        """Make the folder in ``shm``, or else in the state directory. Remove unused folders without segments."""
        fallback = self._directory / FALLBACK
        try:
            folder = shm / self._name
            self._make(folder)
            for unused, _ in _unused(folder):
                with contextlib.suppress(OSError):
                    if {entry.name for entry in entries_of(unused)} == {STATE_FILE}:
                        os.unlink(unused / STATE_FILE)
                        unused.rmdir()
        except OSError as error:
            self.why_not = str(error)
            folder = fallback
            self._make(folder)
        return folder

    def _make(self, folder: Path) -> None:
        if folder.parent == self._directory:
            make_private(folder)
            return
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)  # without its parents
        make_private(folder, follow_links=False)
        fd = os.open(folder / STATE_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if not os.fstat(fd).st_size:
                os.pwrite(fd, os.fsencode(self._directory), 0)
        except BaseException:
            os.close(fd)
            raise
        self._locks.append(fd)
        if not os.fstat(fd).st_nlink:
            self._make(folder)  # another process removed it while this one waited


def unused_folders(own: Path) -> list[tuple[str, int, str]]:
    """Return the folders of this user beside ``own`` that no process uses. Their memory stays until they are removed.

    Returns:
        The path of each; the bytes of memory that its files occupy; and the state directory that it belongs to, which
        may be gone, or empty if that is unknown.
    """
    found: list[tuple[str, int, str]] = []
    for folder, said in _unused(own):
        with contextlib.suppress(OSError):  # removed meanwhile
            size = sum(entry.stat(follow_symlinks=False).st_blocks * _SECTOR_BYTES for entry in entries_of(folder))
            found.append((str(folder), size, said))
    return found


def _unused(own: Path) -> Iterator[tuple[Path, str]]:
    """Yield each folder beside ``own`` that no process uses, and what its file says. It is locked until the next one."""
    siblings: list[os.DirEntry[str]] = []
    with contextlib.suppress(ReadOnlyError):  # if this user may not list the shared directory
        siblings = entries_of(own.parent)
    for sibling in siblings:
        if not sibling.name.startswith(f"tierfs-{os.geteuid()}-") or sibling.path == str(own):
            continue
        try:
            fd = os.open(f"{sibling.path}/{STATE_FILE}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it is not a folder of this user, or was removed meanwhile
        try:
            if _lock_alone(fd) and not _is_foreign(Path(sibling.path)):
                yield Path(sibling.path), os.fsdecode(os.pread(fd, TEXT_BYTES_MAX, 0))
        finally:
            os.close(fd)


def _lock_alone(fd: int) -> bool:
    """Try to lock a file exclusively. Return whether no other process has it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_foreign(folder: Path) -> bool:
    return os.stat(folder, follow_symlinks=False).st_uid != os.geteuid()
