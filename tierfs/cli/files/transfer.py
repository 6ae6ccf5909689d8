"""Copy the bytes of one file from a source to a target, and find local files to copy."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from tierfs.buffers import buffers
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import InvalidInputError
from tierfs.format.manifest import Manifest
from tierfs.localfile import replacing, write_all
from tierfs.store import Entry, Reader, Store, Writer, copy, open_entry

__all__ = [
    "ContentSource",
    "ContentTarget",
    "LocalSource",
    "LocalTarget",
    "RawInput",
    "StoredSource",
    "StoredTarget",
    "StreamSource",
    "StreamTarget",
    "known_size",
    "read_pieces",
    "transfer",
    "walk",
]

# Four chunks, fetched at the same time.
WINDOW_BYTES = 64 << 20


class ContentSource(Protocol):
    """The content of a file."""

    @property
    def size(self) -> int | None:
        """Bytes, where that is known ahead."""

    @property
    def metadata(self) -> Mapping[str, object] | None:
        """The metadata that the user gave."""

    def pieces(self) -> Iterator[memoryview]:
        """The content in order. Each piece is valid until the next one is asked for."""


class RawInput(Protocol):
    """A binary file that is read."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the buffer from its start, and say how far; 0 at the end."""


class ContentTarget(Protocol):
    """Where the content of a file goes."""

    def fill(self, pieces: Iterable[memoryview], metadata: Mapping[str, object] | None) -> object:
        """Take all of it. Unless this returns, what was there before is there still."""


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A local file."""

    path: str
    size: int | None
    metadata: Mapping[str, object] | None = None

    def pieces(self) -> Iterator[memoryview]:
        """See `ContentSource.pieces`."""
        with open(self.path, "rb", buffering=0) as file:
            yield from _read_file(file)


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A stream that is read to its end, like stdin."""

    stream: RawInput
    size: int | None = None
    metadata: Mapping[str, object] | None = None

    def pieces(self) -> Iterator[memoryview]:
        """See `ContentSource.pieces`."""
        yield from _read_file(self.stream)


@dataclass(frozen=True, slots=True)
class StoredSource:
    """A file in a store, at the version that a listing found."""

    store: Store
    entry: Entry

    @property
    def size(self) -> int:
        """See `ContentSource.size`."""
        return self.entry.length

    @property
    def metadata(self) -> Mapping[str, object] | None:
        """See `ContentSource.metadata`."""
        return self.entry.manifest.metadata if self.entry.manifest is not None else None

    def pieces(self) -> Iterator[memoryview]:
        """See `ContentSource.pieces`."""
        reader = open_entry(self.store, self.entry)
        return read_pieces(reader, 0, reader.length)


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """A local file, replaced when its content is complete."""

    path: str

    def fill(self, pieces: Iterable[memoryview], metadata: Mapping[str, object] | None) -> None:
        """See `ContentTarget.fill`."""
        with replacing(self.path) as file:
            for piece in pieces:
                file.write(piece)


@dataclass(frozen=True, slots=True)
class StreamTarget:
    """A stream that is written to, like stdout."""

    stream: BinaryIO

    def fill(self, pieces: Iterable[memoryview], metadata: Mapping[str, object] | None) -> None:
        """See `ContentTarget.fill`, but that what is written stays written."""
        for piece in pieces:
            write_all(self.stream, piece)
        self.stream.flush()


@dataclass(frozen=True, slots=True)
class StoredTarget:
    """A file in a store, published when its content is complete."""

    store: Store
    path: str

    def fill(self, pieces: Iterable[memoryview], metadata: Mapping[str, object] | None) -> Manifest:
        """See `ContentTarget.fill`."""
        writer = Writer(self.store, self.path, metadata=metadata)
        try:
            for piece in pieces:
                writer.write(piece)
        except BaseException:
            writer.abort()
            raise
        return writer.commit()


def transfer(source: ContentSource, target: ContentTarget, advance: Callable[[int], object]) -> None:
    """Copy one file. Within a store only its manifest is written.

    Args:
        source: From where.
        target: To where; what is there is replaced.
        advance: Called with the bytes of each piece that has gone its way; what it raises ends the copy.
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
    """The bytes from ``start`` to ``stop``, which must be in the file. Each piece is valid until the next is asked for."""
    window = memoryview(bytearray(max(0, min(WINDOW_BYTES, stop - start))))
    for offset in range(start, stop, WINDOW_BYTES):
        piece = window[: min(WINDOW_BYTES, stop - offset)]
        reader.read_into(offset, piece)
        yield piece


def _read_file(file: RawInput) -> Iterator[memoryview]:
    with buffers().lend(CHUNK_BYTES) as buffer:
        while count := file.readinto(buffer):
            yield buffer[:count]


def known_size(path: str) -> int | None:
    """Bytes of a file, or ``None`` for a pipe or a device, which tells only when it ends."""
    status = os.stat(path)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def walk(root: str) -> Iterator[tuple[str, int | None]]:
    """Relative path and size of everything below a directory, sorted, links followed; ``None`` for a directory.

    Raises:
        InvalidInputError: A link back to a directory above it, or something that is no file.
        OSError: It cannot be read.
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
