"""Look-ups in a store: one path, one directory, or everything below a path.

A directory exists while a live record is below it, its own marker included, or a file that tierfs did not write. As in
any object store, a path can be a file and have other files below it. A look-up of the path finds the file. A listing
returns the path twice, the file first.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierfs.errors import NotFoundError
from tierfs.format import keys
from tierfs.format.manifest import Manifest
from tierfs.gc_pause import Uncollected
from tierfs.objects.protocol import ObjectInfo, Prefix
from tierfs.store.store import Store
from tierfs.store.tree.records import held_at, observe_marker, observe_to_read
from tierfs.store.tree.walk import (
    directory_name,
    foreign_objects,
    foreign_prefix,
    is_valid,
    live_path,
    live_records,
    read_manifests,
)
from tierfs.threads import transfers

# Up to this many directories are inspected one by one, with a request each: two rounds for the 16 transfer threads.
LOOKS_MAX = 32
# Names to list for each unknown directory before the rest are inspected one by one. A page of a bucket's listing has
# 1,000 names, and 16 directories are inspected concurrently. So at worst the listing takes as long as the inspections.
# Inspecting a directory of this host takes as long as listing four names.
LOOK_NAMES = 64
LOOK_NAMES_NEAR = 4
# A listing over a network pauses garbage collection for at most this long, because its endpoint may be down.
UNCOLLECTED_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or directory in a store.

    Attributes:
        path: Relative to the store's root. Empty for the root itself.
        is_directory: Whether it is a directory.
        manifest: The manifest of a file that tierfs wrote, or the marker of a directory. None if there is none, or if
            it was not asked for.
        foreign: The object, for a file that tierfs did not write.
    """

    path: str
    is_directory: bool
    manifest: Manifest | None = None
    foreign: ObjectInfo | None = None

    @property
    def length(self) -> int:
        """Length of the file in bytes, 0 for a directory."""
        if self.foreign is not None:
            return self.foreign.size
        return self.manifest.length if self.manifest is not None else 0


def stat(store: Store, path: str) -> Entry:
    """Describe one path. ``""`` is the root.

    Raises:
        NotFoundError: Nothing is there.
        CorruptionError, FormatError: The record is damaged, or of another version.
        InvalidInputError: The path is invalid.
        StoreError, ReadOnlyError: The object tier failed.
    """
    if not path:
        return Entry("", is_directory=True)
    manifest = observe_to_read(store, path).manifest
    if manifest is not None:
        return Entry(path, is_directory=False, manifest=manifest)
    try:
        return Entry(path, is_directory=False, foreign=store.objects.head(path))
    except NotFoundError:
        pass
    marker = observe_marker(store, path).manifest
    if marker is not None or has_below(store, path):
        return Entry(path, is_directory=True, manifest=marker)
    raise NotFoundError(f"{store.where(path)} is not there", path=path)


def stat_to_read(store: Store, path: str) -> Entry:
    """Describe one path that the caller wants to read, and fail if its file may be hidden from this process.

    Raises:
        CorruptionError: As `stat`; or nothing is seen there, and a damaged segment of this host may hold the file.
        TierfsError: As `stat`; or nothing is seen there, and local tiers that cannot be used may hold the file.
    """
    try:
        return stat(store, path)
    except NotFoundError:
        check_hidden(store, path)
        raise


def check_hidden(store: Store, path: str) -> None:
    """Check that no change of this host at a path can be hidden from this process.

    Raises:
        CorruptionError: A damaged segment of this host may hold one.
        TierfsError: Local tiers that cannot be used may hold one.
    """
    if store.tiers is not None:
        store.tiers.drafts.check_hidden(path)
    elif store.hidden is not None:
        raise store.hidden.with_traceback(None) from None


def is_directory(store: Store, path: str) -> bool:
    """Return whether ``path`` is a directory. Raises as `stat` does, except `NotFoundError`."""
    try:
        return stat(store, path).is_directory
    except NotFoundError:
        return False


def has_below(store: Store, path: str, pending: Mapping[str, Manifest | None] | None = None) -> bool:
    """Return whether anything is below ``path``, including its marker. Raises as `stat` does.

    ``pending`` is the result of `pending_at`, if the caller has it already.
    """
    known = pending_at(store, path) if pending is None else pending
    if _has_live(store, path, known) or _has_foreign(store, path):
        return True
    remote = store.tiers.remote if store.tiers is not None else None
    held = [] if remote is None else remote.paths_below(path)
    return any(observe_to_read(store, name).manifest is not None for name in held if name != path)


