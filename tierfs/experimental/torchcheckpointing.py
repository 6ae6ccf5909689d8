"""A store as the storage of ``torch_checkpointing``: every path is a URL of a store.

That package writes a checkpoint into a directory of its own, and renames that when all ranks are done. It passes
`pathlib.Path`, which drops slashes of a URL; `full_url` restores them.

Experimental: it follows a package at version 0.1.1. It is promoted or removed by 2027-03-31.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_checkpointing.metadata_serialization import METADATA_FILE_NAME
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from tierfs.dcp.address import Address, full_url
from tierfs.dcp.torch_format.streams import ReadStream, SaveStream
from tierfs.errors import AlreadyExistsError, ConflictError, InvalidInputError, NotFoundError
from tierfs.store import (
    Store,
    Writer,
    delete,
    find,
    kind_of,
    list_directory,
    make_directory,
    open_entry,
    remove_directory,
    rename,
    save,
    stat,
)
from tierfs.threads import transfers


@dataclass
class TierStorageConfig(StorageConfig):  # type: ignore[misc]  # its classes may be unknown here
    """The configuration of `TierStorage`, in this process and in the one that saves.

    Attributes:
        options: As for `TierReader`: ``ack``, ``ram``, ``nvme``, ``state_dir``, ``timeout``, ``bandwidth``,
            ``codecs``, ``create``, and options for the object tier's filesystem by its protocol.
    """

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def create_storage(self) -> TierStorage:
        """Return a storage with these options."""
        return TierStorage(self.options)


class TierStorage(Storage):  # type: ignore[misc]  # see above
    """Keeps checkpoints in stores. Safe for use by many threads.

    Errors are tierfs's own, and subclasses of `OSError` where ``torch_checkpointing`` requires that. A path of the
    wrong kind raises `NotADirectoryError` or `IsADirectoryError`. A file appears when its stream is closed. A directory
    is renamed file by file, the metadata last.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def __repr__(self) -> str:
        return "TierStorage()"

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Open a file for reading at any offset.

        Args:
            path: The file.
            read_args: By default the whole file is read at once. ``direct_io`` and ``timeout_us`` are ignored: the
                store decides both.

        Raises:
            NotFoundError: The file does not exist.
            ConflictError: The file's length differs from ``known_size_bytes``.
            CorruptionError, StoreError: See `Reader.read_into`.
        """
        args = read_args or ReadArgs()
        store, relative = self._locate(path)
        reader = open_entry(store, stat(store, relative))
        if args.known_size_bytes is not None and args.known_size_bytes != reader.length:
            raise ConflictError(
                f"{store.where(relative)} has {reader.length} bytes, not {args.known_size_bytes}: it was replaced; "
                "load it again",
                path=relative,
            )
        stream = ReadStream(reader)
        return io.BytesIO(stream.readall()) if args.pre_read_full_file else stream  # type: ignore[return-value]

    def stream_write(self, path: Path) -> SaveStream:
        """Open a file for writing. It replaces the file at the path when it is closed.

        If an exception leaves its ``with``, nothing is published.
        """
        store, relative = self._locate(path, write=True)
        return SaveStream(Writer(store, relative))

    def write(self, path: Path, data: Any) -> None:
        """Write a whole file."""
        store, relative = self._locate(path, write=True)
        save(store, relative, data)

    def delete(self, path: Path) -> None:
        """Delete a file."""
        delete(*self._locate(path))

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Create a directory. If ``recursive``, its parents may be missing, and the directory may exist."""
        store, relative = self._locate(path, write=True)
        parent = relative.rpartition("/")[0]
        if not recursive and parent:
            stat(store, parent)
        make_directory(store, relative, exist_ok=recursive, parents=recursive)

    def rmdir(self, path: Path) -> None:
        """Remove a directory and everything in it, the metadata first: a directory without it is no checkpoint."""
        store, relative = self._locate(path)
        if not stat(store, relative).is_directory:
            raise NotADirectoryError(f"{store.where(relative)} is a file")
        files, directories = _below(store, relative)
        for group in (files[-1:], files[:-1]) if files and _is_metadata(files[-1]) else (files,):
            transfers().map(lambda name: delete(store, name), group)
        for name in (*directories, relative):
            _remove_directory(store, name)

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Rename a file, or a directory with everything in it.

        The target path must be free, except that a file may replace a file. A directory may replace an empty directory.

        Args:
            src_path: The path to rename.
            dst_path: The new path, in the same store.
            is_directory: Ignored: the store looks it up.
            background_cleanup: Ignored: no bytes are moved.

        Raises:
            NotFoundError: Nothing is at ``src_path``.
            AlreadyExistsError: Something at ``dst_path`` may not be replaced. Nothing was changed.
            InvalidInputError: The paths lie in different stores, or a directory would be moved into itself.
        """
        store, source = self._locate(src_path, write=True)
        other, target = self._locate(dst_path, write=True)
        if other is not store:
            raise InvalidInputError(f"{full_url(src_path)} and {full_url(dst_path)} lie in different stores")
        is_directory = stat(store, source).is_directory
        if is_directory and (not source or f"{target}/".startswith(f"{source}/")):
            raise InvalidInputError(
                f"{full_url(src_path)} is a directory: it cannot be moved into itself, {full_url(dst_path)}"
            )
        there = kind_of(store, target)
        is_free = there is None or (
            there == "directory" and is_directory and not list_directory(store, target, detail=False)
        )
        if not is_free and (is_directory or there == "directory"):
            raise AlreadyExistsError(
                f"{store.where(target)} is a {there}, so {store.where(source)} is not renamed to it: delete it first "
                "to replace it",
                path=target,
            )
        if not is_directory:
            rename(store, source, target)
            return
        files, directories = _below(store, source)
        make_directory(store, target, exist_ok=True)
        for name in reversed(directories):
            make_directory(store, target + name[len(source) :], exist_ok=True)
        for name in files:
            rename(store, name, target + name[len(source) :])
        for name in (*directories, source):
            _remove_directory(store, name)

    def ls(self, path: Path) -> list[str]:
        """Return the names of the entries of a directory. Raises `NotFoundError` if the directory does not exist."""
        store, relative = self._locate(path)
        if not stat(store, relative).is_directory:
            raise NotADirectoryError(f"{store.where(relative)} is a file")
        return [entry.path.rpartition("/")[2] for entry in list_directory(store, relative, detail=False)]

    def exists(self, path: Path) -> bool:
        """Return whether something is at a path."""
        return kind_of(*self._locate(path)) is not None

    def getsize(self, path: Path) -> int:
        """Return the length of a file in bytes. Raises `NotFoundError` if the file does not exist."""
        store, relative = self._locate(path)
        entry = stat(store, relative)
        if entry.is_directory:
            raise IsADirectoryError(f"{store.where(relative)} is a directory")
        return entry.length

    def isdir(self, path: Path) -> bool:
        """Return whether a path is a directory."""
        return kind_of(*self._locate(path)) == "directory"

    def remap_path(self, path: Path) -> str:
        """Return the full URL of a path."""
        return full_url(path)

    def _locate(self, path: Path, *, write: bool = False) -> tuple[Store, str]:
        return Address.of(path, self._options).open(write=write)


def _below(store: Store, directory: str) -> tuple[list[str], list[str]]:
    """Return the files below a directory, its metadata last, and the directories, each before its parent."""
    entries = find(store, directory, detail=False)
    files = sorted(
        (entry.path for entry in entries if not entry.is_directory), key=lambda name: (_is_metadata(name), name)
    )
    return files, sorted((entry.path for entry in entries if entry.is_directory), reverse=True)


def _is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == str(METADATA_FILE_NAME)


def _remove_directory(store: Store, path: str) -> None:
    """Remove a directory. One that existed only because of its entries is gone already."""
    try:
        remove_directory(store, path)
    except NotFoundError:
        return
