"""The host that processes share: the state directory, liveness of processes, and locks between them.

A host is a state directory. Each process that owns something holds the ``flock`` of its own lock file in it. A process
is alive while it holds this lock; a process id proves nothing, because the kernel reuses it. A lock belongs to an open
file description, which a forked child shares. So a child closes its parent's at once, and gets an id of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import xxhash

from tierfs.clock import boot_id
from tierfs.errors import InvalidInputError, StoreError
from tierfs.host.filesystems import entries_of, filesystem_of, is_network, make_private, open_lock_file, refused
from tierfs.host.segment_folder import FALLBACK, OVERFLOW, SegmentFolder

SMALL_SHM = (
    "Shared memory is too small or cannot be used; segments are kept in the state directory instead. Staging will be slower. Give the "
    "container a larger /dev/shm."
)
_OWNER = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"[0-9a-zA-Z_-]{1,64}")
_logger = logging.getLogger("tierfs.local")


def state_directory(given: str | None = None) -> Path:
    """Return the path of this host's state directory.

    Args:
        given: Its path; ``~`` is the user's home. By default ``TIERFS_STATE_DIR``, else ``tierfs`` in the user's state
            directory (``XDG_STATE_HOME``, else ``~/.local/state``).

    Raises:
        InvalidInputError: The path is relative, or the user has no home. Programs started in two directories would be two hosts, and neither
            would see the pending changes of the other.
    """
    given = given or os.environ.get("TIERFS_STATE_DIR")
    if not given:
        users = os.path.expanduser(os.environ.get("XDG_STATE_HOME", ""))
        # The XDG specification says to ignore a relative path.
        given = os.path.join(users if os.path.isabs(users) else "~/.local/state", "tierfs")
    directory = Path(os.path.expanduser(given))
    if not directory.is_absolute():
        raise InvalidInputError(
            f"{given}: a state directory must be an absolute path, or begin with ~ where the user has a home: set "
            "TIERFS_STATE_DIR to a directory on a local disk",
            path=given,
        )
    return directory


class ExclusiveLock:
    """A lock on a file, between processes and between threads. One holder has it until it releases the lock or dies.

    A forked child neither holds its parent's lock nor prolongs it. The file is created with mode 0600 if missing, and
    stays: removing it is unnecessary and harmless.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._held = False

    def __del__(self) -> None:
        # At interpreter exit `_guard` may be None already; then the kernel releases the lock.
        if self._fd is not None and _guard is not None:
            self.release()

    @property
    def held(self) -> bool:
        return self._held

    def acquire(self, *, blocking: bool = False) -> bool:
        """Acquire the lock, which this object must not hold already. Not thread-safe.

        Args:
            blocking: Wait for as long as another holder has it.

        Returns:
            Whether it was acquired.
        """
        assert self._fd is None, f"{self.path} is already locked through this object"
        mode = fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB)
        while True:
            fd = self._open()
            try:
                fcntl.flock(fd, mode)
                self._held = _is_at(fd, self.path)
            except BlockingIOError:
                return False
            finally:
                if not self._held:
                    self.release()
            if self._held:
                return True
            # Another process removed the file while this one waited: the path now names another file, or none.

    def release(self) -> None:
        """Release the lock. Does nothing if this process does not hold it."""
        with _guard:
            if self._fd is not None:
                # Closing is not enough: a child that has forked and not yet executed its program has the open file,
                # too.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                self._close()

    def _open(self) -> int:
        # Register it before locking, so that a child forked meanwhile closes it and does not prolong the lock.
        with _guard:
            try:
                self._fd = open_lock_file(self.path)
            except FileNotFoundError as error:  # O_CREAT creates a missing file, so its directory is missing
                raise StoreError(
                    f"{self.path} cannot be locked: the state directory was removed while in use, and changes pending "
                    "in it are lost: restart this program",
                    path=str(self.path),
                ) from error
            except OSError as error:
                raise refused(error, self.path, "cannot be locked") from error
            _locks.add(self)
            return self._fd

    def _close(self) -> None:
        fd, self._fd, self._held = self._fd, None, False
        _locks.discard(self)
        if fd is not None:
            os.close(fd)


