"""Looking into a store: one path, one directory, or everything below one.

A directory is there while a live record lies below it, its own marker included, or a file that tierfs did not write.
As in any object store, a path can be a file and have others below it: by itself it is the file then, and a listing has
it twice, the file first.
Tombstones are told from live records by their size, so only live records that this process has not seen in this
version cost a GET.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, TierfsError
from tierfs.format import keys
from tierfs.format.manifest import TOMBSTONE_BYTES, Manifest, Record
from tierfs.gc_pause import Uncollected
from tierfs.objects.protocol import Listed, ObjectInfo, Prefix
from tierfs.store.store import Store
from tierfs.store.transfers import transfers
from tierfs.store.tree.records import observe, observe_listed, observe_marker, recall

__all__ = [
    "Entry",
    "directories_in",
    "find",
    "foreign_objects",
    "has_below",
    "is_directory",
    "list_directory",
    "live_records",
    "names_in",
    "pending_at",
    "read_manifests",
    "stat",
    "stat_to_read",
]

ERRAND_RECORDS_MAX = 64
# Up to so many directories are looked into one by one, a request each: about one round of requests side by side.
LOOKS_MAX = 32
# Names to go through for each directory before the rest are looked into one by one. A page of a bucket's listing has 1,000, and 16
# directories are looked into side by side, so at worst the listing and the looks take as long as each other. A look into a directory of
# this host takes as long as four names.
LOOK_NAMES = 64
LOOK_NAMES_NEAR = 4
# A listing beyond a network puts the collection of garbage off for no longer: it may wait for an endpoint that is down.
UNCOLLECTED_S_MAX = 10.0
_logger = logging.getLogger("tierfs.store")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or directory in a store.

    Attributes:
        path: Relative to the store's root; empty for the root itself.
        is_directory: Whether it is one.
        manifest: Of a file that tierfs wrote, or a directory's marker; ``None`` where there is none or it was not
            asked for.
        foreign: The object, for a file that tierfs did not write.
    """

    path: str
    is_directory: bool
    manifest: Manifest | None = None
    foreign: ObjectInfo | None = None

    @property
    def length(self) -> int:
        """Bytes of the file; 0 for a directory."""
        if self.foreign is not None:
            return self.foreign.size
        return self.manifest.length if self.manifest is not None else 0


def stat(store: Store, path: str) -> Entry:
    """Describe one path; ``""`` is the root.

    Raises:
        NotFoundError: Nothing is there.
        CorruptionError, FormatError: Its record is damaged, or of another version.
        InvalidInputError: The path is no good.
        StoreError, ReadOnlyError: The object tier failed.
    """
    if not path:
        return Entry("", is_directory=True)
    manifest = observe(store, path).manifest
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
    """The same for who wants to read what is there.

    Raises:
        CorruptionError: As `stat`; or nothing is seen there, and a segment of this host is damaged, which may hold it.
        TierfsError: As `stat`; or nothing is seen there, and local tiers that may hold it cannot be used.
    """
    try:
        return stat(store, path)
    except NotFoundError:
        check_hidden(store, path)
        raise


def check_hidden(store: Store, path: str) -> None:
    """Check that nothing that this host wrote at a path is kept from being seen there.

    Raises:
        CorruptionError: A segment of this host is damaged, which may hold it.
        TierfsError: Local tiers that may hold it cannot be used.
    """
    if store.tiers is not None:
        store.tiers.drafts.check_hidden(path)
    elif store.hidden is not None:
        raise store.hidden.with_traceback(None) from None


def is_directory(store: Store, path: str) -> bool:
    """Whether ``path`` is a directory. Raises as `stat` does, but for `NotFoundError`."""
    try:
        return stat(store, path).is_directory
    except NotFoundError:
        return False


def has_below(store: Store, path: str, pending: Mapping[str, Manifest | None] | None = None) -> bool:
    """Whether something lies below ``path``, its marker as a directory included. Raises as `stat` does.

    Args:
        store: The store.
        path: A directory, perhaps.
        pending: See `pending_at`, where that was looked up already.
    """
    known = pending_at(store, path) if pending is None else pending
    return _has_live(store, path, known) or _has_foreign(store, path)


def list_directory(store: Store, path: str, *, detail: bool = True) -> list[Entry]:
    """The entries of a directory, sorted by name; for a file with nothing below it, the file.

    Args:
        store: The store.
        path: The directory; ``""`` is the root.
        detail: Whether to read the manifests. Without, no record is read and lengths are unknown (0).

    Raises:
        NotFoundError: Nothing is there.
        StoreError, ReadOnlyError, CorruptionError, FormatError: It failed.
    """
    with _uncollected(store):
        return _list_directory(store, path, detail=detail)


def _uncollected(store: Store) -> Uncollected:
    """Nothing is collected while a listing makes its entries."""
    return Uncollected(None if store.descriptor.endpoint.host_local else UNCOLLECTED_S_MAX)


