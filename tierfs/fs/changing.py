"""Make and remove directories; remove, copy and move files."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from fsspec.asyn import sync
from fsspec.utils import stringify_path

from tierfs import store as verbs
from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.fs.paths import run_in_thread
from tierfs.fs.reading import Reading
from tierfs.store import Store
from tierfs.threads import transfers


class Changing(Reading):
    """The part of `TierFileSystem` that changes the tree. Data moves only between different stores."""

    async def _mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        await run_in_thread(self._mkdir_now, path, create_parents=create_parents, exist_ok=False)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        await run_in_thread(self._mkdir_now, path, create_parents=True, exist_ok=exist_ok)

    def _mkdir_now(self, path: str, *, create_parents: bool, exist_ok: bool) -> None:
        store, relative = self._locate(path, write=True)
        parent = relative.rpartition("/")[0]
        if not create_parents and parent:
            verbs.stat(store, parent)
        verbs.make_directory(store, relative, exist_ok=exist_ok, parents=create_parents)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        store, relative = self._locate(path)
        if not verbs.stat(store, relative).is_directory:
            raise NotADirectoryError(f"{path} is a file")
        verbs.remove_directory(store, relative)

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        await run_in_thread(self._rm_file_now, path)

    def _rm_file_now(self, path: str) -> None:
        store, relative = self._locate(path)
        try:
            verbs.delete(store, relative)
        except NotFoundError:
            if verbs.is_directory(store, relative):
                raise IsADirectoryError(f"{path} is a directory: delete it with rm(..., recursive=True)") from None
            raise

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Delete files, and with ``recursive`` also directories.

        If this thread is handling a failed write to the path, the path keeps its earlier content. See
        `WriteFile.absorb_removal`.
        """
        if isinstance(path, (str, os.PathLike)):
            stripped = self._strip(path)
            if any(handle.path == stripped and handle.absorb_removal() for handle in list(self._written)):
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
        directories = {path.rpartition("/")[0] for path in paths}.intersection(paths) if recursive else set()

        def remove(path: str) -> None:
            store, relative = self._locate(path)
            try:
                if not relative:
                    raise NotFoundError(f"{path} is the root of a store", path=relative)
                verbs.delete(store, relative)
            except NotFoundError:
                # Not a file. A directory without a record disappears with the last file below it, perhaps just now.
                if recursive:
                    directories.add(path)
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
        await run_in_thread(self._transfer, path1, path2)

    async def _mv_file(self, path1: str, path2: str) -> None:
        await run_in_thread(self._transfer, path1, path2, move=True)

    def _transfer(self, path1: str, path2: str, *, move: bool = False) -> None:
        source, source_path = self._locate(path1)
        target, target_path = self._locate(path2, write=True)
        if not move and verbs.stat_to_read(source, source_path).is_directory:
            verbs.make_directory(target, target_path, exist_ok=True)
            return
        if (source, source_path) != (target, target_path):
            _refuse_directory(target, target_path, path2)
        if source is not target:
            verbs.transfer(source, source_path, target, target_path, move=move)
        else:
            (verbs.rename if move else verbs.copy)(source, source_path, target_path)

    def mv(self, path1: Any, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Move files. Within a store, no data moves.

        For each file, tierfs puts a manifest at the target, then a tombstone at the source. A directory is
        moved file by file. If ``path2`` is a directory, or ends with ``/``, the source moves into it and
        keeps its name. If ``path1`` is a list or a pattern of several files, each of them moves into
        ``path2`` in this way.
        """
        path1 = stringify_path(path1)
        if isinstance(path1, list) and isinstance(path2, list):
            for pair in zip(path1, path2, strict=True):
                self.mv(*pair)
            return
        sources = self.expand_path(path1)
        if isinstance(path1, str) and self._strip(path1) == self._strip(path2):
            self._info_now(path1)
            return
        into = str(path2).endswith("/") or self.isdir(path2)
        if len(sources) > 1 and not into:
            raise InvalidInputError(f"{path2!r} is not a directory, so {len(sources)} files cannot be moved there")
        for source in map(self._strip, sources):
            target = self._strip(path2)
            if into:
                target = f"{target.rstrip('/')}/{source.rpartition('/')[2]}"
            if source == target:
                continue
            if not self.isdir(source):
                self._transfer(source, target, move=True)
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
                    self._transfer(name, target + name[len(source) :], move=True)
            self._remove_if_empty(source)

    def _remove_if_empty(self, path: str) -> None:
        """Remove a directory and those below it, except directories that are not empty."""
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


def _refuse_directory(store: Store, relative: str, path: str) -> None:
    """Raise `IsADirectoryError` if a new file would get the name of a directory. In a bucket, it may."""
    if verbs.is_directory_nearby(store, relative) and verbs.kind_of(store, relative) == "directory":
        raise IsADirectoryError(f"{path} is a directory, and a file cannot replace it")
