"""`TierFileSystem`: fsspec's face over stores.

The core is synchronous; every asynchronous method runs it on a bounded set of threads. A path handed to an instance is
the object tier's own (``bucket/run/x``, ``/data/run/x``), or ``NAME/run/x`` for named stores; every method takes a
full URL in its place. Which store a path lies in is found by walking up from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import io
import os
import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fsspec.asyn import AsyncFileSystem, get_loop, sync
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.compression import compr
from fsspec.core import get_compression
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.utils import isfilelike, stringify_path, tokenize

from tierfs import store as verbs
from tierfs.errors import InvalidInputError, NotFoundError, StoreNotFoundError, TierfsError
from tierfs.fs.files import CompressedFile, ReadFile, TextFile, WriteFile
from tierfs.fs.threads import run_in_thread
from tierfs.fs.transactions import TierTransaction
from tierfs.store import Entry, Location, Store, WriteMode, Writer
from tierfs.store.transfers import transfers
from tierfs.store.url import named_location, split_url, strip

__all__ = ["TierFileSystem"]

COPY_BYTES = 16 << 20
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_FSSPEC_OPTIONS = frozenset(
    {"use_listings_cache", "listings_expiry_time", "max_paths", "add_docs", "add_aliases", "protocol", "fs"}
)


class TierFileSystem(AsyncFileSystem, ChainedFileSystem):
    """A filesystem over stores: ``tierfs::s3://bucket/run``, ``tierfs::file:///data/run``, ``tierfs://NAME/run``.

    Args:
        target_protocol: fsspec's name of the object tier's filesystem; ``None`` for named stores.
        target_options: For that filesystem.
        fo: Set by fsspec from a chained URL; not used, since every path says where it is.
        create: Make a store where a write finds none; ``TIERFS_CREATE=1`` does the same.
        asynchronous: As in fsspec.
        loop: As in fsspec.
        batch_size: As in fsspec.
        **options: fsspec's own.

    Raises:
        InvalidInputError: An option is unknown, or the object tier's filesystem is.
    """

    protocol = "tierfs"
    root_marker = ""
    transaction_type = TierTransaction
    _pid: int
    # One instance serves every URL of an object tier, so that they share stores and caches.
    _strip_tokenize_options = ("fo",)

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fo: str = "",
        *,
        create: bool | str | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - _FSSPEC_OPTIONS)
        if unknown:
            raise InvalidInputError(
                f"unknown option {unknown[0]!r} for tierfs: it takes 'create', and what fsspec takes"
            )
        super().__init__(asynchronous=asynchronous, loop=loop, batch_size=batch_size, **options)
        self._create = _flag(create)
        self._target_protocol = target_protocol
        self._target_options = dict(target_options or {})
        if target_protocol is not None:
            strip(target_protocol, "")
        self._opened = _Opened()
        # fsspec calls this on instances; there, a bare path is one of the object tier's.
        self._strip_protocol = self._strip  # type: ignore[method-assign]

    @property
    def loop(self) -> Any:
        """The event loop; in a forked child a new one, so that an inherited instance goes on working."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._loop = get_loop()
        return self._loop

    # -- paths ---------------------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        _, stripped = split_url(stringify_path(path))
        return stripped.rstrip("/") or ("/" if stripped.startswith("/") else "")

    def _strip(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._strip(item) for item in path]
        text = stringify_path(path)
        protocol, stripped = split_url(text)
        if protocol is None and not text.startswith("tierfs://"):
            if self._target_protocol is None:
                return stripped.strip("/")
            return strip(self._target_protocol, stripped)
        if protocol != self._target_protocol and not self._same_filesystem(protocol):
            mine = f"tierfs::{self._target_protocol}://" if self._target_protocol else "tierfs://NAME"
            raise InvalidInputError(f"{text!r} is not on this filesystem, which is {mine}: use fsspec.url_to_fs for it")
        return stripped

    def _same_filesystem(self, protocol: str | None) -> bool:
        local = ("file", "local")
        return protocol in local and self._target_protocol in local

    def unstrip_protocol(self, name: str) -> str:
        """The full URL of a path."""
        stripped = self._strip(name)
        if self._target_protocol is None:
            return f"tierfs://{stripped}"
        return f"tierfs::{self._target_protocol}://{stripped}"

    def _locate(self, path: str, *, write: bool = False) -> tuple[Store, str]:
        """The store that a path lies in, and the path relative to it."""
        stripped = self._strip(path)
        if not stripped and not write:
            raise StoreNotFoundError(f"{self.unstrip_protocol('')} is above every store: name a path in one")
        if self._target_protocol is None:
            location = named_location(stripped)
        else:
            location = Location(self._target_protocol, stripped, self._target_options)
        return verbs.open_store(location, create=write and self._may_create(location))

    def _may_create(self, location: Location) -> bool:
        if self._create is not None:
            return self._create
        # Looked up each time, because fsspec hands the same instance out again after the environment has changed.
        wish = os.environ.get("TIERFS_CREATE")
        return wish.lower() in _TRUE if wish else location.create

    def _name(self, path: str, relative: str, found: str) -> str:
        """The name to show for what was found at ``found`` in the store, when ``path`` is ``relative`` in it."""
        stripped = self._strip(path)
        below = found[len(relative) :].strip("/")
        return f"{stripped.rstrip('/')}/{below}" if below else str(stripped)

    # -- looking -------------------------------------------------------------------------------------------------

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return await run_in_thread(self._info_now, path)

    def _info_now(self, path: str) -> dict[str, Any]:
        store, relative = self._locate(path)
        return _describe(self._strip(path), verbs.stat(store, relative))

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return await run_in_thread(self._ls_now, path, detail=detail)

    def _ls_now(self, path: str, *, detail: bool) -> list[Any]:
        store, relative = self._locate(path)
        entries = verbs.list_directory(store, relative, detail=detail)
        names = [self._name(path, relative, entry.path) for entry in entries]
        return [_describe(*pair) for pair in zip(names, entries, strict=True)] if detail else names

    async def _find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        found = await run_in_thread(self._find_now, path, maxdepth, withdirs=withdirs, detail=detail)
        return found if detail else sorted(found)

    def _find_now(self, path: str, maxdepth: int | None, *, withdirs: bool, detail: bool) -> dict[str, dict[str, Any]]:
        try:
            store, relative = self._locate(path)
            if maxdepth == 1:
                entries = verbs.list_directory(store, relative, detail=detail)
            else:
                entries = verbs.find(store, relative, detail=detail)
        except NotFoundError:
            return {}
        depth = relative.count("/") + 1 if relative else 0
        found = {}
        if withdirs and self._strip(path) and not (len(entries) == 1 and entries[0].path == relative):
            with contextlib.suppress(NotFoundError):
                found[self._strip(path)] = self._info_now(path)
        for entry in entries:
            if entry.is_directory and not withdirs:
                continue
            if maxdepth is not None and entry.path.count("/") + 1 - depth > maxdepth:
                continue
            name = self._name(path, relative, entry.path)
            found[name] = _describe(name, entry) if detail else {}
        return dict(sorted(found.items()))

    async def _walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = "omit", **kwargs: Any
    ) -> AsyncIterator[tuple[str, Any, Any]]:
        """As in fsspec, but ``on_error="omit"`` passes over what is not there, never over damage or a failing tier."""
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        detail = kwargs.pop("detail", False)
        path = self._strip(path)
        try:
            listing = await self._ls(path, detail=True)
        except NotFoundError as error:
            if on_error == "raise":
                raise
            if callable(on_error):
                on_error(error)
            yield (path, {}, {}) if detail else (path, [], [])
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

    async def _isfile(self, path: str) -> bool:
        try:
            return bool((await self._info(path))["type"] == "file")
        except NotFoundError:
            return False

    async def _isdir(self, path: str) -> bool:
        try:
            return bool((await self._info(path))["type"] == "directory")
        except NotFoundError:
            return False

    async def _du(self, path: str, total: bool = True, maxdepth: int | None = None, **kwargs: Any) -> Any:
        found = await self._find(path, maxdepth=maxdepth, detail=True, **kwargs)
        sizes = {name: info["size"] for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    def created(self, path: str) -> datetime.datetime:
        """When the file first appeared, in UTC."""
        return self._time(path, "created")

    def modified(self, path: str) -> datetime.datetime:
        """When its content was written, in UTC."""
        return self._time(path, "mtime")

    def _time(self, path: str, which: str) -> datetime.datetime:
        info = self._info_now(path)
        if which not in info:
            raise IsADirectoryError(
                f"{path} is a directory that is there only because of what lies in it: it has no times"
            )
        return datetime.datetime.fromtimestamp(info[which], tz=datetime.timezone.utc)

    def ukey(self, path: str) -> str:
        """The content digest: the same for the same content cut in the same places, wherever it lies."""
        info = self._info_now(path)
        return str(info.get("digest") or info.get("version") or tokenize(info["name"], info["type"]))

    def checksum(self, path: str) -> int:
        """The content digest as a number."""
        return int.from_bytes(self.ukey(path).encode(), "big")

    # -- reading -------------------------------------------------------------------------------------------------

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return await run_in_thread(self._cat_now, path, start, end)

    def _cat_now(self, path: str, start: int | None, end: int | None) -> bytes:
        store, relative = self._locate(path)
        reader = verbs.open_entry(store, verbs.stat(store, relative))
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
        # Each file is looked up once, however many of its ranges are wanted; different files are read at once.
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
            store, relative = self._locate(path)
            reader = verbs.open_entry(store, verbs.stat(store, relative))
        except (TierfsError, OSError) as error:
            return [error] * len(ranges)

        def read(wanted: tuple[int | None, int | None]) -> bytes | Exception:
            begin, stop, _ = slice(*wanted).indices(reader.length)
            out = bytearray(max(0, stop - begin))
            try:
                reader.read_into(begin, memoryview(out))
            except (TierfsError, OSError) as error:
                return error
            return bytes(out)

        return [read(wanted) for wanted in ranges]

    async def _get_file(self, rpath: str, lpath: Any, callback: Any = DEFAULT_CALLBACK, **kwargs: Any) -> None:
        await run_in_thread(self._get_now, rpath, lpath, callback)

    def _get_now(self, rpath: str, lpath: Any, callback: Any) -> None:
        store, relative = self._locate(rpath)
        entry = verbs.stat(store, relative)
        if isfilelike(lpath):
            self._download(verbs.open_entry(store, entry), lpath, callback)
            return
        target = os.fspath(lpath)
        if entry.is_directory:
            os.makedirs(target, exist_ok=True)
            return
        reader = verbs.open_entry(store, entry)
        directory = os.path.dirname(os.path.abspath(target))
        os.makedirs(directory, exist_ok=True)
        # Beside the target, then renamed: a download that breaks off leaves no half file under the real name. Opened as
        # any new file, so that the kernel applies the umask, which no thread can read without changing it for all.
        temporary = os.path.join(directory, f".tierfs-get-{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                self._download(reader, file, callback)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def _download(self, reader: Any, file: Any, callback: Any) -> None:
        callback.set_size(reader.length)
        buffer = transfers().take_buffer()
        try:
            for offset in range(0, reader.length, COPY_BYTES):
                piece = memoryview(buffer)[: min(COPY_BYTES, reader.length - offset)]
                reader.read_into(offset, piece)
                file.write(piece)
                callback.relative_update(len(piece))
            if hasattr(file, "flush"):
                file.flush()
        finally:
            transfers().give_buffer(buffer)

    # -- writing -------------------------------------------------------------------------------------------------

    async def _pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        await run_in_thread(self._write_now, path, [value], mode)

    async def _put_file(
        self, lpath: str, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        await run_in_thread(self._put_now, lpath, rpath, callback, mode)

    def _put_now(self, lpath: str, rpath: str, callback: Any, mode: str) -> None:
        if os.path.isdir(lpath):
            store, relative = self._locate(rpath, write=True)
            verbs.make_directory(store, relative, exist_ok=True)
            return
        with open(lpath, "rb", buffering=0) as file:
            callback.set_size(os.fstat(file.fileno()).st_size)
            self._write_now(rpath, _pieces(file, callback), mode)

    def _write_now(self, path: str, pieces: Iterable[Any], mode: str) -> None:
        if mode not in ("overwrite", "create"):
            raise InvalidInputError(f"mode is 'overwrite' or 'create', not {mode!r}")
        handle = self.open(path, "xb" if mode == "create" else "wb")
        with handle:
            for piece in pieces:
                handle.write(piece)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file, or empty what is there; without ``truncate``, only mark it as modified now."""
        with self.open(path, "wb" if truncate else "ab"):
            pass

    async def _mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        await run_in_thread(self._mkdir_now, path, create_parents=create_parents, exist_ok=False)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        await run_in_thread(self._mkdir_now, path, create_parents=True, exist_ok=exist_ok)

    def _mkdir_now(self, path: str, *, create_parents: bool, exist_ok: bool) -> None:
        store, relative = self._locate(path, write=True)
        parent = relative.rpartition("/")[0]
        if not create_parents and parent:
            verbs.stat(store, parent)
        verbs.make_directory(store, relative, exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        """Remove a directory, which must be empty."""
        verbs.remove_directory(*self._locate(path))

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        await run_in_thread(lambda: verbs.delete(*self._locate(path)))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Delete files, and with ``recursive`` directories.

        A path that this thread is failing to write keeps what it held before (see `WriteFile.absorb_removal`).
        """
        if isinstance(path, (str, os.PathLike)):
            stripped = self._strip(path)
            if any(handle.path == stripped and handle.absorb_removal() for handle in list(self._opened.handles)):
                return
        sync(self.loop, self._rm, path, recursive=recursive, maxdepth=maxdepth, **kwargs)

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,
        batch_size: int | None = None,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        paths = await self._expand_path(path, recursive=recursive, maxdepth=maxdepth)
        await run_in_thread(self._rm_now, paths, recursive=recursive)

    def _rm_now(self, paths: list[str], *, recursive: bool) -> None:
        directories = []

        def remove(path: str) -> None:
            store, relative = self._locate(path)
            try:
                if relative:
                    verbs.delete(store, relative)
            except NotFoundError:
                # No file. A directory that is only implied goes with the last file below it, perhaps just now.
                if recursive:
                    directories.append(path)
                elif verbs.stat(store, relative).is_directory:
                    raise IsADirectoryError(f"{path} is a directory: delete it with recursive=True") from None
                else:
                    raise

        transfers().map(remove, paths)
        for path in sorted(directories, key=len, reverse=True):
            store, relative = self._locate(path)
            with contextlib.suppress(NotFoundError):
                verbs.remove_directory(store, relative)

    async def _cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        await run_in_thread(self._cp_now, path1, path2)

    def _cp_now(self, path1: str, path2: str) -> None:
        source, source_path = self._locate(path1)
        target, target_path = self._locate(path2, write=True)
        entry = verbs.stat(source, source_path)
        if entry.is_directory:
            verbs.make_directory(target, target_path, exist_ok=True)
        elif source is target:
            verbs.copy(source, source_path, target_path)
        else:
            reader = verbs.open_entry(source, entry)
            writer = Writer(target, target_path)
            with WriteFile(self, path2, writer, "wb") as file:
                self._download(reader, file, DEFAULT_CALLBACK)

    async def _mv_file(self, path1: str, path2: str) -> None:
        await run_in_thread(self._mv_now, path1, path2)

    def _mv_now(self, path1: str, path2: str) -> None:
        source, source_path = self._locate(path1)
        target, target_path = self._locate(path2, write=True)
        if source is target:
            verbs.rename(source, source_path, target_path)
        else:
            self._cp_now(path1, path2)
            verbs.delete(source, source_path)

    def mv(self, path1: Any, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Move files: each one's manifest is written at its target, then a tombstone at its source; no data moves.

        A directory is moved with all below it, file by file. If ``path2`` is a directory, or ends with ``/``, what is
        moved goes into it under its own name; so does each of several, for a list or a pattern.
        """
        path1 = stringify_path(path1)
        if isinstance(path1, list) and isinstance(path2, list):
            for pair in zip(path1, path2, strict=True):
                self.mv(*pair)
            return
        into = str(path2).endswith("/") or self.isdir(path2)
        sources = [path1] if isinstance(path1, str) and self.lexists(path1) else self.expand_path(path1)
        if len(sources) > 1 and not into:
            raise InvalidInputError(f"{path2!r} is no directory, so {len(sources)} files cannot be moved there")
        for source in map(self._strip, sources):
            target = self._strip(path2)
            if into:
                target = f"{target.rstrip('/')}/{source.rpartition('/')[2]}"
            if source == target:
                continue
            if not self.isdir(source):
                self._mv_now(source, target)
                continue
            if f"{target}/".startswith(f"{source}/"):
                raise InvalidInputError(f"{source!r} cannot be moved into itself")
            self._mkdir_now(target, create_parents=True, exist_ok=True)
            for name, info in self.find(source, withdirs=True, detail=True).items():
                if name == source:
                    continue
                if info["type"] == "directory":
                    self._mkdir_now(target + name[len(source) :], create_parents=True, exist_ok=True)
                else:
                    self._mv_now(name, target + name[len(source) :])
            self._remove_if_empty(source)

    def _remove_if_empty(self, path: str) -> None:
        """Remove a directory and those below it, but for those in which something was written in the meantime."""
        below = [
            name
            for name, info in self._find_now(path, None, withdirs=True, detail=True).items()
            if info["type"] == "directory"
        ]
        for name in sorted({path, *below}, key=len, reverse=True):
            store, relative = self._locate(name)
            with contextlib.suppress(NotFoundError):
                if not verbs.list_directory(store, relative, detail=False):
                    verbs.remove_directory(store, relative)

    # -- handles -------------------------------------------------------------------------------------------------

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open a file. Modes: ``rb``, ``wb``, ``xb``, ``ab``, and the same in text.

        Args:
            path: Where.
            mode: As for the builtin ``open``.
            block_size: Not used; accepted as other filesystems do.
            cache_options: Not used; accepted as other filesystems do.
            compression: Name of an fsspec compression, or ``"infer"``.
            **kwargs: ``encoding``, ``errors``, ``newline`` in text mode; ``metadata``, JSON values to keep with a
                file that is written.

        Raises:
            NotFoundError: Reading, and nothing is there.
            AlreadyExistsError: ``xb``, and something is there.
            InvalidInputError: The mode or an option is not supported, or the path is no good.
        """
        if "b" not in mode:
            text = {name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if name in kwargs}
            io.TextIOWrapper(io.BytesIO(), **text).close()  # refuses bad arguments before anything is opened
            binary = mode.replace("t", "") + "b"
            return TextFile(self.open(path, binary, compression=compression, **kwargs), **text)
        if compression is not None and (name := get_compression(self._strip(path), compression)) is not None:
            inner = self.open(path, mode, **kwargs)
            return CompressedFile(compr[name](inner, mode=mode[0]), inner)
        return super().open(path, mode, **kwargs)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> ReadFile | WriteFile:
        if kwargs:
            raise InvalidInputError(f"open takes no {sorted(kwargs)[0]!r}")
        if mode == "rb":
            store, relative = self._locate(path)
            entry = verbs.stat(store, relative)
            if entry.is_directory:
                raise IsADirectoryError(f"{path} is a directory")
            return ReadFile(self, path, verbs.open_entry(store, entry), _describe(path, entry))
        try:
            write_mode = WriteMode(mode)
        except ValueError:
            raise InvalidInputError(
                f"mode {mode!r} is not supported: files are written whole (wb, xb) or at their end (ab)"
            ) from None
        if not autocommit:
            self.transaction.check(path, mode)
        store, relative = self._locate(path, write=True)
        if not relative:
            raise IsADirectoryError(f"{path} is the root of a store")
        writer = Writer(store, relative, mode=write_mode, metadata=metadata)
        handle = WriteFile(self, path, writer, mode, autocommit=autocommit)
        self._opened.handles.add(handle)
        return handle


class _Opened(threading.local):
    """What each thread opened for writing and still refers to."""

    def __init__(self) -> None:
        self.handles: weakref.WeakSet[WriteFile] = weakref.WeakSet()


def _describe(name: str, entry: Entry) -> dict[str, Any]:
    """fsspec's description of a file or directory."""
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
                info["metadata"] = dict(entry.manifest.metadata)
    elif entry.foreign is not None:
        seconds = entry.foreign.modified_ns / 1e9
        info |= {"created": seconds, "mtime": seconds, "version": entry.foreign.version, "foreign": True}
    return info


def _flag(value: bool | str | None) -> bool | None:
    """An option that may come from a URL's configuration as text; ``None`` if it was not given."""
    if value is None or str(value).lower() in _TRUE:
        return None if value is None else True
    if str(value).lower() in _FALSE:
        return False
    raise InvalidInputError(f"'create' is true or false, not {value!r}")


def _pieces(file: Any, callback: Any) -> Iterable[memoryview]:
    buffer = transfers().take_buffer()
    try:
        while count := file.readinto(buffer):
            yield memoryview(buffer)[:count]
            callback.relative_update(count)
    finally:
        transfers().give_buffer(buffer)