def list_directory(store: Store, path: str, *, detail: bool = True) -> list[Entry]:
    """Return the entries of a directory, sorted by name. For a file with nothing below it, return the file.

    Without ``detail`` no record is read, and published files have no manifest and length 0.

    Raises:
        NotFoundError: Nothing is there.
        StoreError, ReadOnlyError, CorruptionError, FormatError: The directory cannot be read.
    """
    with _uncollected(store):
        return _list_directory(store, path, detail=detail)


def list_pending(store: Store, path: str) -> list[Entry]:
    """Return the entries of a directory that this host's pending changes show, sorted by name. Sends no request."""
    pending = pending_at(store, path)
    directories = {keys.inside(path, name) for name in _child_directories(path, pending)}
    return _sorted([*_files_in(path, pending), *(Entry(name, is_directory=True) for name in directories)])


def _files_in(path: str, pending: Mapping[str, Manifest | None]) -> list[Entry]:
    return [
        Entry(name, is_directory=False, manifest=manifest)
        for name, manifest in pending.items()
        if manifest is not None and name.rpartition("/")[0] == path and name != path
    ]


def _uncollected(store: Store) -> Uncollected:
    """Return a context manager that pauses garbage collection while a listing creates its entries."""
    return Uncollected(None if store.descriptor.endpoint.host_local else UNCOLLECTED_S_MAX)


def _list_directory(store: Store, path: str, *, detail: bool) -> list[Entry]:
    pending = shown_at(store, path)
    files: dict[str, Entry] = {}
    records: list[tuple[str, ObjectInfo]] = []
    foreign: list[str] = []
    directories: list[str] = []
    exists = not path
    for item in store.objects.list(foreign_prefix(path), delimiter=True):
        child = item.key.rstrip("/")
        if child.rpartition("/")[2] == keys.PRIVATE or not is_valid(child):
            continue
        if isinstance(item, Prefix):
            foreign.append(child)
        else:
            files[child] = Entry(child, is_directory=False, foreign=item)
    for item in store.objects.list(keys.directory_prefix(path), delimiter=True):
        if isinstance(item, Prefix):
            name = directory_name(item.key)
            if name is not None:
                directories.append(keys.inside(path, name))
            continue
        live = live_path(item)
        if live is not None and live not in pending:
            exists = True
            if not live.endswith("/"):
                records.append((live, item))
    below = _living(store, path, pending, directories, foreign)
    for entry in _read_all(store, records, detail=detail):
        files[entry.path] = entry
    # Those seen before the object tier was listed: a change that was published meanwhile is in none of a later look.
    files |= {entry.path: entry for entry in _files_in(path, pending)}
    if not (exists or files or below):
        entry = stat_to_read(store, path)
        return [] if entry.is_directory else [entry]
    return _sorted([*files.values(), *(Entry(name, is_directory=True) for name in below)])


def _living(
    store: Store, path: str, pending: Mapping[str, Manifest | None], recorded: Sequence[str], foreign: Sequence[str]
) -> set[str]:
    """Return the directories right below ``path`` that are not empty.

    Args:
        path: The directory above.
        pending: This host's pending changes below ``path``.
        recorded: Directories that hold records, perhaps tombstones only.
        foreign: Directories that hold objects that tierfs did not write, perhaps none with a valid name.
    """
    found = {keys.inside(path, name) for name in _child_directories(path, pending)}
    unknown = [name for name in recorded if name not in found]
    # For many directories, one deep listing of ``path`` takes fewer requests than a listing of each.
    if len(unknown) > LOOKS_MAX:
        near = store.descriptor.endpoint.host_local
        wanted, left = set(unknown), (LOOK_NAMES_NEAR if near else LOOK_NAMES) * len(unknown)
        start = len(path) + 1 if path else 0
        for item in store.objects.list(keys.directory_prefix(path)):
            live = live_path(item) if isinstance(item, ObjectInfo) else None
            # The root's own marker has a slash but no name before it.
            if live is not None and live not in pending and (end := live.find("/", start)) > start:
                found.add(name := live[:end])
                wanted.discard(name)
            left -= 1
            if not (left and wanted):
                break
        else:
            wanted = set()
        unknown = list(wanted)
    alive = transfers().map(lambda name: _has_live(store, name, pending), unknown)
    found.update(itertools.compress(unknown, alive))
    unknown = [name for name in foreign if name not in found]
    found.update(itertools.compress(unknown, transfers().map(lambda name: _has_foreign(store, name), unknown)))
    return found