def _list_directory(store: Store, path: str, *, detail: bool) -> list[Entry]:
    pending = pending_at(store, path)
    files: dict[str, Entry] = {}
    records: list[tuple[str, ObjectInfo]] = []
    foreign: list[str] = []
    directories: list[str] = []
    exists = not path
    for item in store.objects.list(_foreign_prefix(path), delimiter=True):
        child = item.key.rstrip("/")
        if child.rpartition("/")[2] == keys.PRIVATE or not _is_valid(child):
            continue
        if isinstance(item, Prefix):
            foreign.append(child)
        else:
            files[child] = Entry(child, is_directory=False, foreign=item)
    for item in store.objects.list(keys.directory_prefix(path), delimiter=True):
        if isinstance(item, Prefix):
            name = _directory_name(item.key)
            if name is not None:
                directories.append(f"{path}/{name}" if path else name)
            continue
        live = _live_path(item)
        if live is not None and live not in pending:
            exists = True
            if not live.endswith("/"):
                records.append((live, item))
    below = _living(store, path, pending, directories, foreign)
    for entry in _read_all(store, records, detail=detail):
        files[entry.path] = entry
    for name, manifest in pending.items():
        if manifest is not None and name.rpartition("/")[0] == path and name != path:
            files[name] = Entry(name, is_directory=False, manifest=manifest)
    if not (exists or files or below):
        entry = stat_to_read(store, path)
        return [] if entry.is_directory else [entry]
    return _sorted([*files.values(), *(Entry(name, is_directory=True) for name in below)])


def _living(
    store: Store,
    path: str,
    pending: Mapping[str, Manifest | None],
    recorded: Sequence[str],
    foreign: Sequence[str],
) -> set[str]:
    """The directories right below ``path`` in which something is.

    Args:
        store: The store.
        path: The directory above.
        pending: This host's changes below that.
        recorded: Those in which records are, perhaps all of removed files.
        foreign: Those in which tierfs did not write something, perhaps nothing that can be shown.
    """
    found = {f"{path}/{name}" if path else name for name in _child_directories(path, pending)}
    unknown = [name for name in recorded if name not in found]
    # For many directories, one listing of all that is in them takes fewer requests than a listing of each.
    if len(unknown) > LOOKS_MAX:
        near = store.descriptor.endpoint.host_local
        wanted, left = set(unknown), (LOOK_NAMES_NEAR if near else LOOK_NAMES) * len(unknown)
        start = len(path) + 1 if path else 0
        for item in store.objects.list(keys.directory_prefix(path)):
            live = _live_path(item) if isinstance(item, ObjectInfo) else None
            # The slash that ends the root's own marker is behind no name.
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
    """Every file and directory below ``path``, not ``path`` itself, sorted; of a file that nothing lies below, the file.

    Raises:
        StoreError, ReadOnlyError, CorruptionError, FormatError: It failed. A path with nothing there is no error.
    """
    with _uncollected(store):
        return _find(store, path, detail=detail)


def _find(store: Store, path: str, *, detail: bool) -> list[Entry]:
    pending = pending_at(store, path)
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


def live_records(store: Store, path: str, *, deep: bool = True) -> Iterator[tuple[str, ObjectInfo]]:
    """Path and object of every live record below ``path`` in the object tier, unread; markers' paths end with ``/``.

    Args:
        store: The store.
        path: A directory.
        deep: Whether to go into the directories in it.
    """
    for item in store.objects.list(keys.directory_prefix(path), delimiter=not deep):
        if isinstance(item, ObjectInfo) and (live := _live_path(item)) is not None:
            yield live, item


def names_in(store: Store, path: str) -> list[str]:
    """Names of the live files in a directory in the object tier, and of the directories there, live or not; one listing."""
    names = []
    for item in store.objects.list(keys.directory_prefix(path), delimiter=True):
        live = _live_path(item) if isinstance(item, ObjectInfo) else None
        name = live.rpartition("/")[2] if live is not None else None
        if isinstance(item, Prefix):
            name = _directory_name(item.key)
        if name:
            names.append(name)
    return names


