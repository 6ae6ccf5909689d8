"""Walks listings of the object tier: finds live records and foreign files, and reads the records.

A tombstone is told from a live record by its size. So a GET is sent only for a live record whose version this host has
not seen.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence

from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, TierfsError
from tierfs.format import keys
from tierfs.format.manifest import TOMBSTONE_BYTES, Manifest, Record
from tierfs.objects.protocol import Listed, ObjectInfo, Prefix
from tierfs.store.store import Store
from tierfs.store.tree.records import observe_listed, recall
from tierfs.threads import transfers

ERRAND_RECORDS_MAX = 64
_logger = logging.getLogger("tierfs.store")


def live_records(store: Store, path: str, *, deep: bool = True) -> Iterator[tuple[str, ObjectInfo]]:
    """Yield path and object of every live record below ``path`` in the object tier, without reading the records.

    The path of a marker ends with ``/``. With ``deep`` set to false, subdirectories are skipped.
    """
    for item in store.objects.list(keys.directory_prefix(path), delimiter=not deep):
        if isinstance(item, ObjectInfo) and (live := live_path(item)) is not None:
            yield live, item


def names_in(store: Store, path: str) -> list[str]:
    """Return the names of the live files and of the directories in a directory in the object tier, by one listing.

    A directory may have no live record in it.
    """
    names = []
    for item in store.objects.list(keys.directory_prefix(path), delimiter=True):
        live = live_path(item) if isinstance(item, ObjectInfo) else None
        name = live.rpartition("/")[2] if live is not None else None
        if isinstance(item, Prefix):
            name = directory_name(item.key)
        if name:
            names.append(name)
    return names


def foreign_objects(store: Store, path: str) -> Iterator[ObjectInfo]:
    """Yield every object below ``path`` that tierfs did not write."""
    for item in _foreign_listing(store, path):
        if isinstance(item, ObjectInfo) and keys.PRIVATE not in item.key.split("/") and is_valid(item.key):
            yield item


def _foreign_listing(store: Store, path: str) -> Iterator[Listed]:
    if path:
        yield from store.objects.list(foreign_prefix(path))
        return
    # Not one listing of everything: most objects below the root are chunks.
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
    """Read the records of a listing from the object tier. A version that this host knows costs no request.

    Args:
        listed: Paths and objects of the records.
        damaged: Called with the path and the error of each record that is damaged or of another version, which is then
            skipped. By default the error is raised.

    Returns:
        The records that still exist, except tombstones, in no particular order.

    Raises:
        CorruptionError, FormatError, StoreError, ReadOnlyError: A record cannot be read.
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
    # Many records are read several to a task, because a task costs more than a read from a local directory.
    size = max(1, min(ERRAND_RECORDS_MAX, len(unknown) // (4 * transfers().workers)))
    errands = [unknown[start : start + size] for start in range(0, len(unknown), size)]
    fetched = itertools.chain.from_iterable(transfers().map(lambda errand: list(map(read, errand)), errands))
    return [*found, *recalled, *(item for item in fetched if item is not None)]


def _split(
    listed: Sequence[tuple[str, ObjectInfo]], known: Sequence[Record | None]
) -> tuple[list[tuple[str, ObjectInfo, Manifest]], list[tuple[str, ObjectInfo]]]:
    """Split listed records into those that are known and those that are not. Known tombstones are dropped."""
    found: list[tuple[str, ObjectInfo, Manifest]] = []
    unknown: list[tuple[str, ObjectInfo]] = []
    for item, record in zip(listed, known, strict=True):
        if isinstance(record, Manifest):
            found.append((*item, record))
        elif record is None:
            unknown.append(item)
    return found, unknown


def foreign_prefix(path: str) -> str:
    """Return the key prefix of the files below a directory that tierfs did not write."""
    return f"{keys.validate_path(path)}/" if path else ""


def live_path(info: ObjectInfo) -> str | None:
    """Return the path of a live record in a listing, or None for a tombstone or a stray object."""
    try:
        path = keys.parse_record_key(info.key)
    except FormatError as error:
        _logger.warning("an object is skipped: %s; `tierfs verify` lists such objects", error)
        return None
    return None if info.size == TOMBSTONE_BYTES else path


def directory_name(key: str) -> str | None:
    """Return the name of a directory in a listing, or None if its key is not a valid path."""
    try:
        return keys.parse_component(key.rstrip("/").rpartition("/")[2])
    except FormatError:
        return None


def is_valid(path: str) -> bool:
    """Return whether the name of a file that tierfs did not write is a valid path."""
    try:
        keys.validate_path(path)
    except InvalidInputError as error:
        _logger.warning("a file that tierfs did not write cannot be shown: %s", error)
        return False
    return True