class Host:
    """The state that one user's processes on one host share. Thread-safe.

    Args:
        directory: The state directory. Created with mode 0700 if missing.
        shm: Directory for segments of shared memory; by default ``TIERFS_SHM_DIR``, else ``/dev/shm``.
        mountinfo: The mounts, as in proc(5); for tests.

    Attributes:
        directory: The state directory, absolute.
        segments: The host's folder of segments: in shared memory, or `fallback` (with a warning) if that cannot be
            used.
        fallback: The folder in the state directory, for segments that do not fit into shared memory.
        overflow: The folder in the state directory, for segments of files that do not fit into the ram budget.

    Raises:
        ReadOnlyError: The directory, or the folder of segments that the host uses, belongs to another user or is open
            to others.
        InvalidInputError: The directory lies on a network filesystem, or ``TIERFS_SHM_DIR`` is a relative path.
        CapacityError, StoreError: The directory cannot be created, or other processes use a folder of segments that
            this one cannot see.
    """

    def __init__(self, directory: Path, shm: Path | None = None, *, mountinfo: str | None = None) -> None:
        filesystem = filesystem_of(directory, mountinfo=mountinfo)
        if is_network(filesystem):
            raise InvalidInputError(
                f"{directory} lies on a network filesystem ({filesystem}), where locks cannot be trusted: "
                "set TIERFS_STATE_DIR to a local directory",
                path=str(directory),
            )
        make_private(directory)
        self.directory = directory.resolve()
        make_private(self._processes)
        self._own: ExclusiveLock | None = None
        shm = shm or Path(os.environ.get("TIERFS_SHM_DIR") or "/dev/shm")  # noqa: S108 - a folder in it is checked
        if not shm.is_absolute():
            raise InvalidInputError(
                f"TIERFS_SHM_DIR={shm}: it must be an absolute path, so that it does not depend on the working "
                "directory",
                path=str(shm),
            )
        with self.locked("segments"):
            folder = SegmentFolder(self.directory, shm)
        # The locks are held while this object lives, and by forked children, which use the folder as well.
        weakref.finalize(self, folder.close).atexit = False
        self.segments = folder.path
        self.fallback = self.directory / FALLBACK
        self.overflow = self.directory / OVERFLOW
        if folder.why_not is not None:
            _logger.warning("%s (%s)", SMALL_SHM, folder.why_not)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders of segments that count against the ram budget, in the order in which they are tried."""
        return (self.segments,) if self.segments == self.fallback else (self.segments, self.fallback)

    def name(self) -> str:
        """Return an id that distinguishes this host from all others until the machine restarts: 16 hex digits."""
        status = self.directory.stat()
        return xxhash.xxh3_64_hexdigest(f"{boot_id()} {status.st_dev} {status.st_ino} {self.directory}".encode())

    @property
    def _processes(self) -> Path:
        return self.directory / "processes"

    def store_directory(self, uuid: str) -> Path:
        """Return the host's directory for one store. Created with mode 0700 if missing."""
        assert _NAME.fullmatch(uuid), uuid
        directory = self.directory / "stores" / uuid
        make_private(directory.parent)
        make_private(directory)
        return directory

    def owner(self) -> str:
        """Return the id of this process: 16 hex digits, never used before.

        The id is alive from the first call until the process ends. A forked child has another id than its parent.
        """
        own = self._own
        if own is None or not own.held:
            # This also excludes other threads. And no process takes a new file for dead before it is locked.
            with self.locked("processes"):
                own = self._own
                if own is None or not own.held:
                    self._bury_the_dead()
                    own = ExclusiveLock(self._lock_file(secrets.token_hex(8)))
                    taken = own.acquire()
                    assert taken, own
                    self._own = own
        return own.path.stem

    def is_alive(self, owner: str) -> bool:
        """Return whether the process with this id still runs. Once False, it stays False."""
        own = self._own
        if own is not None and own.held and own.path.stem == owner:
            return True
        if not _OWNER.fullmatch(owner):
            return False
        try:
            fd = os.open(self._lock_file(owner), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise refused(error, self._lock_file(owner), "cannot be opened") from error
        try:
            # A shared lock, so that two processes that check at the same time do not mistake each other for the owner.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def bury(self, owner: str) -> None:
        """Remove the lock file of a dead process. Does nothing if the process is alive."""
        if _OWNER.fullmatch(owner) and not self.is_alive(owner):
            # No lock is needed: a dead id stays dead, and an id is never used again.
            try:
                self._lock_file(owner).unlink(missing_ok=True)
            except OSError as error:
                raise refused(error, self._lock_file(owner), "cannot be removed") from error

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the host's lock of this name; wait for it. Excludes all other processes and threads. Not reentrant."""
        assert _NAME.fullmatch(name), name
        lock = ExclusiveLock(self.directory / f"{name}.lock")
        lock.acquire(blocking=True)
        try:
            yield
        finally:
            lock.release()

    def _lock_file(self, owner: str) -> Path:
        return self._processes / f"{owner}.lock"

    def _bury_the_dead(self) -> None:
        for entry in entries_of(self._processes):
            if entry.name.endswith(".lock"):
                self.bury(entry.name.removesuffix(".lock"))


def _is_at(fd: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


# A fork waits for this lock, so that the child sees every descriptor that a lock has opened. Reentrant, because garbage
# collection of a lock, or a signal handler, may run while its thread holds this.
_guard = threading.RLock()
_locks: weakref.WeakSet[ExclusiveLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    try:
        for lock in list(_locks):
            lock._close()  # close without unlocking: the parent keeps its lock
    finally:
        _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget_in_child)
