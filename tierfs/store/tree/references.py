"""Reference lists: written when a checkpoint is published, and made again by whoever finds that one is missing.

FORMAT.md, "Reference list". A list is a saving and never the truth: nothing fails where it cannot be written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from tierfs.errors import InvalidInputError, TierfsError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT
from tierfs.format.header import Kind
from tierfs.format.manifest import Manifest
from tierfs.format.references import ReferenceList, record_check
from tierfs.objects.checksums import put_checked
from tierfs.objects.protocol import ObjectInfo
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.tree.walk import live_records, read_manifests

__all__ = ["is_root", "names_of", "owned_records", "parents_of", "put_references", "write_references"]

_Record = tuple[str, str, str, Manifest]
_logger = logging.getLogger("tierfs.store")


def is_root(path: str) -> bool:
    """Whether a file of this path makes its directory a checkpoint, which has a reference list."""
    return path.rpartition("/")[2] == ROOT


def names_of(store: Store, path: str, manifest: Manifest) -> Iterator[bytes]:
    """The encoded names of all chunk objects that a file needs; one may come several times.

    Raises:
        CorruptionError, FormatError: Its table of chunks cannot be read.
        StoreError, ReadOnlyError: The object tier failed.
    """
    if manifest.kind is not Kind.FILE:
        return
    for row in (*(manifest.rows if manifest.indirect else ()), *expand_rows(store, manifest, path)):
        for name in (row.name, *row.bases):
            yield name.encode()


def owned_records(store: Store, directory: str) -> list[tuple[str, ObjectInfo]]:
    """The live records that the list of a directory speaks for: all below it, but for those below another checkpoint in it."""
    listed = list(live_records(store, directory))
    inner = {path.rpartition("/")[0] for path, _ in listed if is_root(path)} - {directory}
    if not inner:
        return listed
    return [item for item in listed if not any(parent in inner for parent in parents_of(item[0], directory))]


def parents_of(path: str, top: str) -> Iterator[str]:
    """The directories that a file, or a marker, lies in, from the innermost on, without ``top`` and what is above that."""
    parent = path.rstrip("/") if path.endswith("/") else path.rpartition("/")[0]
    while len(parent) > len(top):
        yield parent
        parent = parent.rpartition("/")[0]


def write_references(store: Store, directory: str, names: Iterable[str] | None = None) -> bool:
    """Write the reference list of a checkpoint that was published just now.

    That takes a put. Unless ``names`` are all the files in the directory, and this process knows their records because it wrote
    them, it takes a listing and the records that this host does not know as well.

    Returns:
        Whether it was done.
    """
    try:
        found = None if names is None else _known(store, directory, names)
        if found is None:
            listed = owned_records(store, directory)
            found = [(path, info.key, info.version, manifest) for path, info, manifest in read_manifests(store, listed)]
            if len(found) != len(listed):
                return False  # it changes: whoever changes it writes the list
        checks = [record_check(key, version) for _, key, version, _ in found]
        needed = {name for path, _, _, manifest in found for name in names_of(store, path, manifest)}
        return put_references(store, directory, checks, needed)
    except (TierfsError, OSError) as error:
        _logger.debug("%s gets its reference list from the next gc: %s", store.where(directory), error)
        return False


def _known(store: Store, directory: str, names: Iterable[str]) -> list[_Record] | None:
    """The records of these files as this process wrote or saw them last; ``None`` if it does not know one of them."""
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
    """Put a reference list. Returns whether it fits into one object.

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
