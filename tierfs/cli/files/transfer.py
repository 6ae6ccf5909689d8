"""Read and write the bytes of files, find local files to copy, and process a few files at a time.

The threads of `tierfs.threads` transfer chunks. A task for a file waits for its chunks, so it runs elsewhere.
"""

from __future__ import annotations

import io
import itertools
import os
import select
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

from tierfs.buffers import buffers
from tierfs.cli.terminal.progress import Progress
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import InvalidInputError
from tierfs.format.manifest import Manifest
from tierfs.localfile import replacing, write_all
from tierfs.store import Entry, Reader, Store, Writer, open_entry

# Four chunks, which the reader fetches in parallel.
WINDOW_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FileContent:
    """The content of a file.

    Attributes:
        size: In bytes; None for a pipe or device, whose size is unknown until its end.
        pieces: Yields the bytes in order. Each piece is valid until the next one is read.
        metadata: Of a file in a store, as its user set it.
        stored: The store and the entry of a file in a store.
    """

    size: int | None
    pieces: Callable[[], Iterator[memoryview]]
    metadata: Mapping[str, object] | None = None
    stored: tuple[Store, Entry] | None = None


def local_content(path: str, size: int | None = None) -> FileContent:
    """Return the content of a local file. The size of a pipe or device is None."""

    def pieces() -> Iterator[memoryview]:
        with open(path, "rb", buffering=0) as file:
            yield from read_stream(file)

    return FileContent(size, pieces)


def stored_content(store: Store, entry: Entry) -> FileContent:
    """Return the content of a file in a store, at the version that a listing found."""

    def pieces() -> Iterator[memoryview]:
        reader = open_entry(store, entry)
        return read_pieces(reader, 0, reader.length)

    metadata = entry.manifest.metadata if entry.manifest is not None else None
    return FileContent(entry.length, pieces, metadata, (store, entry))


def fill_local(path: str, pieces: Iterable[memoryview]) -> None:
    """Write a local file. It is replaced when its content is complete."""
    with replacing(path) as file:
        for piece in pieces:
            file.write(piece)


def fill_stored(
    store: Store, path: str, pieces: Iterable[memoryview], metadata: Mapping[str, object] | None = None
) -> Manifest:
    """Write a file in a store. It is published when its content is complete."""
    writer = Writer(store, path, metadata=metadata)
    try:
        for piece in pieces:
            writer.write(piece)
    except BaseException:
        writer.abort()
        raise
    return writer.commit()


def fill_stream(stream: BinaryIO, pieces: Iterable[memoryview]) -> None:
    """Write to a stream like stdout. Written bytes stay, also if a later write fails."""
    for piece in pieces:
        write_all(stream, piece)
    stream.flush()


def read_pieces(reader: Reader, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes from ``start`` to ``stop``, both within the file. A piece is valid until the next one is read."""
    window = memoryview(bytearray(max(0, min(WINDOW_BYTES, stop - start))))
    for offset in range(start, stop, WINDOW_BYTES):
        piece = window[: min(WINDOW_BYTES, stop - offset)]
        reader.read_into(offset, piece)
        yield piece


def read_stream(file: io.BufferedReader | io.FileIO) -> Iterator[memoryview]:
    """Yield the bytes of a stream, like stdin, to its end. A piece is valid until the next one is read."""
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


_Item = TypeVar("_Item")

FILES_AT_ONCE = 4


class Stopped(Exception):  # noqa: N818 - not an error
    """Raised inside a task to end it early, because another task failed or the user interrupted the command."""


def run_in_parallel(
    task: Callable[[_Item, threading.Event], object], items: Iterable[_Item], progress: Progress | None = None
) -> None:
    """Call ``task(item, stop)`` for every item, `FILES_AT_ONCE` at a time.

    Args:
        task: Raises `Stopped` at a suitable point once ``stop`` is set.
        items: Listed before the first call.
        progress: Shows the number of finished items; None for no progress.

    Raises:
        BaseException: The first error of a task, raised when every task that had begun has ended.
    """
    todo = list(items)
    stop = threading.Event()
    if len(todo) < 2:  # noqa: PLR2004 - one item needs no thread
        for item in todo:
            task(item, stop)
        return
    done = itertools.count(1)
    errors: list[BaseException] = []

    def work(item: _Item) -> None:
        if stop.is_set():
            return
        try:
            task(item, stop)
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            stop.set()
        if progress is not None:
            progress.note(f"{next(done)} of {len(todo)}")

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="tierfs-file") as pool:
        try:
            list(pool.map(work, todo))
        finally:
            stop.set()
    if errors:
        raise errors[0]
