"""Object tier in a directory of this host.

A put writes a temporary file, flushes it, and moves it into place: with ``link`` for a create, with ``rename`` under a
lock for an overwrite or update. Then it flushes the directories concerned. So after any crash the whole object is there
or none of it, and conditions hold between processes. Keys are file names. Temporary files and locks lie in
``.tierfs/tmp``.

A version consists of time, inode and size. If file times are whole seconds, an object gets a later time than the one it
replaces, so no two contents have the same version. On such a filesystem, an object that is deleted and created again
within a second may have its old version. Code that relies on versions never does that: tombstones replace records.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tierfs.buffers import block_buffers
from tierfs.clock import boot_id
from tierfs.digest import BLOCK_BYTES, Buffer
from tierfs.errors import AlreadyExistsError, ConflictError, CorruptionError, NotFoundError, ReadOnlyError, StoreError
from tierfs.format.descriptor import KEPT_HERE, Capabilities
from tierfs.objects.backends.spans import taking_from
from tierfs.objects.checksums import verify_checksum
from tierfs.objects.os_errors import translate_os_error, translated
from tierfs.objects.protocol import (
    OVERWRITE,
    Checksum,
    Create,
    Listed,
    ObjectInfo,
    ObjectTier,
    Prefix,
    PutMode,
    Range,
    Update,
    Use,
    Version,
    check_end,
    check_limit,
    check_version,
)

DIRECTORY = "directory:"
"""Prefix of a place that is a directory's device and inode number, which another directory may get later."""

_PRIVATE = ".tierfs"
_TEMPORARY = f"{_PRIVATE}/tmp"  # noqa: S108 - below the root, not the system's
_logger = logging.getLogger("tierfs.objects")
_LOCKS = 64
_IOV_MAX = 512
SECOND_NS = 1_000_000_000
STALE_TEMPORARY_S = 86400.0