def find(store: Store, path: str, *, detail: bool = True) -> list[Entry]:
    """Return every file and directory below ``path``, sorted, without ``path`` itself.

    For a file with nothing below it, return the file. If nothing is at ``path``, return an empty list.

    Raises:
        StoreError, ReadOnlyError, CorruptionError, FormatError: The listing or a record cannot be read.
    """
    with _uncollected(store):
        return _find(store, path, detail=detail)


def _find(store: Store, path: str, *, detail: bool) -> list[Entry]:
    pending = shown_at(store, path)
    files: dict[str, Entry] = {}
    for info in foreign_objects(store, path):
        files[info.key] = Entry(info.key, is_directory=False, foreign=info)
    markers: list[str] = []
    records: list[tuple[str, ObjectInfo]] = []
    for record in live_records(store, path):
        if record[0].endswith("/"):
            markers.append(record[0])
        elif record[0] not in pending:
            records.append(record)
    for entry in _read_all(store, records, detail=detail):
        files[entry.path] = entry
    for name, manifest in pending.items():
        if manifest is not None and name != path:
            files[name] = Entry(name, is_directory=False, manifest=manifest)
    directories: dict[str, Entry] = {}
    for name in itertools.chain(files, (name for name, _ in records), markers):
        parent = name.rpartition("/")[0]
        while parent not in directories and len(parent) > len(path):
            directories[parent] = Entry(parent, is_directory=True)
            parent = parent.rpartition("/")[0]
    if not (files or directories) and path:
        try:
            entry = stat(store, path)
        except NotFoundError:
            return []
        return [] if entry.is_directory else [entry]
    return _sorted([*files.values(), *directories.values()])


def _sorted(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.path, entry.is_directory))


def directories_in(store: Store, path: str) -> list[str]:
    """Return the names of the directories in a directory, sorted. Takes two listings and no request for each directory.

    A directory whose files were all deleted may be included until garbage collection.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    names = set(_child_directories(path, shown_at(store, path)))
    for item in store.objects.list(foreign_prefix(path), delimiter=True):
        name = item.key.rstrip("/").rpartition("/")[2]
        if isinstance(item, Prefix) and name != keys.PRIVATE and is_valid(item.key.rstrip("/")):
            names.add(name)
    for item in store.objects.list(keys.directory_prefix(path), delimiter=True):
        found = directory_name(item.key) if isinstance(item, Prefix) else None
        if found is not None:
            names.add(found)
    return sorted(names)


def _read_all(store: Store, records: Sequence[tuple[str, ObjectInfo]], *, detail: bool) -> list[Entry]:
    if not detail:
        return [Entry(name, is_directory=False) for name, _ in records]
    return [Entry(name, is_directory=False, manifest=manifest) for name, _, manifest in read_manifests(store, records)]


def pending_at(store: Store, path: str) -> dict[str, Manifest | None]:
    """Return this host's pending changes at and below ``path``. None stands for a removal.

    Call this before asking the object tier. Drafts move down, so a change that is in neither place does not exist.
    """
    if store.tiers is None:
        return {}
    records = {name: pending.draft.record for name, pending in store.tiers.drafts.pending_below(path).items()}
    return {name: record if isinstance(record, Manifest) else None for name, record in records.items()}


def shown_at(store: Store, path: str) -> dict[str, Manifest | None]:
    """Return the result of `pending_at`, and the changes that other hosts hold."""
    pending = pending_at(store, path)
    return {**held_at(store, path, pending), **pending}


def _child_directories(path: str, pending: Mapping[str, Manifest | None]) -> list[str]:
    """Return the names of the directories right below ``path`` that hold pending files."""
    start = len(path) + 1 if path else 0
    below = [name[start:] for name, manifest in pending.items() if manifest is not None]
    return [name.partition("/")[0] for name in below if "/" in name]


def _has_live(store: Store, path: str, pending: Mapping[str, Manifest | None]) -> bool:
    if any(manifest is not None and name.startswith(f"{path}/") for name, manifest in pending.items()):
        return True
    return any(name not in pending for name, _ in live_records(store, path))


def _has_foreign(store: Store, path: str) -> bool:
    return any(True for _ in foreign_objects(store, path))
