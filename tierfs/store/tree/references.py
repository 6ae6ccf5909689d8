"""Reference lists: written when a checkpoint is published, and rewritten by a client that finds one missing.

FORMAT.md, "Reference list". A list only saves requests: no operation fails because a list cannot be written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, TierfsError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT, is_part
from tierfs.format.header import Kind
from tierfs.format.manifest import Manifest
from tierfs.format.upkeep import REFERENCES_BYTES_MAX, ReferenceList, record_check
from tierfs.objects.checksums import put_checked
from tierfs.objects.protocol import ObjectInfo, Version, objects_below
from tierfs.store.announced_saves import AnnouncedSaves
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed
from tierfs.store.tree.walk import live_records, read_manifests

_Record = tuple[str, str, str, Manifest]
_logger = logging.getLogger("tierfs.store")


def is_root(path: str) -> bool:
    """Return whether a file at this path makes its directory a checkpoint, which has a reference list."""
    return path.rpartition("/")[2] == ROOT


def names_of(store: Store, path: str, manifest: Manifest) -> Iterator[bytes]:
    """Yield the encoded names of all chunk objects that a file needs. A name may occur several times.

    Raises:
        CorruptionError, FormatError: The file's table of chunks cannot be read.
        StoreError, ReadOnlyError: The object tier failed.
    """
    if manifest.kind is not Kind.FILE:
        return
    for row in (*(manifest.rows if manifest.indirect else ()), *expand_rows(store, manifest, path)):
        for name in (row.name, *row.bases):
            yield name.encode()


def owned_records(store: Store, directory: str) -> list[tuple[str, ObjectInfo]]:
    """Return the live records that a directory's list covers: all below it, except below another checkpoint."""
    listed = list(live_records(store, directory))
    inner = {path.rpartition("/")[0] for path, _ in listed if is_root(path)} - {directory}
    if not inner:
        return listed
    return [item for item in listed if not any(parent in inner for parent in parents_of(item[0], directory))]


def parents_of(path: str, top: str) -> Iterator[str]:
    """Yield the directories above a file or marker, innermost first. Excludes ``top`` and the directories above it."""
    parent = path.rstrip("/") if path.endswith("/") else path.rpartition("/")[0]
    while len(parent) > len(top):
        yield parent
        parent = parent.rpartition("/")[0]


def write_references(store: Store, directory: str, names: Iterable[str] | None = None) -> bool:
    """Write the reference list of a checkpoint that was just published. An error is logged, not raised.

    This takes one put if ``names`` are all files in the directory, and this process knows their records because it
    wrote them. Otherwise it also takes a listing, and a request for each record that this host does not know.

    If the directory holds a shard file that the checkpoint does not name, no list is written: gc has to read the
    directory's records to find that file, and writes the list when the file is gone.

    Returns:
        Whether the list was written.
    """
    try:
        found = None if names is None else _known(store, directory, names)
        if found is None:
            listed = owned_records(store, directory)
            found = [(path, info.key, info.version, manifest) for path, info, manifest in read_manifests(store, listed)]
            root = next((record for record in found if record[0] == keys.inside(directory, ROOT)), None)
            if len(found) != len(listed) or root is None:
                return False  # the checkpoint is changing, or was deleted. A list of none would look like a loss to gc
            parts = {path for path, _, _, manifest in found if is_part(manifest.metadata)}
            if parts and not parts <= _named(store, directory, root):
                return False
        checks = [record_check(key, version) for _, key, version, _ in found]
        needed = {name for path, _, _, manifest in found for name in names_of(store, path, manifest)}
        return put_references(store, directory, checks, needed)
    except (TierfsError, OSError) as error:
        _logger.debug("%s gets its reference list from the next gc: %s", store.where(directory), error)
        return False


def _named(store: Store, directory: str, root: _Record) -> set[str]:
    path, key, version, manifest = root
    names = AnnouncedSaves(store).files(Observed(path, key, manifest, Version(version)))
    return {keys.inside(directory, name) for name in names}


def _known(store: Store, directory: str, names: Iterable[str]) -> list[_Record] | None:
    """Return these files' records as this process last wrote or saw them, or None if it does not know them all."""
    found: list[_Record] = []
    for name in names:
        path = keys.inside(directory, name)
        key = keys.record_key(path)
        known = store.records.get(key)
        if known is None or not isinstance(known[1], Manifest):
            return None
        found.append((path, key, known[0], known[1]))
    return found


def put_references(store: Store, directory: str, checks: Iterable[bytes], names: Iterable[bytes]) -> bool:
    """Put a reference list. Return False, without a put, if the list is too long for one object.

    Raises:
        StoreError, ReadOnlyError, CapacityError: The object tier failed.
    """
    try:
        data = [ReferenceList.of(directory, store.descriptor.digest_kind, checks, names).encode()]
    except InvalidInputError as error:
        _logger.info("%s has no reference list: %s", store.where(directory), error)
        return False
    put_checked(store.objects, keys.references_key(directory), data)
    return True


def vanished_checkpoints(store: Store, lists: Iterable[ObjectInfo]) -> Iterator[str]:
    """Yield the directories that these reference lists name; for an unreadable list its key."""
    for item in lists:
        try:
            data, _ = store.objects.read(item.key, REFERENCES_BYTES_MAX)
            yield ReferenceList.decode(data, store.where(item.key)).path
        except NotFoundError:  # noqa: PERF203 - removed meanwhile
            continue
        except (CorruptionError, FormatError):
            yield item.key


def vanished_roots(store: Store) -> list[str]:
    """Return the checkpoints whose metadata has vanished without a tombstone, as far as readable reference lists name them.

    Takes a listing of all records, one of all lists, and a request for each checkpoint that vanished.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    lists = list(objects_below(store.objects, keys.REFERENCES))  # before the records: a list follows its metadata
    seen = {root_list(item.key) for item in objects_below(store.objects, keys.TREE)} if lists else set()
    found = vanished_checkpoints(store, (item for item in lists if item.key not in seen))
    return sorted(path for path in found if not keys.is_at_or_below(path, keys.PRIVATE))


def root_list(key: str) -> str:
    """Return the key of the reference list of the checkpoint whose metadata has its record at this key, else ""."""
    try:
        path = keys.parse_record_key(key)
    except FormatError:
        return ""
    return keys.references_key(path.rpartition("/")[0]) if is_root(path) else ""
