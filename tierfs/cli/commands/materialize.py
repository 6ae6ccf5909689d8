"""``tierfs materialize``: make a local directory equal to a directory in a store."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import threading
from pathlib import Path

import xxhash

from tierfs.cli.arguments import URL, command, progress_option, suggested
from tierfs.cli.files.mirror import (
    PART_PREFIX,
    MirrorRecord,
    Piece,
    Synced,
    content_of,
    holds,
    pieces_of,
    remove_directories,
    remove_files,
    scan,
)
from tierfs.cli.files.places import StorePlace, store_place
from tierfs.cli.files.transfer import Stopped, read_pieces, run_in_parallel
from tierfs.cli.terminal.output import print_result
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import InvalidInputError
from tierfs.format.keys import DESCRIPTOR
from tierfs.localfile import naming
from tierfs.mount.attributes import attributes_of
from tierfs.store import Entry, Reader, Store, open_entry
from tierfs.units import format_bytes


@command(
    "materialize",
    "make a local directory equal to one in a store, for programs that want a path",
    """
    tierfs materialize tierfs::s3://bucket/run/step_1000 /data/model
    tierfs materialize tierfs://NAME/model /data/model --delete
    """,
    URL,
    {
        "directory DIR": "a local directory; created if it is missing",
        "--delete": "delete files, links and directories in DIR that the store does not have",
    },
    progress_option,
)
def run(arguments: argparse.Namespace) -> int:
    place = store_place(arguments.url)
    if not place.entry().is_directory:
        raise InvalidInputError(
            f"{place.url} is a file: {suggested('cp', place.url, arguments.directory)} copies it", path=place.url
        )
    with Progress("materialize", wanted=arguments.progress) as progress:
        done = materialize(place, arguments.directory, progress, deletes=arguments.delete)
    read = f"{format_bytes(done.read_bytes)} read"
    told = f"wrote {done.files} files, {read}; {done.unchanged} unchanged, {done.deleted} deleted"
    # Earlier versions cloned files, and counted the shared bytes.
    return print_result(arguments, {**dataclasses.asdict(done), "shared_bytes": 0}, told)


class _Materializer:
    """The state of one `materialize` call."""

    def __init__(self, store: Store, root: str, record: MirrorRecord, progress: Progress) -> None:
        self._store, self._root, self._record, self._progress = store, root, record, progress
        self.done = Synced()

    def run(self, files: dict[str, Entry], directories: set[str], *, deletes: bool) -> None:
        local = scan(self._root)
        problems: list[OSError] = []
        gone_files = (local.files.keys() | local.others) - files.keys()
        if deletes:
            parts = local.parts - {_part(name) for name in files}
            remove_files(self._root, parts)  # first: a directory that contains a part is not empty
            self.done.deleted = remove_files(self._root, gone_files)
            problems = remove_directories(self._root, local.directories - directories)
            for relative in gone_files:
                self._record.forget(relative)
        else:
            taken = (directories & (gone_files | local.others)) | (files.keys() & local.directories)
            if taken:
                where = os.path.join(self._root, min(taken))
                raise InvalidInputError(
                    f"{where} is a file on one side and a directory on the other: --delete removes it",
                    path=where,
                )
        for relative in ("", *directories):
            os.makedirs(os.path.join(self._root, relative), exist_ok=True)
        run_in_parallel(self._one, sorted(files.items()))
        if problems:  # raised last, so that all files are written
            raise problems[0]

    def _one(self, item: tuple[str, Entry], stop: threading.Event) -> None:
        relative, entry = item
        target = os.path.join(self._root, relative)
        content = content_of(self._store, entry)
        try:
            status = os.lstat(target)
        except FileNotFoundError:
            status = None
        if status is not None and self._record.knows(relative, content, status):
            self.done.add(unchanged=1)
            self._progress.advance(entry.length)
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        part = os.path.join(self._root, _part(relative))
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with naming(target):
                is_same = self._fill(fd, entry, target if status is not None else None, stop)
                if is_same:
                    os.unlink(part)
                else:
                    os.ftruncate(fd, entry.length)
                    os.fsync(fd)
                    self._describe(fd, entry)  # last: the next run could not open a part whose mode forbids writing
                    os.replace(part, target)
        finally:
            os.close(fd)
        self._record.note(relative, content, os.lstat(target))
        self.done.add(**({"unchanged": 1} if is_same else {"files": 1}))

    def _fill(self, fd: int, entry: Entry, old: str | None, stop: threading.Event) -> bool:
        """Fill the file with all chunks. Return whether the old file has all of them, so that nothing was written."""
        pieces = pieces_of(self._store, entry)
        had = os.fstat(fd).st_size
        old_fd = os.open(old, os.O_RDONLY | os.O_NOFOLLOW) if old is not None and not os.path.islink(old) else -1
        try:
            is_old = old_fd >= 0 and os.fstat(old_fd).st_size == entry.length and entry.manifest is not None
            if is_old and all(holds(self._store, old_fd, piece) for piece in pieces):
                self._describe(old_fd, entry)
                self.done.add(kept_bytes=entry.length)
                self._progress.advance(entry.length)
                return True
            missing: list[Piece] = []
            for piece in pieces:
                if stop.is_set():
                    raise Stopped
                if piece.start < had and holds(self._store, fd, piece):
                    self.done.add(kept_bytes=piece.length)
                elif old_fd >= 0 and holds(self._store, old_fd, piece):
                    _write(fd, memoryview(os.pread(old_fd, piece.length, piece.start)), piece.start)
                    self.done.add(kept_bytes=piece.length)
                else:
                    missing.append(piece)
                    continue
                self._progress.advance(piece.length)
        finally:
            if old_fd >= 0:
                os.close(old_fd)
        self._read(fd, open_entry(self._store, entry), missing, stop)
        return False

    def _read(self, fd: int, reader: Reader, missing: list[Piece], stop: threading.Event) -> None:
        runs: list[list[int]] = []
        for piece in missing:
            if runs and runs[-1][1] == piece.start:
                runs[-1][1] += piece.length
            else:
                runs.append([piece.start, piece.start + piece.length])
        for start, end in runs:
            offset = start
            for data in read_pieces(reader, start, end):
                if stop.is_set():
                    raise Stopped
                _write(fd, data, offset)
                offset += len(data)
                self.done.add(read_bytes=len(data))
                self._progress.advance(len(data))

    @staticmethod
    def _describe(fd: int, entry: Entry) -> None:
        """Set the mode and time that the file has in the store."""
        found = attributes_of(entry, 0, started_ns=0)
        if entry.manifest is not None and "posix" in entry.manifest.metadata:
            os.fchmod(fd, found.mode & 0o777)
        os.utime(fd, ns=(found.mtime_ns, found.mtime_ns))


def materialize(place: StorePlace, root: str, progress: Progress, *, deletes: bool) -> Synced:
    """Make a local directory equal to a directory in a store.

    Each file gets its name when it is complete. A file that an earlier run left incomplete is completed.

    Args:
        place: The directory in the store.
        root: The local directory; created if missing.
        progress: Counts the bytes that are up to date.
        deletes: Whether to delete local entries that the store lacks.

    Raises:
        InvalidInputError: The local directory lies in a store, or a file and a directory have the same name and
            ``deletes`` is not set.
        TierfsError, OSError: The run failed. Complete files stay, and the next run continues.
    """
    _check_is_outside(root)
    entries = place.entries()
    files = {place.relative(entry.path): entry for entry in entries if not entry.is_directory}
    progress.expect(sum(entry.length for entry in files.values()))
    with contextlib.closing(MirrorRecord(root)) as record:
        work = _Materializer(place.store, root, record, progress)
        directories = {place.relative(entry.path) for entry in entries if entry.is_directory}
        work.run(files, directories, deletes=deletes)
    return work.done


def _check_is_outside(root: str) -> None:
    """Raise if a local directory is that of a store, or in one: its files would lie there beside the store's own."""
    place = Path(os.path.realpath(root))
    for above in (place, *place.parents):
        if os.path.exists(above / DESCRIPTOR):  # false if this user may not look
            raise InvalidInputError(
                f"{root} is in the store at {above}: name a directory outside, because files that are put into a store "
                "by other means are not tierfs's",
                path=root,
            )


def _part(relative: str) -> str:
    folder, _, name = relative.rpartition("/")
    part = PART_PREFIX + xxhash.xxh3_64_hexdigest(name.encode(errors="surrogateescape"))
    return f"{folder}/{part}" if folder else part


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
