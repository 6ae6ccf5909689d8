"""The host as its processes share it: the state directory, who is alive, and locks between processes.

A host is a state directory. Each process that owns something has a lock file in it and holds its ``flock``: that is what
being alive means here, never a process id, which may be somebody else's by now. A lock belongs to an open file, which
a forked child shares; so a child closes its parent's at once, and is somebody else with an id of its own.
"""

from __future__ import annotations

import contextlib
import errno
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
from tierfs.host.filesystems import filesystem_of, is_network
from tierfs.host.private import entries_of, make_private, refused
from tierfs.host.segment_folder import FALLBACK, SegmentFolder

__all__ = ["SMALL_SHM", "ExclusiveLock", "Host", "state_directory"]

SMALL_SHM = (
    "Shared memory is too small; segments are kept in the state directory instead. Staging will be slower. Give the "
    "container a larger /dev/shm."
)
_OWNER = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"[0-9a-zA-Z_-]{1,64}")
_logger = logging.getLogger("tierfs.local")


def state_directory(given: str | None = None) -> Path:
    """Where this host keeps what it knows.

    Args:
        given: Its path, where ``~`` is the user's home; ``TIERFS_STATE_DIR`` by default, else ``tierfs`` in the user's state
            directory.

    Raises:
        InvalidInputError: It is a relative path: programs started in two directories would be two hosts, and neither would
            see what the other has pending.
    """
    given = given or os.environ.get("TIERFS_STATE_DIR")
    if not given:
        users = os.path.expanduser(os.environ.get("XDG_STATE_HOME", ""))
        # Its specification says to ignore a relative one.
        given = os.path.join(users if os.path.isabs(users) else "~/.local/state", "tierfs")
    directory = Path(os.path.expanduser(given))
    if not directory.is_absolute():
        raise InvalidInputError(
            f"{given}: a state directory is named from the root, or from ~, so that it is the same one wherever a program"
            " is started",
            path=given,
        )
    return directory


