"""A store as the storage of ``torch_checkpointing``: every path that it is given is a URL of a store.

That package writes a checkpoint into a directory of its own, has it renamed when all ranks are done, and hands over
`pathlib.Path`, in which a URL loses slashes: `full_url` gives them back.
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
from tierfs.store.transfers import transfers

__all__ = ["TierStorage", "TierStorageConfig"]


@dataclass
class TierStorageConfig(StorageConfig):  # type: ignore[misc]  # its classes may be unknown here
    """The configuration of `TierStorage`, in this process and in the one that saves.

    Attributes:
        options: As for `TierReader`: ``ack``, ``ram``, ``nvme``, ``state_dir``, ``timeout``, ``bandwidth``, ``codecs``,
            ``create``, and options of the object tier's filesystem by its protocol.
    """

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def create_storage(self) -> TierStorage:
        """One with these options."""
        return TierStorage(self.options)


class TierStorage(Storage):  # type: ignore[misc]  # see above
    """Keeps checkpoints in stores. For use by many threads. Errors are tierfs' own, each an `OSError` where it has to be.

    A file is there when its stream is closed. A directory is renamed file by file, with the metadata last.

    Args:
        options: See `TierStorageConfig`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def __repr__(self) -> str:
        return "TierStorage()"

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """A file, to be read from any place on.

        Args:
            path: Which.
            read_args: By default the whole file is read at once. Its ``direct_io`` and ``timeout_us`` are the store's business.

        Raises:
            NotFoundError: There is none.
            ConflictError: It has another length than is known.
            CorruptionError, StoreError: See `Reader.read_into`.
        """
        args = read_args or ReadArgs()
        store, relative = self._locate(path)
        reader = open_entry(store, stat(store, relative))
        if args.known_size_bytes is not None and args.known_size_bytes != reader.length:
            raise ConflictError(
                f"{store.where(relative)} has {reader.length} bytes, and not {args.known_size_bytes}: it was replaced, load again",
                path=relative,
            )
        stream = ReadStream(reader)
        return io.BytesIO(stream.readall()) if args.pre_read_full_file else stream  # type: ignore[return-value]

    def stream_write(self, path: Path) -> SaveStream:
        """A file that takes the place of what is there when it is closed, and not at all if an exception leaves its ``with``."""
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
        """Make a directory; if ``recursive``, its parents may be missing, and it may be there."""
        store, relative = self._locate(path, write=True)
        parent = relative.rpartition("/")[0]
        if not recursive and parent:
            stat(store, parent)
        make_directory(store, relative, exist_ok=recursive)

    def rmdir(self, path: Path) -> None:
        """Remove a directory and all in it. A checkpoint's metadata goes first: what has none is not taken for one."""
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
        """Rename a file, or a directory with all in it, to a place that is free, or a file that is replaced.

        Args:
            src_path: The path to rename.
            dst_path: To where, in the same store.
            is_directory: Not used: it is looked up.
            background_cleanup: Not used: no bytes are moved.

        Raises:
            NotFoundError: There is nothing at ``src_path``.
            AlreadyExistsError: Something is at ``dst_path`` that may not be replaced. Nothing was changed.
            InvalidInputError: They lie in different stores, or a directory is to be moved into itself.
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
                f"{store.where(target)} is a {there}: {store.where(source)} is not renamed to it; delete it if it is to be replaced",
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
        """Names of what lies in a directory.

        Raises:
            NotFoundError: There is none.
        """
        store, relative = self._locate(path)
        if not stat(store, relative).is_directory:
            raise NotADirectoryError(f"{store.where(relative)} is a file")
        return [entry.path.rpartition("/")[2] for entry in list_directory(store, relative, detail=False)]

    def exists(self, path: Path) -> bool:
        """Whether there is something."""
        return kind_of(*self._locate(path)) is not None

    def getsize(self, path: Path) -> int:
        """The size of a file, in bytes.

        Raises:
            NotFoundError: There is none.
        """
        store, relative = self._locate(path)
        entry = stat(store, relative)
        if entry.is_directory:
            raise IsADirectoryError(f"{store.where(relative)} is a directory")
        return entry.length

    def isdir(self, path: Path) -> bool:
        """Whether it is a directory."""
        return kind_of(*self._locate(path)) == "directory"

    def remap_path(self, path: Path) -> str:
        """The URL."""
        return full_url(path)

    def _locate(self, path: Path, *, write: bool = False) -> tuple[Store, str]:
        return Address.of(path, self._options).open(write=write)


def _below(store: Store, directory: str) -> tuple[list[str], list[str]]:
    """Files below a directory, its metadata last; and directories, each before the one it lies in."""
    entries = find(store, directory, detail=False)
    files = sorted(
        (entry.path for entry in entries if not entry.is_directory), key=lambda name: (_is_metadata(name), name)
    )
    return files, sorted((entry.path for entry in entries if entry.is_directory), reverse=True)


def _is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == str(METADATA_FILE_NAME)


def _remove_directory(store: Store, path: str) -> None:
    """One that is only implied by what lies in it is gone with that."""
    try:
        remove_directory(store, path)
    except NotFoundError:
        return
