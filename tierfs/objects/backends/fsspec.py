"""Object tier on any fsspec filesystem that has no backend of its own here.

fsspec has no conditional writes, so a store here has a single writer. Conditions are checked before the write, under a
lock of this process, which other processes do not see. The tier looks a written object up after the write. A read looks
the version up once, before it starts, so it may miss a change during the read.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import fsspec
import fsspec.asyn

from tierfs.buffers import buffers
from tierfs.clock import Clock, SystemClock
from tierfs.digest import Buffer
from tierfs.errors import AlreadyExistsError, CorruptionError, InvalidInputError, NotFoundError, StoreError, TierfsError
from tierfs.format.descriptor import Capabilities
from tierfs.objects.backends.shared_session import plain
from tierfs.objects.backends.spans import spans_of, taking
from tierfs.objects.checksums import verify_checksum
from tierfs.objects.http_errors import cause_of, refused_options, translate_client_error, translated_client
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
    locked,
)

# Filesystems that are a flat set of keys: they need no directories, a put is atomic, and `find` is one listing. On all
# others `find` skips directories that it could not read, and `ls` does not.
_FLAT = frozenset({"abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a", "tos"})
_ON_THIS_HOST = frozenset({"file", "local", "memory"})
# Filesystems, besides the flat and the asynchronous ones, whose clients are thread-safe. For the others fsspec expects
# an instance per thread: over SFTP, paramiko drops the answer that another thread waits for.
_THREADED = frozenset({"dav", "file", "hdfs", "hf", "local", "webdav"})

_AT = ("host", "port", "endpoint_url", "base_url", "account_name")  # options that say where a filesystem is

_DIRECTORIES_REMEMBERED = 4096
_NEW_TIME_WITHIN_S = 3.0  # the coarsest file times in use, FAT's, have a resolution of two seconds

# By filesystem, since fsspec returns the same instance to all callers in one thread.
_turns: weakref.WeakKeyDictionary[fsspec.AbstractFileSystem, threading.RLock] = weakref.WeakKeyDictionary()


class FsspecObjects(ObjectTier):
    """Objects as files of an fsspec filesystem. Single-writer.

    ``list_after_write`` is promised, because every object store and network filesystem in use today keeps it. The
    filesystem's cached listings are dropped before each look-up.

    A version may consist of time and size: the tier makes such versions, and many WebDAV servers make such ETags.
    If a put would get the version of the object that it replaces, the tier writes again until the version differs.

    If the client is not known to be thread-safe, requests wait for each other. After a lost connection the next request
    opens a new one.

    Args:
        fs: The filesystem, made without ``asynchronous=True``.
        root: Path there, with or without the protocol.

    Raises:
        InvalidInputError: The filesystem is asynchronous.
    """

    streams = False

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str, *, clock: Clock | None = None) -> None:
        if getattr(fs, "asynchronous", False):
            raise InvalidInputError(f"{type(fs).__name__} is asynchronous: make it without asynchronous=True")
        self.fs = fs
        self.root = str(fs._strip_protocol(root)).rstrip("/")
        self._below = f"{self.root.strip('/')}/".lstrip("/")
        self._clock: Clock = clock or SystemClock()
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._flat = bool(protocols & _FLAT)
        self._threaded = self._flat or fs.async_impl or bool(protocols & _THREADED)
        self._turn: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext() if self._threaded else _turns.setdefault(fs, threading.RLock())
        )
        self._lost = False
        self._directories_made: set[str] = set()
        self._capabilities = Capabilities(
            conditional_create=False,
            conditional_update=False,
            list_after_write=True,
            atomic_put=self._flat,
            host_local=bool(protocols & _ON_THIS_HOST),
        )

    def __repr__(self) -> str:
        return f"FsspecObjects({type(self.fs).__name__}, {self.places()[0]!r})"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def places(self) -> tuple[str, ...]:
        """See `ObjectTier.places`. The names include the server if the filesystem's options name it."""
        protocol = self.fs.protocol if isinstance(self.fs.protocol, str) else self.fs.protocol[0]
        at = [str(self.fs.storage_options[name]) for name in _AT if name in self.fs.storage_options]
        return (
            ":".join([protocol, *map(plain, at), self.root.rpartition("@")[2] if "://" in self.root else self.root]),
        )

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        verify_checksum(checksum, data, key)
        content = b"".join(data)  # clients accept only a single bytes object
        path = self._path(key)
        with locked(type(self.fs), [path]):
            before = None if self._flat and mode == OVERWRITE else self._look(key)
            if isinstance(mode, Create) and before is not None:
                raise AlreadyExistsError(f"{key} exists", path=key)
            if isinstance(mode, Update):
                self._expect(key, before, mode.version)
            if before is not None and before.stamp == "":
                raise _indistinguishable(key)
            try:
                self._write(path, content, key)
                return self._settle(path, content, key, before).info
            except NotFoundError as error:
                raise StoreError(f"{key}: the bucket or directory to write to does not exist", path=key) from error

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        info = self.head(key)
        check_version(key, info.version, version)
        spans = spans_of(ranges)
        for span in spans:
            check_end(key, info.size, span.end)
        if not spans:
            return info
        starts, ends = [span.start for span in spans], [span.end for span in spans]
        with self._asking(key):
            pieces = self.fs.cat_ranges([self._path(key)] * len(spans), starts, ends, on_error="return")
        piece = None
        try:
            for span, piece in zip(spans, pieces, strict=True):
                if isinstance(piece, BaseException):
                    # fsspec's frame holds the list of errors, and the error holds the frame: this cycle would keep lent
                    # buffers.
                    traceback.clear_frames(piece.__traceback__)
                    raise translate_client_error(piece, key) from cause_of(piece)
                if len(piece) != span.end - span.start:
                    raise self._mismatch(info, f"{len(piece)} bytes arrived for a range of {span.end - span.start}")
                span.take(span.start, piece)
            return info
        finally:
            del piece, pieces  # this frame would close the same cycle

    def stream(self, key: str, length: int, use: Use) -> None:
        """See `ObjectTier.stream`. Fetches all bytes before ``use`` runs, as most filesystems do."""
        with buffers().lend(length) as whole:
            info = self.get(key, [(0, whole)])
            use(info, taking(whole))

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        # Look the version up first: if the object changes in between, new content gets the old version, and an update
        # based on it is refused. In the other order, the update would overwrite content that its writer never saw.
        info = self.head(key)
        check_limit(key, info.size, limit)
        with self._asking(key):
            # Without a range: with one, an object that has grown would seem whole, and some clients verify only whole
            # reads.
            content = bytes(self.fs.cat_file(self._path(key)))
        if len(content) != info.size:
            raise self._mismatch(info, f"it has {info.size} bytes, but {len(content)} arrived")
        return content, info

    def head(self, key: str) -> ObjectInfo:
        found = self._look(key)
        if found is None:
            raise NotFoundError(f"{key} is not there", path=key)
        return found.info

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        waiting = [prefix]
        while waiting:
            at = waiting.pop()
            for key, fields in self._entries(at, flat=self._flat and not delimiter):
                if not is_directory(fields):
                    yield FileEntry.of(key, fields).info
                elif delimiter:
                    yield Prefix(f"{key}/")
                else:
                    waiting.append(f"{key}/")

    def delete(self, keys: Iterable[str]) -> None:
        """See `ObjectTier.delete`. Sends one request after another."""
        for key in dict.fromkeys(keys):
            path = self._path(key)
            with contextlib.suppress(NotFoundError), locked(type(self.fs), [path]), self._asking(key):
                self.fs.rm_file(path)

    def delete_version(self, key: str, version: Version) -> None:
        path = self._path(key)
        with locked(type(self.fs), [path]):
            found = self._look(key)
            if found is None:
                raise NotFoundError(f"{key} is not there", path=key)
            self._expect(key, found, version)
            with self._asking(key):
                self.fs.rm_file(path)

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    @contextlib.contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Send a request and translate its errors. If the previous request lost the connection, reconnect first."""
        with self._turn, translated_client(key):
            if self._lost:
                self.fs = type(self.fs)(*self.fs.storage_args, **self.fs.storage_options, skip_instance_cache=True)
                self._lost = False
            try:
                with translated_client(key):
                    yield
            except StoreError as error:
                self._lost = error.transient and not self._threaded
                raise

    def _look(self, key: str) -> FileEntry | None:
        try:
            with self._asking(key):
                self.fs.invalidate_cache()
                fields = self.fs.info(self._path(key))
        except NotFoundError:
            return None
        return None if is_directory(fields) else FileEntry.of(key, fields)

    def _expect(self, key: str, found: FileEntry | None, version: Version) -> None:
        check_version(key, None if found is None else found.info.version, version)

    def _write(self, path: str, content: bytes, key: str) -> None:
        if not self._flat:
            self._make_directory(path.rpartition("/")[0], key)
        try:
            with self._asking(key):
                self.fs.pipe_file(path, content)
        except NotFoundError:
            self._directories_made.clear()  # another process removed one
            raise

    def _make_directory(self, directory: str, key: str) -> None:
        if directory in self._directories_made:
            return
        with self._asking(key):
            self.fs.makedirs(directory, exist_ok=True)
        if len(self._directories_made) >= _DIRECTORIES_REMEMBERED:
            self._directories_made.clear()
        self._directories_made.add(directory)

    def _settle(self, path: str, content: bytes, key: str, before: FileEntry | None) -> FileEntry:
        """Check that the content is stored under a new version; write it again until it is."""
        deadline = self._clock.monotonic() + _NEW_TIME_WITHIN_S
        pause_s = 0.001
        while True:
            after = self._look(key)
            if after is None or after.info.size != len(content):
                found = "nothing" if after is None else f"{after.info.size} bytes"
                raise StoreError(
                    f"{key}: {len(content)} bytes were written, but {found} stored", transient=True, path=key
                )
            if before is None or after.info.version != before.info.version or (self._flat and after.stamp is None):
                return after
            if self._clock.monotonic() >= deadline:
                if after.stamp is None:
                    return after  # the tag depends on the content alone, and the content is the same
                raise _indistinguishable(key)
            self._clock.sleep(pause_s)
            pause_s *= 2
            self._write(path, content, key)

    def _mismatch(self, info: ObjectInfo, what: str) -> TierfsError:
        """Return the error for a read that got fewer or more bytes than requested."""
        if self.head(info.key).version != info.version:
            return StoreError(f"{info.key} changed while it was read: {what}", transient=True, path=info.key)
        return CorruptionError(f"{info.key}: {what}: cut short or extended", path=info.key)

    def _entries(self, prefix: str, *, flat: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield key and description of each entry directly below ``prefix``, or of each file below it if ``flat``."""
        directory = self._path(prefix).rstrip("/") or "/"
        try:
            with self._asking(prefix or self.root):
                self.fs.invalidate_cache()
                if flat:
                    entries = list(self.fs.find(directory, detail=True).values())
                else:
                    entries = self.fs.ls(directory, detail=True)
        except NotFoundError:
            return
        for fields in entries:
            path = str(fields["name"]).lstrip("/")
            if not is_directory(fields) and path.endswith("/"):
                continue  # some tools put a placeholder for a directory
            key = path.rstrip("/")[len(self._below) :]
            if path.startswith(self._below) and key.startswith(prefix) and key != prefix:
                yield key, fields