class ExclusiveLock:
    """A lock on a file, between processes and between threads: one holder, until it releases it or dies.

    A forked child does not hold what its parent holds, and does not keep it held. The file stays: removing it is never
    needed, and does no harm.

    Args:
        path: The file; made (mode 600) where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._held = False

    def __repr__(self) -> str:
        return f"ExclusiveLock({str(self.path)!r}, held={self._held})"

    def __del__(self) -> None:
        # At the end of the interpreter the guard may be gone already, and the operating system releases it by itself.
        if self._fd is not None and _guard is not None:
            self.release()

    @property
    def held(self) -> bool:
        """Whether this process holds it through this object."""
        return self._held

    def acquire(self, *, blocking: bool = False) -> bool:
        """Take the lock, unless this object holds it. To be called by one thread at a time.

        Args:
            blocking: Wait for as long as somebody else holds it.

        Returns:
            Whether it was taken.
        """
        assert self._fd is None, f"{self.path} is locked through this object"
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
            # Somebody removed the file while we waited: what is there now is another one.

    def release(self) -> None:
        """Release it. Nothing happens where this process does not hold it."""
        with _guard:
            if self._fd is not None:
                # Closing is not enough: a child that is about to execute another program has the open file, too.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                self._close()

    def _open(self) -> int:
        # Noted before it is locked, so that no child that is forked meanwhile keeps a lock it does not know of.
        with _guard:
            try:
                self._fd = self._open_file()
            except FileNotFoundError as error:  # it would have been made
                raise StoreError(
                    f"{self.path} cannot be locked: the state directory was removed while it is in use, and what was pending "
                    "there is lost: start this program again",
                    path=str(self.path),
                ) from error
            except OSError as error:
                raise refused(error, self.path, "cannot be locked") from error
            _locks.add(self)
            return self._fd

    def _open_file(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
        # A disk that failed is made read-only by the kernel, and locks are not written.
        return os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)

    def _close(self) -> None:
        fd, self._fd, self._held = self._fd, None, False
        _locks.discard(self)
        if fd is not None:
            os.close(fd)


class Host:
    """The state that processes of one user on one host share. Safe for use by many threads.

    Args:
        directory: The state directory; made, for its owner alone, where it is missing.
        shm: Where segments of shared memory live: ``TIERFS_SHM_DIR`` where it is not given, else ``/dev/shm``.
        mountinfo: The mounts, as in proc(5); for tests.

    Attributes:
        directory: The state directory, absolute.
        segments: The host's folder of segments: in shared memory, or where that cannot be used, which is logged, `fallback`.
        fallback: The one in the state directory, for what does not fit into shared memory.

    Raises:
        ReadOnlyError: The directory, or the folder of segments that its processes use, belongs to somebody else or is open to others.
        InvalidInputError: It lies on a network filesystem, or ``TIERFS_SHM_DIR`` is not named from the root.
        CapacityError, StoreError: It cannot be made, or processes use it whose segments this one cannot see.
    """

    def __init__(self, directory: Path, shm: Path | None = None, *, mountinfo: str | None = None) -> None:
        filesystem = filesystem_of(directory, mountinfo=mountinfo)
        if is_network(filesystem):
            raise InvalidInputError(
                f"{directory} lies on a network filesystem ({filesystem}), where locks cannot be trusted: "
                "name a directory of this host with TIERFS_STATE_DIR",
                path=str(directory),
            )
        make_private(directory)
        self.directory = directory.resolve()
        make_private(self._processes)
        self._own: ExclusiveLock | None = None
        shm = shm or Path(os.environ.get("TIERFS_SHM_DIR") or "/dev/shm")  # noqa: S108 - a folder in it is checked
        if not shm.is_absolute():
            raise InvalidInputError(
                f"TIERFS_SHM_DIR={shm}: it is named from the root, so that it is the same one wherever a program is started",
                path=str(shm),
            )
        with self.locked("segments"):
            folder = SegmentFolder(self.directory, shm)
        # Held for as long as this object lives, and by forked children, who use the folder as well.
        weakref.finalize(self, folder.close).atexit = False
        self.segments = folder.path
        self.fallback = self.directory / FALLBACK
        if folder.why_not is not None:
            _logger.warning("%s (%s)", SMALL_SHM, folder.why_not)

    def __repr__(self) -> str:
        return f"Host({str(self.directory)!r}, segments={str(self.segments)!r})"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where segments are, in the order in which they are tried."""
        return (self.segments,) if self.segments == self.fallback else (self.segments, self.fallback)

    def name(self) -> str:
        """Tells this host, as long as it runs, from all others: 16 hex digits."""
        status = self.directory.stat()
        return xxhash.xxh3_64_hexdigest(f"{boot_id()} {status.st_dev} {status.st_ino} {self.directory}".encode())

    @property
    def _processes(self) -> Path:
        return self.directory / "processes"

    def store_directory(self, uuid: str) -> Path:
        """Where the host keeps what belongs to one store. Made, for its owner alone, where it is missing."""
        assert _NAME.fullmatch(uuid), uuid
        directory = self.directory / "stores" / uuid
        make_private(directory.parent)
        make_private(directory)
        return directory

    def owner(self) -> str:
        """The id of this process: 16 hex digits, never used before. It is alive from now on until the process ends.

        A forked child has another id than its parent.
        """
        own = self._own
        if own is None or not own.held:
            # Keeps other threads out, too. And nobody takes a file for dead that has been made but not locked yet.
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
        """Whether the process with this id still runs. Once it does not, it never will again."""
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
            # Shared, so that two who ask at the same time do not take each other for the owner.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def bury(self, owner: str) -> None:
        """Remove the lock file of a process that is dead. Nothing happens to one that is alive."""
        if _OWNER.fullmatch(owner) and not self.is_alive(owner):
            # Without its lock: the dead stay dead, and an id is never used again.
            self._lock_file(owner).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keep every other process and thread of the host out of what goes by this name; waits. Not reentrant."""
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


# Forks wait for it, so that a child sees every descriptor that a lock has opened. Reentrant, since a lock may be collected,
# or a signal handled, while its thread is in here.
_guard = threading.RLock()
_locks: weakref.WeakSet[ExclusiveLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    try:
        for lock in list(_locks):
            lock._close()  # not released: the lock is the parent's, and so stays with it
    finally:
        _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget_in_child)
