"""Sync: make a directory in a store equal to a local directory."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tierfs.cli.mirror.content import holds, pieces_of
from tierfs.cli.mirror.local import scan_source
from tierfs.cli.mirror.record import MirrorRecord, content_of
from tierfs.cli.parallel import Stopped, run_in_parallel
from tierfs.cli.transfer import LocalSource
from tierfs.cli.trees import refuse_foreign_files, remove_directories
from tierfs.errors import InvalidInputError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.mount.attributes import new_attributes, with_posix
from tierfs.store import Entry, Store, Writer, annotate, delete, find, make_directory
from tierfs.store import stat as stat_stored

__all__ = ["Synced", "sync"]

ATTEMPTS_MAX = 3


@dataclass(slots=True)
class Synced:
    """The result of a run.

    Attributes:
        files: How many files were stored.
        unchanged: How many were as they should be.
        deleted: How many were deleted.
        read_bytes: Bytes of the files that were stored; of these the store takes the chunks that it has not got.
    """

    files: int = 0
    unchanged: int = 0
    deleted: int = 0
    read_bytes: int = 0


class _Sync:
    """See `sync`."""

    def __init__(self, store: Store, path: str, root: str, advance: Callable[[int], object]) -> None:
        self._store, self._path, self._root = store, path, root
        self._advance = advance
        self._record = MirrorRecord(root)
        self._lock = threading.Lock()
        self._stored: dict[str, Entry] = {}
        self.done = Synced()

    def run(self, expect: Callable[[int], object], *, deletes: bool) -> None:
        try:
            self._run(expect, deletes=deletes)
        finally:
            self._record.close()

    def _run(self, expect: Callable[[int], object], *, deletes: bool) -> None:
        local = scan_source(self._root)
        expect(sum(status.st_size for status in local.files.values()))
        entries = self._entries()
        self._stored = {self._relative(entry): entry for entry in entries if not entry.is_directory}
        directories = {self._relative(entry) for entry in entries if entry.is_directory}
        for relative in (*local.files, *local.directories):
            keys.validate_path(self._inside(relative))
        gone = [entry for relative, entry in self._stored.items() if relative not in local.files]
        in_the_way = sorted((self._stored.keys() & local.directories) | (directories & local.files.keys()))
        if in_the_way and not deletes:
            where = self._store.where(self._inside(in_the_way[0]))
            raise InvalidInputError(
                f"{where} is a file here and a directory there, or the other way round: --delete removes it", path=where
            )
        if deletes:
            refuse_foreign_files(self._store, gone)
        early = [
            entry
            for entry in gone
            if deletes and any(_is_at_or_below(self._relative(entry), one) for one in in_the_way)
        ]
        self._delete(early)
        blocking = [name for name in directories if any(_is_at_or_below(name, one) for one in in_the_way)]
        remove_directories(self._store, [self._inside(name) for name in blocking])
        implied = {relative.rpartition("/")[0] for relative in (*local.files, *local.directories)}
        for relative in local.directories - directories:
            if relative not in implied:
                make_directory(self._store, self._inside(relative), exist_ok=True)
        run_in_parallel(self._one, sorted(local.files))
        if deletes:
            self._delete([entry for entry in gone if entry not in early])
            kept = local.directories | {above for name in local.files for above in _above(name)}
            remove_directories(self._store, [self._inside(name) for name in directories - kept if name])

    def _entries(self) -> list[Entry]:
        try:
            return [entry for entry in find(self._store, self._path) if entry.path != self._path]
        except NotFoundError:
            return []

    def _entry(self, relative: str) -> Entry | None:
        try:
            found = stat_stored(self._store, self._inside(relative))
        except NotFoundError:
            return None
        return None if found.is_directory else found

    def _relative(self, entry: Entry) -> str:
        return entry.path[len(self._path) :].lstrip("/")

    def _inside(self, relative: str) -> str:
        return f"{self._path}/{relative}" if self._path else relative

    def _delete(self, entries: list[Entry]) -> None:
        def delete_one(entry: Entry, _stop: threading.Event) -> None:
            with contextlib.suppress(NotFoundError):
                delete(self._store, entry.path)

        run_in_parallel(delete_one, entries)
        for entry in entries:
            self._record.forget(self._relative(entry))
        self.done.deleted += len(entries)

    def _one(self, relative: str, stop: threading.Event) -> None:
        target = os.path.join(self._root, relative)
        entry = self._stored.get(relative)
        for _ in range(ATTEMPTS_MAX):
            before = os.stat(target)
            if entry is not None and self._is_same(relative, target, entry, before):
                content = content_of(self._store, entry)
                self._keep_attributes(entry, before)
                self._count(unchanged=1)
                self._advance(before.st_size)
            else:
                content = self._put(relative, target, entry, before, stop)
            after = os.stat(target)
            if (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size):
                self._record.note(relative, content, after)
                return
            entry = self._entry(relative)
        raise StoreError(f"{target} changes all the time: stop the program that writes to it", path=target)

    def _is_same(self, relative: str, target: str, entry: Entry, status: os.stat_result) -> bool:
        if entry.manifest is None or entry.length != status.st_size:
            return False
        if self._record.knows(relative, content_of(self._store, entry), status):
            return True
        fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return all(holds(self._store, fd, piece) for piece in pieces_of(self._store, entry))
        finally:
            os.close(fd)

    def _keep_attributes(self, entry: Entry, status: os.stat_result) -> None:
        assert entry.manifest is not None
        metadata = _described(entry, status)
        if metadata != entry.manifest.metadata:
            annotate(self._store, entry.path, metadata, write_id=entry.manifest.write_id)

    def _put(
        self, relative: str, target: str, entry: Entry | None, status: os.stat_result, stop: threading.Event
    ) -> str:
        path = self._inside(relative)
        writer = Writer(self._store, path, metadata=_described(entry, status))
        try:
            for piece in LocalSource(target, status.st_size).pieces():
                if stop.is_set():
                    raise Stopped
                writer.write(piece)
                self._count(read_bytes=len(piece))
                self._advance(len(piece))
        except BaseException:
            writer.abort()
            raise
        manifest = writer.commit()
        self._count(files=1)
        return content_of(self._store, Entry(path, is_directory=False, manifest=manifest))

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.done, name, getattr(self.done, name) + count)


def sync(
    store: Store,
    path: str,
    root: str,
    *,
    deletes: bool,
    advance: Callable[[int], object],
    expect: Callable[[int], object],
) -> Synced:
    """Make a directory in a store equal to a local directory.

    Mode and time of a file are kept with it, as a mount keeps them. A file whose bytes the store has is not stored again.

    Args:
        store: The store.
        path: The directory in it; made where it is missing.
        root: The local directory.
        deletes: Whether what is not here is deleted in the store.
        advance: Called with the bytes of each piece that is as it should be.
        expect: Called once with the bytes of all files.

    Raises:
        InvalidInputError: A directory is where a file is to be, and ``deletes`` is not set; or a name that a store cannot have.
        ReadOnlyError: A file to be deleted or replaced was not written by tierfs.
        TierfsError, OSError: It failed; the files that are complete stay, and the next run goes on.
    """
    work = _Sync(store, path, root, advance)
    work.run(expect, deletes=deletes)
    return work.done


def _described(entry: Entry | None, status: os.stat_result) -> dict[str, object]:
    attributes = new_attributes(0, stat.S_IFREG | stat.S_IMODE(status.st_mode), time.time_ns())
    attributes = attributes.at(mtime_ns=status.st_mtime_ns, now_ns=status.st_ctime_ns)
    kept = entry.manifest.metadata if entry is not None and entry.manifest is not None else {}
    return with_posix(kept, attributes)


def _is_at_or_below(relative: str, directory: str) -> bool:
    return relative == directory or relative.startswith(f"{directory}/")


def _above(relative: str) -> list[str]:
    parts = relative.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
