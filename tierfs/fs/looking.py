"""Inspect files and directories: info, listings, walks, times and digests."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import os
from collections.abc import AsyncIterator, Iterator
from glob import has_magic
from typing import Any

from fsspec.asyn import sync
from fsspec.utils import tokenize

from tierfs import store as verbs
from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.fs.paths import PathSpace
from tierfs.fs.threads import run_in_thread
from tierfs.gc_pause import Uncollected
from tierfs.store import Entry


class Looking(PathSpace):
    """The part of `TierFileSystem` that describes files and directories."""

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

    def _kinds_now(self, path: str) -> list[dict[str, Any]]:
        """Return names and types of the entries of a directory, without reading any record."""
        return list(map(_kind, *self._listed(path, detail=False)))

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
            listing = await (self._ls(path, detail=True) if detail else run_in_thread(self._kinds_now, path))
        except NotFoundError as error:
            if on_error == "raise":
                raise
            self._note_absence(path, error)
            if callable(on_error):
                on_error(error)
            return
        base = path.rstrip("/")
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