def _indistinguishable(key: str) -> StoreError:
    return StoreError(
        f"{key}: the filesystem cannot tell new content from old, so readers would miss the change: keep the store "
        "on another filesystem",
        path=key,
    )


def new_filesystem(protocol: str, options: Mapping[str, object]) -> fsspec.AbstractFileSystem:
    """Make an fsspec filesystem. Some connect at once.

    Raises:
        InvalidInputError: The protocol is unknown, a package that it needs is missing, or the filesystem refuses an
            option.
        StoreError, ReadOnlyError: The filesystem connects at once, and the connection failed.
    """
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise InvalidInputError(f"{protocol}:// needs a package that is missing: {error}") from error
    except ValueError as error:
        raise InvalidInputError(f"{protocol}:// is not a protocol known to fsspec") from error
    chosen = dict(options)
    if issubclass(kind, fsspec.asyn.AsyncFileSystem):
        # A cached listing hides objects of other writers, even from requests that ask for no listing. Kinds without
        # such a cache may refuse the option, as SFTP does.
        chosen["use_listings_cache"] = False
    try:
        return kind(**chosen)
    except (TypeError, ValueError) as error:
        raise refused_options(error, protocol) from cause_of(error)
    except Exception as error:  # noqa: BLE001 - raised again as an error of tierfs; SFTP and others connect at once
        raise translate_client_error(error, f"{protocol}://") from cause_of(error)


