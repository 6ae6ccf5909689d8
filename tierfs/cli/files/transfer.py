"""Copy the bytes of one file from a source to a target, and find local files to copy."""

from __future__ import annotations

import io
import os
import select
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

from tierfs.buffers import buffers
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import InvalidInputError
from tierfs.format.manifest import Manifest
from tierfs.localfile import replacing, write_all
from tierfs.store import Entry, Reader, Store, Writer, copy, open_entry

# Four chunks, which the reader fetches in parallel.
WINDOW_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LocalSource:
    """The content of a local file. ``size`` is None for a pipe or device, as `known_size` returns it."""

    path: str
    size: int | None
    metadata: Mapping[str, object] | None = None

    def pieces(self) -> Iterator[memoryview]:
        with open(self.path, "rb", buffering=0) as file:
            yield from _read_file(file)


@dataclass(frozen=True, slots=True)
class StreamSource:
    """The content of a stream that is read to its end, like stdin."""

    stream: io.BufferedReader
    size: int | None = None
    metadata: Mapping[str, object] | None = None

    def pieces(self) -> Iterator[memoryview]:
        yield from _read_file(self.stream)


@dataclass(frozen=True, slots=True)
class StoredSource:
    """The content of a file in a store, at the version that a listing found."""

    store: Store
    entry: Entry

    @property
    def size(self) -> int:
        return self.entry.length

    @property
    def metadata(self) -> Mapping[str, object] | None:
        return self.entry.manifest.metadata if self.entry.manifest is not None else None

    def pieces(self) -> Iterator[memoryview]:
        reader = open_entry(self.store, self.entry)
        return read_pieces(reader, 0, reader.length)


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """A local file, replaced when its content is complete."""

    path: str

    def fill(self, pieces: Iterable[memoryview], metadata: Mapping[str, object] | None) -> None:
        with replacing(self.path) as file:
            for piece in pieces:
                file.write(piece)


@dataclass(frozen=True, slots=True)
class StreamTarget:
    """A stream to write to, like stdout. Written bytes stay, also if a later write fails."""

    stream: BinaryIO

    def fill(self, pieces: Iterable[memoryview], metadata: Mapping[str, object] | None) -> None:
        for piece in pieces:
            write_all(self.stream, piece)
        self.stream.flush()


@dataclass(frozen=True, slots=True)
class StoredTarget:
    """A file in a store, published when its content is complete."""

    store: Store
    path: str

    def fill(self, pieces: Iterable[memoryview], metadata: Mapping[str, object] | None) -> Manifest:
        writer = Writer(self.store, self.path, metadata=metadata)
        try:
            for piece in pieces:
                writer.write(piece)
        except BaseException:
            writer.abort()
            raise
        return writer.commit()


ContentSource: TypeAlias = LocalSource | StreamSource | StoredSource
"""The content of a file. ``pieces`` yields it in order; each piece is valid until the caller asks for the next one."""
ContentTarget: TypeAlias = LocalTarget | StreamTarget | StoredTarget
"""A destination for the content of a file. Unless ``fill`` returns, the previous content stays."""


def transfer(source: ContentSource, target: ContentTarget, advance: Callable[[int], object]) -> None:
    """Copy one file. A copy within a store writes a manifest and no data.

    Args:
        source: The content to copy.
        target: Its previous content is replaced.
        advance: Called with the number of bytes of each piece after it is written; for a copy within a store, first
            with 0. An error that it raises ends the copy.
    """
    if isinstance(source, StoredSource) and isinstance(target, StoredTarget) and source.store is target.store:
        advance(0)
        copy(source.store, source.entry.path, target.path)
        advance(source.size)
        return

    def counted() -> Iterator[memoryview]:
        for piece in source.pieces():
            yield piece
            advance(len(piece))

    target.fill(counted(), source.metadata)


def read_pieces(reader: Reader, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes from ``start`` to ``stop``, both within the file. A piece is valid until the next one is read."""
    window = memoryview(bytearray(max(0, min(WINDOW_BYTES, stop - start))))
    for offset in range(start, stop, WINDOW_BYTES):
        piece = window[: min(WINDOW_BYTES, stop - offset)]
        reader.read_into(offset, piece)
        yield piece


def _read_file(file: io.BufferedReader | io.FileIO) -> Iterator[memoryview]:
    with buffers().lend(CHUNK_BYTES) as buffer:
        while (count := file.readinto(buffer)) != 0:
            if count is None:  # another process made the pipe non-blocking, as ssh and node do
                select.select([file], [], [])
            else:
                yield buffer[:count]


def known_size(path: str) -> int | None:
    """Return the size of a regular file; None for a pipe or device, whose size is unknown until its end."""
    status = os.stat(path)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def walk(root: str) -> Iterator[tuple[str, int | None]]:
    """Yield relative path and size of every entry below a directory, sorted; None as size of a directory. Follow links.

    Raises:
        InvalidInputError: A link leads to a directory above it, or an entry is a pipe, socket or device.
        OSError: A directory or an entry cannot be read.
    """
    yield from _walk(root, "", (_identity(root),))


def _walk(root: str, inside: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int | None]]:
    with os.scandir(os.path.join(root, inside)) as scan:
        items = sorted(scan, key=lambda item: item.name)
    for item in items:
        relative = f"{inside}/{item.name}" if inside else item.name
        status = item.stat()
        if stat.S_ISDIR(status.st_mode):
            identity = _identity(item.path)
            if identity in above:
                raise InvalidInputError(
                    f"{item.path} is a link back to a directory above it: remove it", path=item.path
                )
            yield relative, None
            yield from _walk(root, relative, (*above, identity))
        elif stat.S_ISREG(status.st_mode):
            yield relative, status.st_size
        else:
            raise InvalidInputError(
                f"{item.path} is a pipe, socket or device: copy it by itself, or remove it", path=item.path
            )


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