def directories_in(store: Store, path: str) -> list[str]:
    """Names of the directories in a directory, sorted, however many there are: two listings, no look into each one.

    A directory of which all files were deleted may be among them, until garbage collection.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    names = set(_child_directories(path, pending_at(store, path)))
    for item in store.objects.list(_foreign_prefix(path), delimiter=True):
        name = item.key.rstrip("/").rpartition("/")[2]
        if isinstance(item, Prefix) and name != keys.PRIVATE and _is_valid(item.key.rstrip("/")):
            names.add(name)
    for item in store.objects.list(keys.directory_prefix(path), delimiter=True):
        found = _directory_name(item.key) if isinstance(item, Prefix) else None
        if found is not None:
            names.add(found)
    return sorted(names)


def foreign_objects(store: Store, path: str) -> Iterator[ObjectInfo]:
    """Every object below ``path`` that tierfs did not write."""
    for item in _foreign_listing(store, path):
        if isinstance(item, ObjectInfo) and keys.PRIVATE not in item.key.split("/") and _is_valid(item.key):
            yield item


def _foreign_listing(store: Store, path: str) -> Iterator[Listed]:
    if path:
        yield from store.objects.list(_foreign_prefix(path))
        return
    # Not in one go: most of what lies below the root are chunks.
    for item in store.objects.list("", delimiter=True):
        if not isinstance(item, Prefix):
            yield item
        elif item.key != f"{keys.PRIVATE}/":
            yield from store.objects.list(item.key)


def read_manifests(
    store: Store,
    listed: Sequence[tuple[str, ObjectInfo]],
    *,
    damaged: Callable[[str, TierfsError], object] | None = None,
) -> list[tuple[str, ObjectInfo, Manifest]]:
    """Read records that a listing named, as the object tier has them; those known on this host in that version cost no request.

    Args:
        store: The store.
        listed: Their paths and objects.
        damaged: Called with path and error for each that is damaged or of another version, which is passed over then; by
            default that is an error.

    Returns:
        Those that are there still, in no promised order.

    Raises:
        CorruptionError, FormatError, StoreError, ReadOnlyError: It failed.
    """

    def read(item: tuple[str, ObjectInfo]) -> tuple[str, ObjectInfo, Manifest] | None:
        path, info = item
        try:
            manifest = observe_listed(store, path, info).manifest
        except NotFoundError:
            return None  # collected since the listing
        except (CorruptionError, FormatError) as error:
            if damaged is None:
                raise
            damaged(path, error)
            return None
        return None if manifest is None else (path, info, manifest)

    found, unknown = _split(listed, store.records.find(info for _, info in listed))
    recalled, unknown = _split(unknown, recall(store, unknown))
    # Several to an errand, where there are many: an errand takes longer than a look into a local directory.
    size = max(1, min(ERRAND_RECORDS_MAX, len(unknown) // (4 * transfers().workers)))
    errands = [unknown[start : start + size] for start in range(0, len(unknown), size)]
    fetched = itertools.chain.from_iterable(transfers().map(lambda errand: list(map(read, errand)), errands))
    return [*found, *recalled, *(item for item in fetched if item is not None)]


def _split(
    listed: Sequence[tuple[str, ObjectInfo]], known: Sequence[Record | None]
) -> tuple[list[tuple[str, ObjectInfo, Manifest]], list[tuple[str, ObjectInfo]]]:
    """Those of which the record is known, and the others."""
    found: list[tuple[str, ObjectInfo, Manifest]] = []
    unknown: list[tuple[str, ObjectInfo]] = []
    for item, record in zip(listed, known, strict=True):
        if isinstance(record, Manifest):
            found.append((*item, record))
        elif record is None:
            unknown.append(item)
    return found, unknown


def _read_all(store: Store, records: Sequence[tuple[str, ObjectInfo]], *, detail: bool) -> list[Entry]:
    if not detail:
        return [Entry(name, is_directory=False) for name, _ in records]
    return [Entry(name, is_directory=False, manifest=manifest) for name, _, manifest in read_manifests(store, records)]


def pending_at(store: Store, path: str) -> dict[str, Manifest | None]:
    """This host's pending changes at and below ``path``; ``None`` for a removal.

    To be looked up before the object tier is: drafts move down, so what is in neither place is not there.
    """
    if store.tiers is None:
        return {}
    records = {name: pending.draft.record for name, pending in store.tiers.drafts.pending_below(path).items()}
    return {name: record if isinstance(record, Manifest) else None for name, record in records.items()}


def _child_directories(path: str, pending: Mapping[str, Manifest | None]) -> list[str]:
    """Names of directories right below ``path`` that something pending lies in."""
    start = len(path) + 1 if path else 0
    below = [name[start:] for name, manifest in pending.items() if manifest is not None]
    return [name.partition("/")[0] for name in below if "/" in name]


def _has_live(store: Store, path: str, pending: Mapping[str, Manifest | None]) -> bool:
    if any(manifest is not None and name.startswith(f"{path}/") for name, manifest in pending.items()):
        return True
    return any(name not in pending for name, _ in live_records(store, path))


def _has_foreign(store: Store, path: str) -> bool:
    return any(True for _ in foreign_objects(store, path))


def _foreign_prefix(path: str) -> str:
    return f"{keys.validate_path(path)}/" if path else ""


def _live_path(info: ObjectInfo) -> str | None:
    """The path of a live record in a listing, or ``None`` for a tombstone or a stray object."""
    try:
        path = keys.parse_record_key(info.key)
    except FormatError as error:
        _logger.warning("an object is passed over: %s; `tierfs verify` lists such objects", error)
        return None
    return None if info.size == TOMBSTONE_BYTES else path


def _directory_name(key: str) -> str | None:
    """The name of a directory in a listing; ``None`` for a stray one."""
    try:
        return keys.parse_component(key.rstrip("/").rpartition("/")[2])
    except FormatError:
        return None


def _is_valid(path: str) -> bool:
    """Whether a file that tierfs did not write has a name that a store's path can have."""
    try:
        keys.validate_path(path)
    except InvalidInputError as error:
        _logger.warning("a file that tierfs did not write cannot be shown: %s", error)
        return False
    return True
