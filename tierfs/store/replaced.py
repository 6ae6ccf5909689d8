"""Removes shard files of saves that another save to the same directory replaced.

Every save writes new files and then replaces the checkpoint's metadata, so repeated saves to one directory would
accumulate files. A file that the metadata does not name is removed one grace after this process first saw it unnamed.
Until then a reader of the earlier checkpoint may need it. docs/reference/checkpoint-format.md, "Writing", step 4.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container

from tierfs.errors import ConflictError, NotFoundError, TierfsError
from tierfs.objects.protocol import ObjectInfo
from tierfs.store.store import Store
from tierfs.store.tree.delete import bury
from tierfs.store.tree.records import observe_listed
from tierfs.store.tree.walk import live_records

DIRECTORIES_MAX = 1000
_logger = logging.getLogger("tierfs.store")


def remove_replaced(
    store: Store, directory: str, named: Container[str], part: Container[str], announced: Callable[[], Container[str]]
) -> int:
    """Remove files that a directory's checkpoint has not named for a grace, as far as this process saw.

    Args:
        store: The store.
        directory: Directory in which a checkpoint was just published in place of another.
        named: Names of the files of the new checkpoint.
        part: Keys that mark a shard file. A file without one of them in its manifest's metadata is not touched.
        announced: Returns the names of the files of announced saves. Called only if there is something to remove.

    Returns:
        The number of removed files.

    Raises:
        StoreError, ReadOnlyError: The directory cannot be listed.
        CorruptionError, FormatError: Raised by ``announced``.
    """
    listed = live_records(store, directory, deep=False)
    others = {info.key: (path, info) for path, info in listed if path.rpartition("/")[2] not in named}
    now = store.clock.monotonic()
    with store.replaced_lock:
        before = store.replaced_since.pop(directory, {})
        store.replaced_since[directory] = since = {key: before.get(key, now) for key in others}
        if len(store.replaced_since) > DIRECTORIES_MAX:
            del store.replaced_since[next(iter(store.replaced_since))]
        over = [others[key] for key, seen in since.items() if now - seen >= store.descriptor.grace_s]
    kept = announced() if over else ()
    return sum(_remove(store, path, info, part) for path, info in over if path.rpartition("/")[2] not in kept)


def _remove(store: Store, path: str, info: ObjectInfo, part: Container[str]) -> bool:
    try:
        found = observe_listed(store, path, info)
        if found.manifest is None or not any(name in part for name in found.manifest.metadata):
            return False
        bury(store, found)
    except (ConflictError, NotFoundError):
        return False  # another client removed or changed it
    except TierfsError as error:
        _logger.info(
            "%s was replaced, but could not be removed; it stays until the next save: %s", store.where(path), error
        )
        return False
    _logger.info("removed %s: another save replaced it", store.where(path))
    return True
