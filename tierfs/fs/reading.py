"""Read whole files and ranges of files, into memory or onto a local disk."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.utils import isfilelike

from tierfs import store as verbs
from tierfs.buffers import buffers
from tierfs.errors import TierfsError
from tierfs.fs.looking import Looking
from tierfs.fs.threads import run_in_thread
from tierfs.localfile import replacing, write_all
from tierfs.store import Entry, Reader

COPY_BYTES = 16 << 20


class Reading(Looking):
    """The part of `TierFileSystem` that reads without a file handle."""

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