# In order of preference. Fields that ``info`` has and listings may lack, like S3's version id, come last: an object
# must have the same version in both.
_TAGS = ("generation", "ETag", "etag", "versionId", "VersionId", "checksum")
_TIMES = (
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "modify",
    "modificationTime",
    "last_write_time",
    "created",
)
_MILLISECONDS_FROM = 1e11  # in seconds this is the year 5138; WebHDFS counts milliseconds


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file.

    Attributes:
        info: The file as an object.
        stamp: The time in its version, empty if unknown; None if the filesystem has a tag for the version.
    """

    info: ObjectInfo
    stamp: str | None

    @classmethod
    def of(cls, key: str, fields: Mapping[str, Any]) -> FileEntry:
        """Make an entry from the filesystem's description of ``key``."""
        size = int(fields.get("size") or 0)
        stamp, modified_ns = _time(fields)
        for name in _TAGS:
            if fields.get(name):
                return cls(ObjectInfo(key, size, Version(str(fields[name]).strip('"')), modified_ns), None)
        version = Version(f"t{stamp}-{size:x}-{int(fields.get('ino') or 0):x}")
        return cls(ObjectInfo(key, size, version, modified_ns), stamp)


def is_directory(fields: Mapping[str, Any]) -> bool:
    """Return whether a filesystem describes a directory."""
    return fields.get("type") == "directory"


def _time(fields: Mapping[str, Any]) -> tuple[str, int]:
    """Return the time of the last change, as text for the version and in nanoseconds; empty and 0 if unknown."""
    for name in _TIMES:
        value = fields.get(name)
        if not value:
            continue
        seconds = _seconds(value)
        if seconds is None:
            return str(value), 0
        # Microseconds: listings describe a file with a float, other calls with a datetime.
        modified_ns = round(seconds * 1_000_000) * 1000
        return f"{modified_ns:x}", modified_ns
    return "", 0


def _seconds(value: object) -> float | None:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(value, int | float):
        return value / 1000 if value > _MILLISECONDS_FROM else value
    return None
