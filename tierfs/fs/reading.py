"""Inspect files and directories; read whole files and ranges, into memory or onto a local disk."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime as dt
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from glob import has_magic
from typing import Any

from fsspec.asyn import sync
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.utils import isfilelike, tokenize

from tierfs import store as verbs
from tierfs.buffers import buffers
from tierfs.errors import InvalidInputError, NotFoundError, TierfsError
from tierfs.fs.paths import PathSpace, run_in_thread
from tierfs.gc_pause import Uncollected
from tierfs.localfile import replacing, write_all
from tierfs.store import Entry, Reader

COPY_BYTES = 16 << 20


class Reading(PathSpace):
    """The part of `TierFileSystem` that describes files and directories, and reads files without a handle."""

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return await run_in_thread(self._info_now, path)

    def _info_now(self, path: str) -> dict[str, Any]:
        store, relative = self._locate(path)
        return describe(self._strip(path), verbs.stat_to_read(store, relative))

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return await run_in_thread(self._ls_now, path, detail=detail)

    def _ls_now(self, path: str, *, detail: bool) -> list[Any]:
        names, entries = self._listed(path, detail=detail)
        return list(map(describe, names, entries)) if detail else names

    def _listed(self, path: str, *, detail: bool) -> tuple[list[str], list[Entry]]:
        """Return the names of a directory's entries on this filesystem, and the entries.

        Without ``detail``, no record is read.
        """
        store, relative = self._locate(path)
        entries = verbs.list_directory(store, relative, detail=detail)
        return self._names(path, relative, (entry.path for entry in entries)), entries

    async def _find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        kinds_alone = bool(kwargs.get("kinds_alone")) or not detail
        found = await run_in_thread(self._find_now, path, maxdepth, withdirs=withdirs, detail=not kinds_alone)
        return found if detail else list(found)

    async def _glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """Expand a pattern as fsspec does, but read records only if the caller wants details.

        fsspec's method always asks `_find` for details, and uses only the type if the caller wants names.
        """
        detail = kwargs.get("detail", False)
        return await super()._glob(path, maxdepth, **kwargs, kinds_alone=not detail)

    async def _expand_path(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """Expand patterns as fsspec does, but take a pattern literally if it is the name of a file or directory.

        Otherwise ``rm("run[1]", recursive=True)`` would delete ``run1``.
        """
        paths = self._strip([path] if isinstance(path, str | os.PathLike) else list(path))
        literal = [name for name in paths if has_magic(name) and await self._is_name(name)]
        if not literal:
            return await super()._expand_path(paths, recursive, maxdepth, **kwargs)
        found = set(literal)
        if recursive:
            for name in literal:
                found |= set(await self._find(name, maxdepth=maxdepth, withdirs=True))
        if others := [name for name in paths if name not in literal]:
            with contextlib.suppress(FileNotFoundError):
                found |= set(await super()._expand_path(others, recursive, maxdepth, **kwargs))
        return sorted(found)

    async def _is_name(self, pattern: str) -> bool:
        try:
            return await self._exists(pattern)
        except InvalidInputError:  # a pattern may be longer than a name
            return False

    def _find_now(self, path: str, maxdepth: int | None, *, withdirs: bool, detail: bool) -> dict[str, dict[str, Any]]:
        """Return everything below a path, by name. Without ``detail``, return names and types alone."""
        try:
            store, relative = self._locate(path)
            if maxdepth == 1:
                entries = verbs.list_directory(store, relative, detail=detail)
            else:
                entries = verbs.find(store, relative, detail=detail)
        except NotFoundError as error:
            self._note_absence(path, error)
            return {}
        depth = relative.count("/") + 1 if relative else 0
        found: dict[str, dict[str, Any]] = {}
        if withdirs and self._strip(path) and not (len(entries) == 1 and entries[0].path == relative):
            with contextlib.suppress(NotFoundError):
                found[self._strip(path)] = self._info_now(path)
        with Uncollected():
            names = self._names(path, relative, (entry.path for entry in entries))
            for name, entry in zip(names, entries, strict=True):
                if entry.is_directory and not withdirs:
                    continue
                if maxdepth is not None and entry.path.count("/") + 1 - depth > maxdepth:
                    continue
                # A name may be both a file and a directory. Prefer the file, as `info` does.
                if not (entry.is_directory and name in found):
                    found[name] = describe(name, entry) if detail else _kind(name, entry)
        return dict(sorted(found.items()))

    async def _walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = "omit", **kwargs: Any
    ) -> AsyncIterator[tuple[str, Any, Any]]:
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        detail = kwargs.pop("detail", False)
        path = self._strip(path)
        try:
            names, entries = await run_in_thread(self._listed, path, detail=detail)
        except NotFoundError as error:
            if on_error == "raise":
                raise
            self._note_absence(path, error)
            if callable(on_error):
                on_error(error)
            return
        listing, base = list(map(describe if detail else _kind, names, entries)), path.rstrip("/")
        dirs: Any = {info["name"][len(base) + 1 :]: info for info in listing if info["type"] == "directory"}
        files: Any = {info["name"][len(base) + 1 :]: info for info in listing if info["type"] != "directory"}
        below = {name: info["name"] for name, info in dirs.items()}
        if not detail:
            dirs, files = list(dirs), list(files)
        if topdown:
            yield path, dirs, files
        if maxdepth is None or maxdepth > 1:
            depth = None if maxdepth is None else maxdepth - 1
            for name in list(dirs):
                async for item in self._walk(below[name], depth, topdown, on_error, detail=detail):
                    yield item
        if not topdown:
            yield path, dirs, files

    def walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = "omit", **kwargs: Any
    ) -> Iterator[tuple[str, Any, Any]]:
        """Walk a tree as fsspec does. ``on_error="omit"`` skips missing directories, never damage or a failing tier."""
        found = self._walk(path, maxdepth, topdown, on_error, **kwargs)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield sync(self.loop, found.__anext__)

    async def _exists(self, path: str, **kwargs: Any) -> bool:
        return await run_in_thread(self._kind_of, path) is not None

    async def _isfile(self, path: str) -> bool:
        return await run_in_thread(self._kind_of, path) == "file"

    async def _isdir(self, path: str) -> bool:
        return await run_in_thread(self._kind_of, path) == "directory"

    def _kind_of(self, path: str) -> str | None:
        try:
            store, relative = self._locate(path)
        except NotFoundError as error:
            self._note_absence(path, error)
            return None
        return verbs.kind_of(store, relative)

    async def _du(self, path: str, total: bool = True, maxdepth: int | None = None, **kwargs: Any) -> Any:
        found = await self._find(path, maxdepth=maxdepth, detail=True, **kwargs)
        sizes = {name: info["size"] for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    def created(self, path: str) -> dt.datetime:
        """Return when the file first appeared, in UTC."""
        return self._time(path, "created")

    def modified(self, path: str) -> dt.datetime:
        """Return when the content was written, in UTC."""
        return self._time(path, "mtime")

    def _time(self, path: str, which: str) -> dt.datetime:
        info = self._info_now(path)
        if which not in info:
            raise IsADirectoryError(
                f"{path} is a directory that exists only through the files in it, so it has no times"
            )
        return dt.datetime.fromtimestamp(info[which], tz=dt.timezone.utc)

    def ukey(self, path: str) -> str:
        """Return the content digest. It is the same for equal content that is cut into chunks at the same places."""
        info = self._info_now(path)
        return str(info.get("digest") or info.get("version") or tokenize(info["name"], info["type"]))

    def checksum(self, path: str) -> int:
        """Return the content digest as a number."""
        return int.from_bytes(self.ukey(path).encode(), "big")

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return await run_in_thread(self._cat_now, path, start, end)

    def _reader(self, path: str) -> tuple[Reader, Entry]:
        store, relative = self._locate(path)
        entry = verbs.stat_to_read(store, relative)
        if entry.is_directory:
            raise IsADirectoryError(f"{path} is a directory")
        return verbs.open_entry(store, entry), entry

    def _cat_now(self, path: str, start: int | None, end: int | None) -> bytes:
        reader, _ = self._reader(path)
        begin, stop, _ = slice(start, end).indices(reader.length)
        out = bytearray(max(0, stop - begin))
        reader.read_into(begin, memoryview(out))
        return bytes(out)

    async def _cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        batch_size: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        first = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
        last = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
        if len(first) != len(paths) or len(last) != len(paths):
            raise ValueError(f"{len(paths)} paths with {len(first)} starts and {len(last)} ends")
        # Each file is looked up once for all its ranges. Different files are read concurrently.
        places: dict[str, list[int]] = {}
        for index, path in enumerate(paths):
            places.setdefault(path, []).append(index)
        results: list[Any] = [None] * len(paths)

        async def read(path: str, indexes: list[int]) -> None:
            ranges = [(first[index], last[index]) for index in indexes]
            found = await run_in_thread(self._cat_ranges_now, path, ranges)
            for index, result in zip(indexes, found, strict=True):
                results[index] = result

        await asyncio.gather(*(read(path, indexes) for path, indexes in places.items()))
        if on_error != "return":
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return results

    def _cat_ranges_now(self, path: str, ranges: list[tuple[int | None, int | None]]) -> list[Any]:
        try:
            reader, _ = self._reader(path)
        except (TierfsError, OSError) as error:
            return [error] * len(ranges)

        def read(wanted: list[tuple[int, memoryview]]) -> Exception | None:
            try:
                reader.read_parts(wanted)
            except (TierfsError, OSError) as error:
                return error
            return None

        parts: deque[tuple[int, memoryview]] = deque()
        for wanted in ranges:
            begin, stop, _ = slice(*wanted).indices(reader.length)
            parts.append((begin, memoryview(bytearray(max(0, stop - begin)))))
        # Read all ranges at once. If that fails, read them one by one to find out which of them failed.
        errors = [read([part]) for part in parts] if read(list(parts)) is not None else [None] * len(parts)
        results: list[Any] = []
        for failure in errors:
            _, out = parts.popleft()  # releases each buffer in turn, because all of them may be large
            results.append(bytes(out) if failure is None else failure)
        return results

    async def _get_file(self, rpath: str, lpath: Any, callback: Any = DEFAULT_CALLBACK, **kwargs: Any) -> None:
        await run_in_thread(self._get_now, rpath, lpath, callback)

    def _get_now(self, rpath: str, lpath: Any, callback: Any) -> None:
        if isfilelike(lpath):
            self._download(self._reader(rpath)[0], lpath, callback)
            return
        store, relative = self._locate(rpath)
        entry = verbs.stat_to_read(store, relative)
        target = os.fspath(lpath)
        if entry.is_directory:
            os.makedirs(target, exist_ok=True)
            return
        reader = verbs.open_entry(store, entry)
        with replacing(target) as file:
            self._download(reader, file, callback)

    def _download(self, reader: Any, file: Any, callback: Any) -> None:
        callback.set_size(reader.length)
        with buffers().lend(COPY_BYTES) as buffer:
            for offset in range(0, reader.length, COPY_BYTES):
                piece = buffer[: min(COPY_BYTES, reader.length - offset)]
                reader.read_into(offset, piece)
                write_all(file, piece)
                callback.relative_update(len(piece))
            if hasattr(file, "flush"):
                file.flush()


def _kind(name: str, entry: Entry) -> dict[str, Any]:
    return {"name": name, "type": "directory" if entry.is_directory else "file"}


def describe(name: str, entry: Entry) -> dict[str, Any]:
    """Return the info of a file or directory in fsspec's form."""
    info: dict[str, Any] = {
        "name": name,
        "size": 0 if entry.is_directory else entry.length,
        "type": "directory" if entry.is_directory else "file",
    }
    if entry.manifest is not None:
        info |= {"created": entry.manifest.created_ns / 1e9, "mtime": entry.manifest.modified_ns / 1e9}
        if not entry.is_directory:
            info |= {"digest": entry.manifest.digest.hex(), "chunks": len(entry.manifest.rows)}
            if entry.manifest.metadata:
                info["metadata"] = copy.deepcopy(dict(entry.manifest.metadata))
    elif entry.foreign is not None:
        seconds = entry.foreign.modified_ns / 1e9
        info |= {"created": seconds, "mtime": seconds, "version": entry.foreign.version, "foreign": True}
    return info
