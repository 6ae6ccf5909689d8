"""Walks listings of the object tier: finds live records and files that tierfs did not write, and reads those records.

Tombstones are told from live records by their size, so only live records that this process has not seen in this
version cost a GET.
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
from tierfs.store.transfers import transfers
from tierfs.store.tree.records import observe_listed, recall

__all__ = [
    "directory_name",
    "foreign_objects",
    "foreign_prefix",
    "is_valid",
    "live_path",
    "live_records",
    "names_in",
    "read_manifests",
]

ERRAND_RECORDS_MAX = 64
_logger = logging.getLogger("tierfs.store")


def live_records(store: Store, path: str, *, deep: bool = True) -> Iterator[tuple[str, ObjectInfo]]:
    """Path and object of every live record below ``path`` in the object tier, unread; markers' paths end with ``/``.

    Args:
        store: The store.
        path: A directory.
        deep: Whether to go into the directories in it.
    """
    for item in store.objects.list(keys.directory_prefix(path), delimiter=not deep):
        if isinstance(item, ObjectInfo) and (live := live_path(item)) is not None:
            yield live, item


def names_in(store: Store, path: str) -> list[str]:
    """Names of the live files in a directory in the object tier, and of the directories there, live or not; one listing."""
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
    """Every object below ``path`` that tierfs did not write."""
    for item in _foreign_listing(store, path):
        if isinstance(item, ObjectInfo) and keys.PRIVATE not in item.key.split("/") and is_valid(item.key):
            yield item


def _foreign_listing(store: Store, path: str) -> Iterator[Listed]:
    if path:
        yield from store.objects.list(foreign_prefix(path))
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


def foreign_prefix(path: str) -> str:
    """How the keys of files below a directory begin that tierfs did not write."""
    return f"{keys.validate_path(path)}/" if path else ""


def live_path(info: ObjectInfo) -> str | None:
    """The path of a live record in a listing, or ``None`` for a tombstone or a stray object."""
    try:
        path = keys.parse_record_key(info.key)
    except FormatError as error:
        _logger.warning("an object is passed over: %s; `tierfs verify` lists such objects", error)
        return None
    return None if info.size == TOMBSTONE_BYTES else path


def directory_name(key: str) -> str | None:
    """The name of a directory in a listing; ``None`` for a stray one."""
    try:
        return keys.parse_component(key.rstrip("/").rpartition("/")[2])
    except FormatError:
        return None


def is_valid(path: str) -> bool:
    """Whether a file that tierfs did not write has a name that a store's path can have."""
    try:
        keys.validate_path(path)
    except InvalidInputError as error:
        _logger.warning("a file that tierfs did not write cannot be shown: %s", error)
        return False
    return True