class LocalObjects(ObjectTier):
    """Objects as files below ``root``, a directory that the first put creates if it is missing."""

    streams = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self._flushed: set[Path] = set()  # directories whose entry in their parent this process has flushed
        self._locks_hold = False

    def __repr__(self) -> str:
        return f"LocalObjects({str(self.root)!r})"

    @property
    def capabilities(self) -> Capabilities:
        return KEPT_HERE

    def places(self) -> tuple[str, ...]:
        """See `ObjectTier.places`. Device and inode number identify a directory that is mounted twice, or moved."""
        names = [f"file:{os.path.realpath(self.root)}"]
        with contextlib.suppress(OSError):  # the directory does not exist yet
            status = self.root.stat()
            # After a reboot the device number may belong to another device.
            names.append(f"{DIRECTORY}{boot_id()}:{status.st_dev}:{status.st_ino}")
        return tuple(names)

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        verify_checksum(checksum, data, key)
        try:
            with translated(self._name(key)):
                return self._put(key, data, mode)
        except NotFoundError as error:
            raise StoreError(
                f"{self._name(key)}: a file is in the place of a directory or the reverse, or the directory cannot be "
                "created",
                path=key,
            ) from error

    def _put(self, key: str, data: Sequence[Buffer], mode: PutMode) -> ObjectInfo:
        target = self._path(key)
        if isinstance(mode, Create) and target.exists():
            raise AlreadyExistsError(f"{key} exists", path=key)
        # Described before it gets its name: afterwards another writer's object may be there.
        temporary, info = self._write_temporary(key, data)
        try:
            self._make_directory(target.parent)
            if isinstance(mode, Create):
                os.link(temporary, target)
            else:
                with self._lock(key):
                    if isinstance(mode, Update):
                        self._expect(key, mode.version)
                    if not _stamp_ns(info) % SECOND_NS:
                        info = self._move_on(key, temporary, info)
                    os.rename(temporary, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        try:
            _flush_directory(target.parent)
        except OSError as error:
            # The object is visible, but a crash may lose it: the caller has to check it or put it again.
            raise StoreError(
                f"{self._name(key)}: stored, but not flushed to the disk: {error}", transient=True, path=key
            ) from error
        return info

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        with self._reading(key) as (file, info):
            check_version(key, info.version, version)
            for offset, out in ranges:
                _read_exactly(file.fileno(), offset, out, key)
        return info

    def stream(self, key: str, length: int, use: Use) -> None:
        with self._reading(key) as (file, info), block_buffers().lend(min(length, BLOCK_BYTES)) as memory:
            check_end(key, info.size, length)
            use(info, taking_from(file.readinto, length, memory, key))

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        name = self._name(key)
        with translated(name), open(name, "rb", buffering=0) as file:
            info = _info(key, os.fstat(file.fileno()))
            check_limit(key, info.size, limit)
            out = bytearray(info.size)
            _read_exactly(file.fileno(), 0, memoryview(out), key)
            return bytes(out), info

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[tuple[io.FileIO, ObjectInfo]]:
        with translated(self._name(key)), open(self._path(key), "rb", buffering=0) as file:
            info = _info(key, os.fstat(file.fileno()))
            yield file, info
            # tierfs never writes a file in place, but another program may.
            if _info(key, os.fstat(file.fileno())).version != info.version:
                raise ConflictError(f"{self._name(key)} was changed while it was being read", path=key)

    def head(self, key: str) -> ObjectInfo:
        with translated(self._name(key)):
            status = os.stat(self._path(key))
            if not stat.S_ISREG(status.st_mode):
                raise NotFoundError(f"{key} is not there", path=key)
            return _info(key, status)

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        if prefix == f"{_TEMPORARY}/":
            return
        try:
            with translated(self._name(prefix)):
                entries = list(os.scandir(self._path(prefix) if prefix else self.root))
        except NotFoundError:
            return
        for entry in entries:
            key = prefix + entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    if key == _TEMPORARY:
                        continue
                    if delimiter:
                        yield Prefix(f"{key}/")
                    else:
                        yield from self._list_below(key)
                elif (info := self._file(key, entry)) is not None:
                    yield info
            except (FileNotFoundError, NotFoundError):
                continue  # deleted after the directory was read

    def _file(self, key: str, entry: os.DirEntry[str]) -> ObjectInfo | None:
        """Return the object of a directory entry; None if it is not a file, or is a link that cannot be followed."""
        try:
            status = entry.stat()
        except OSError as caught:
            error = translate_os_error(caught, self._name(key))
            if not isinstance(error, ReadOnlyError | StoreError):
                raise error from caught
            if key.partition("/")[0] == _PRIVATE or getattr(error, "transient", False):
                raise error from caught
            _logger.warning("%s is skipped: %s", self._name(key), error)  # a link that another program made
            return None
        return _info(key, status) if stat.S_ISREG(status.st_mode) else None

    def _list_below(self, directory: str) -> Iterator[Listed]:
        try:
            yield from self.list(f"{directory}/")
        except ReadOnlyError:
            if directory.partition("/")[0] == _PRIVATE:
                raise
            # Not a directory of tierfs, for example lost+found at the root of a disk.
            _logger.warning("%s cannot be listed and is skipped: permission denied", self._name(directory))

    def delete(self, keys: Iterable[str]) -> None:
        """See `ObjectTier.delete`. Each directory is flushed once, after all its objects are deleted."""
        changed: dict[Path, str] = {}
        try:
            for key in keys:
                path = self._path(key)
                with contextlib.suppress(NotFoundError), translated(self._name(key)), self._lock(key):
                    os.unlink(path)
                    changed[path.parent] = key
        finally:
            for directory, key in changed.items():
                with contextlib.suppress(NotFoundError), translated(self._name(key)):
                    _flush_directory(directory)

    def delete_version(self, key: str, version: Version) -> None:
        with translated(self._name(key)):
            self.head(key)
            with self._lock(key):
                self._expect(key, version)
                path = self._path(key)
                os.unlink(path)
                _flush_directory(path.parent)

    def _path(self, key: str) -> Path:
        return self.root / key

    def _name(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _expect(self, key: str, version: Version) -> None:
        found = None
        with contextlib.suppress(NotFoundError):
            found = self.head(key).version
        check_version(key, found, version)

    def _make_directory(self, directory: Path) -> None:
        """Create a directory and its parents, and flush their entries."""
        existed = directory.is_dir()
        if existed and (directory == self.root or directory in self._flushed):
            return
        if not existed:
            self._make_directory(directory.parent)
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
        # Also if another process created it: that process may not have flushed it yet.
        _flush_directory(directory.parent)
        self._flushed.add(directory)

    def _write_temporary(self, key: str, data: Sequence[Buffer]) -> tuple[Path, ObjectInfo]:
        directory = self.root / _TEMPORARY
        self._make_directory(directory)
        self._sweep(directory)
        self._check_locks(directory)
        temporary = directory / f"put-{secrets.token_hex(16)}"
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            try:
                _write_all(descriptor, data)
                # This time tells versions apart, so set it with the clock's full resolution: the kernel's own
                # timestamps repeat within one tick.
                now_ns = time.time_ns()
                os.utime(descriptor, ns=(now_ns, now_ns))
                os.fsync(descriptor)
                info = _info(key, os.fstat(descriptor))
            finally:
                os.close(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary, info

    def _move_on(self, key: str, temporary: Path, info: ObjectInfo) -> ObjectInfo:
        """Give the file that is about to replace an object a later time than the object's, if it has none.

        A filesystem with times in whole seconds (ext3, ext4 with inodes of 128 bytes) may also reuse an inode number at
        once.
        """
        try:
            before_ns = _stamp_ns(self.head(key))
        except NotFoundError:
            return info
        if _stamp_ns(info) > before_ns:
            return info
        with open(temporary, "rb", buffering=0) as file:
            os.utime(file.fileno(), ns=(before_ns + SECOND_NS, before_ns + SECOND_NS))
            os.fsync(file.fileno())
            return _info(key, os.fstat(file.fileno()))

    def _sweep(self, directory: Path) -> None:
        """Delete temporary files that crashed puts left a day ago, in about one of a thousand puts."""
        if secrets.randbelow(1000):
            return
        oldest = time.time() - STALE_TEMPORARY_S
        for entry in os.scandir(directory):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.startswith("put-") and entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)

    def _check_locks(self, directory: Path) -> None:
        """Check before the first put, which makes a store, that the filesystem's locks exclude each other."""
        if self._locks_hold:
            return
        path = directory / "lock-probe"
        with open(path, "wb") as one, open(path, "wb") as other:
            problem = "two processes get the same lock"
            try:
                fcntl.flock(one, fcntl.LOCK_SH)  # shared: other processes may be checking too
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = ""
            except OSError as error:
                problem = str(error)
        if problem:
            raise StoreError(
                f"{self.root}: the filesystem has no working file locks (flock): {problem}. Mount it with locks (Lustre: "
                "flock), or put the store elsewhere",
                path=str(self.root),
            )
        self._locks_hold = True

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Exclude every other overwrite, update and delete of ``key``, in this and other processes."""
        directory = self.root / _TEMPORARY
        self._make_directory(directory)
        path = directory / f"lock-{zlib.crc32(os.fsencode(key)) % _LOCKS:02x}"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    version = Version(f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}")
    # ctime comes from the filesystem's clock. mtime was set by a writer: on a network filesystem, by its host's clock.
    is_ours = key.startswith(f"{_PRIVATE}/")
    return ObjectInfo(key, status.st_size, version, status.st_ctime_ns if is_ours else status.st_mtime_ns)


def _stamp_ns(info: ObjectInfo) -> int:
    """Return the time in an object's version."""
    return int(info.version.partition("-")[0], 16)


def _write_all(descriptor: int, data: Sequence[Buffer]) -> None:
    pieces = [memoryview(piece).cast("B") for piece in data if len(piece)]
    while pieces:
        written = os.writev(descriptor, pieces[:_IOV_MAX])
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]


def _read_exactly(descriptor: int, offset: int, out: memoryview, key: str) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(descriptor, [out[done:]], offset + done)
        if not count:
            end = offset + len(out)
            raise CorruptionError(f"{key} ends at byte {offset + done}, before byte {end}: cut short", path=key)
        done += count


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
