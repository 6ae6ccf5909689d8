"""``tierfs sync``: make a directory in a store equal to a local directory."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import threading
import time
from collections.abc import Collection, Iterable, Iterator

from tierfs.cli.arguments import URL, command, progress_option, suggested
from tierfs.cli.files.mirror import LocalTree, MirrorRecord, Synced, content_of, holds, pieces_of, scan_source
from tierfs.cli.files.places import StorePlace, sent_bytes, store_place
from tierfs.cli.files.targets import SELECTION, Selection, refuse_below_file, refuse_foreign_files, remove_directories
from tierfs.cli.files.transfer import Stopped, fill_stored, local_content, run_in_parallel
from tierfs.cli.terminal.output import counted, print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import InvalidInputError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.keys import inside
from tierfs.mount.attributes import new_attributes, with_posix
from tierfs.store import Entry, annotate, delete, find, make_directory
from tierfs.store import stat as stat_stored

ATTEMPTS_MAX = 3


@command(
    "sync",
    "make a directory in a store equal to a local one; bytes that the store has are not stored again",
    """
    tierfs sync /data/model tierfs::s3://bucket/models/first
    tierfs sync /data/model tierfs://NAME/models/first --delete --dry-run
    tierfs sync /data/model tierfs://NAME/models/first --exclude '*.tmp'
    """,
    {"directory DIR": "a local directory"}
    | URL
    | {
        "--delete": "delete files and directories in the store that DIR does not have, if tierfs wrote all of them",
    },
    SELECTION,
    progress_option,
)
def run(arguments: argparse.Namespace) -> int:
    directory = arguments.directory
    if not os.path.exists(directory):
        raise NotFoundError(f"{directory} does not exist on this host", path=directory)
    if not os.path.isdir(directory):
        raise InvalidInputError(
            f"{directory} is not a directory: {suggested('cp', directory, arguments.url)} copies a file", path=directory
        )
    place = store_place(arguments.url, write=not arguments.dry_run, is_new=True)
    kind = place.kind()
    if kind == "file":
        raise InvalidInputError(f"{place.url} is a file: name a directory", path=place.url)
    if kind is None:
        refuse_below_file(place)
    chosen, before = Selection(arguments.include, arguments.exclude), sent_bytes(place.store)
    with (
        Progress("sync", wanted=arguments.progress) as progress,
        contextlib.closing(MirrorRecord(directory)) as record,
    ):
        local = scan_source(directory)
        local.files = {name: status for name, status in local.files.items() if chosen.takes(name)}
        progress.expect(sum(status.st_size for status in local.files.values()))
        work = _Sync(place, directory, record, progress, dry_run=arguments.dry_run)
        work.run(local, chosen, deletes=arguments.delete)
    done, planned, new = work.done, sorted(work.planned), sent_bytes(place.store) - before
    counts = {name: getattr(done, name) for name in ("files", "unchanged", "deleted", "read_bytes")}
    document = {**counts, "new_bytes": new, "dry_run": arguments.dry_run, "would": planned}
    if arguments.dry_run:
        lines = [f"would {printable(each)}" for each in planned]
        total = f"would store {counted(done.files, progress.bytes)}, delete {done.deleted}"
    else:
        lines, total = [], f"stored {counted(done.files, done.read_bytes, new)}, deleted {done.deleted}"
    return print_result(arguments, document, *lines, f"{total}; {done.unchanged} unchanged")


class _Sync:
    """The state of one run. It stores modes and times as a mount does."""

    def __init__(
        self, place: StorePlace, root: str, record: MirrorRecord, progress: Progress, *, dry_run: bool
    ) -> None:
        self._place, self._root, self._record, self._progress = place, root, record, progress
        self._dry_run, self.planned = dry_run, list[str]()
        self._store = place.store
        self._stored: dict[str, Entry] = {}
        self.done = Synced()

    def run(self, local: LocalTree, chosen: Selection, *, deletes: bool) -> None:
        found = {self._place.relative(entry.path): entry for entry in find(self._store, self._place.path)}
        self._stored = {name: entry for name, entry in found.items() if not entry.is_directory and chosen.takes(name)}
        directories = {name for name, entry in found.items() if entry.is_directory}
        for relative in (*local.files, *local.directories):
            keys.validate_path(self._inside(relative))
        gone = {relative: entry for relative, entry in self._stored.items() if relative not in local.files}
        in_the_way = sorted((self._stored.keys() & local.directories) | (directories & local.files.keys()))
        if deletes:
            refuse_foreign_files(self._store, gone.values())
        elif in_the_way:
            where = self._store.where(self._inside(in_the_way[0]))
            raise InvalidInputError(
                f"{where} is a file on one side and a directory on the other: --delete removes it", path=where
            )

        def is_in_the_way(relative: str) -> bool:
            return any(relative == one or relative.startswith(f"{one}/") for one in in_the_way)

        early = {relative for relative in gone if is_in_the_way(relative)}
        self._delete(early)
        self._remove_directories(filter(is_in_the_way, directories))
        implied = {relative.rpartition("/")[0] for relative in (*local.files, *local.directories)}
        empty = {"", *local.directories} - directories - implied if chosen.is_all and not self._dry_run else ()
        for relative in empty:
            make_directory(self._store, self._inside(relative), exist_ok=True)
        run_in_parallel(self._one, sorted(local.files))
        if deletes:
            self._delete(gone.keys() - early)
            self._remove_directories(directories - local.directories if chosen.is_all else ())

    def _entry(self, relative: str) -> Entry | None:
        try:
            found = stat_stored(self._store, self._inside(relative))
        except NotFoundError:
            return None
        return None if found.is_directory else found

    def _inside(self, relative: str) -> str:
        return inside(self._place.path, relative) if relative else self._place.path

    def _delete(self, gone: Collection[str]) -> None:
        def delete_one(relative: str, _stop: threading.Event) -> None:
            with contextlib.suppress(NotFoundError):
                delete(self._store, self._inside(relative))

        self.done.add(deleted=len(gone))
        if self._dry_run:
            self.planned += [f"delete {relative}" for relative in sorted(gone)]
            return
        run_in_parallel(delete_one, gone)
        for relative in gone:
            self._record.forget(relative)

    def _remove_directories(self, gone: Iterable[str]) -> None:
        if not self._dry_run:
            remove_directories(self._store, map(self._inside, gone))

    def _one(self, relative: str, stop: threading.Event) -> None:
        target = os.path.join(self._root, relative)
        entry = self._stored.get(relative)
        for _ in range(ATTEMPTS_MAX):
            before = os.stat(target)
            if entry is not None and self._is_same(relative, target, entry, before):
                self.done.add(unchanged=1)
                if self._dry_run:
                    return
                content = content_of(self._store, entry)
                self._keep_attributes(entry, before)
                self._progress.advance(before.st_size)
            elif self._dry_run:
                self.done.add(files=1)
                self._progress.advance(before.st_size)
                self.planned.append(f"store {relative}")
                return
            else:
                content = self._put(relative, target, entry, before, stop)
            after = os.stat(target)
            if (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size):
                self._record.note(relative, content, after)
                return
            entry = self._entry(relative)
        raise StoreError(
            f"{target} changed during each attempt to store it: stop the program that writes to it", path=target
        )

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
        def pieces() -> Iterator[memoryview]:
            for piece in local_content(target).pieces():
                if stop.is_set():
                    raise Stopped
                yield piece
                self.done.add(read_bytes=len(piece))
                self._progress.advance(len(piece))

        path = self._inside(relative)
        manifest = fill_stored(self._store, path, pieces(), _described(entry, status))
        self.done.add(files=1)
        return content_of(self._store, Entry(path, is_directory=False, manifest=manifest))


def _described(entry: Entry | None, status: os.stat_result) -> dict[str, object]:
    attributes = new_attributes(0, stat.S_IFREG | stat.S_IMODE(status.st_mode), time.time_ns())
    attributes = attributes.at(mtime_ns=status.st_mtime_ns, now_ns=status.st_ctime_ns)
    kept = entry.manifest.metadata if entry is not None and entry.manifest is not None else {}
    return with_posix(kept, attributes)
