"""Object tier in this process's memory: the objects of fsspec's ``memory://``, with real conditions.

Objects that are put here appear in ``fsspec.filesystem("memory")``, and the other way round. One lock serves the whole
process, so conditions hold between threads. No object survives the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from tierfs.digest import Buffer
from tierfs.errors import AlreadyExistsError, NotFoundError
from tierfs.format.descriptor import KEPT_HERE, Capabilities
from tierfs.objects.backends.spans import taking
from tierfs.objects.checksums import verify_checksum
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

_lock = threading.RLock()
_written = 0


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - a forked child must not inherit a lock that a lost thread holds
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class MemoryObjects(ObjectTier):
    """Objects below ``root`` in fsspec's memory filesystem: an absolute path, like ``/bucket/run``."""

    streams = False

    def __init__(self, root: str) -> None:
        self.root = "/" + root.strip("/")
        self._base = "" if self.root == "/" else self.root

    def __repr__(self) -> str:
        return f"MemoryObjects({self.root!r})"

    @property
    def capabilities(self) -> Capabilities:
        return KEPT_HERE

    def places(self) -> tuple[str, ...]:
        return (f"memory:{self.root}",)

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        global _written  # noqa: PLW0603 - versions are unique in the process, as the objects are
        verify_checksum(checksum, data, key)
        content = b"".join(data)
        with _lock:
            if isinstance(mode, Create) and self._find(key) is not None:
                raise AlreadyExistsError(f"{key} exists", path=key)
            if isinstance(mode, Update):
                self._expect(key, mode.version)
            file = MemoryFile(fs=None, path=self._path(key), data=content)
            _written += 1
            file.tierfs_version = f"{_written:x}"
            file.tierfs_modified_ns = time.time_ns()
            MemoryFileSystem.store[self._path(key)] = file
            return _info(key, file)

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        with _lock:
            file = self._demand(key)
            info = _info(key, file)
            check_version(key, info.version, version)
            # Released at once: the file cannot grow while a view of it exists, and an error would keep the view.
            with file.getbuffer() as view:
                for offset, out in ranges:
                    end = offset + len(out)
                    check_end(key, len(view), end)
                    out[:] = view[offset:end]
            return info

    def stream(self, key: str, length: int, use: Use) -> None:
        content, info = self.read(key, sys.maxsize)  # shares the file's memory
        check_end(key, info.size, length)
        use(info, taking(memoryview(content)))

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        with _lock:
            file = self._demand(key)
            info = _info(key, file)
            check_limit(key, info.size, limit)
            return file.getvalue(), info

    def head(self, key: str) -> ObjectInfo:
        with _lock:
            return _info(key, self._demand(key))

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        start = f"{self._base}/{prefix}"
        found: list[Listed] = []
        folded: set[str] = set()
        with _lock:
            for path, file in list(MemoryFileSystem.store.items()):
                if not path.startswith(start):
                    continue
                rest = path[len(start) :]
                if delimiter and "/" in rest:
                    folded.add(prefix + rest[: rest.index("/") + 1])
                else:
                    found.append(_info(prefix + rest, file))
        found.extend(Prefix(key) for key in folded)
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        with _lock:
            for key in keys:
                MemoryFileSystem.store.pop(self._path(key), None)

    def delete_version(self, key: str, version: Version) -> None:
        with _lock:
            self._demand(key)
            self._expect(key, version)
            del MemoryFileSystem.store[self._path(key)]

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"

    def _find(self, key: str) -> MemoryFile | None:
        return MemoryFileSystem.store.get(self._path(key))

    def _demand(self, key: str) -> MemoryFile:
        file = self._find(key)
        if file is None:
            raise NotFoundError(f"{key} is not there", path=key)
        return file

    def _expect(self, key: str, version: Version) -> None:
        file = self._find(key)
        check_version(key, None if file is None else _info(key, file).version, version)


def _info(key: str, file: MemoryFile) -> ObjectInfo:
    modified_ns = getattr(file, "tierfs_modified_ns", None)
    if modified_ns is None:  # written through fsspec
        modified_ns = int(file.modified.timestamp() * 1e9)
    size = file.getbuffer().nbytes
    return ObjectInfo(key, size, Version(getattr(file, "tierfs_version", f"{modified_ns:x}-{size:x}")), modified_ns)
