"""Repair a store's descriptor, without which the store cannot be opened."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from tierfs.errors import ConflictError, CorruptionError, NotFoundError
from tierfs.format import keys
from tierfs.format.descriptor import DESCRIPTOR_BYTES_MAX, Descriptor
from tierfs.objects import connect
from tierfs.objects.checksums import put_idempotent, read_decoded
from tierfs.objects.protocol import CREATE, ObjectTier, Update
from tierfs.session.open import has_records, known_descriptor
from tierfs.session.url import Location, target_url
from tierfs.store.store import Store
from tierfs.store.tree.records import RECORD_BYTES_MAX

if TYPE_CHECKING:
    from tierfs.objects.protocol import PutMode

COMPARED_MAX = 100


def mend_descriptor(location: Location, replicas: Sequence[Store] = (), *, dry_run: bool = False) -> str:
    """Repair the descriptor of the store whose root is here, if it is damaged, or missing beside the store's records.

    Args:
        location: The root.
        replicas: Other stores. The descriptor of a copy of this store is its descriptor.
        dry_run: Change nothing.

    Returns:
        The source of the right bytes; empty if there is nothing to repair.

    Raises:
        CorruptionError: The descriptor is damaged or missing, and cannot be repaired.
        ConflictError: Another process changed it meanwhile.
        StoreError, ReadOnlyError: The object tier failed.
    """
    objects = connect(location.protocol, location.path, location.options)
    url = target_url(location.protocol, location.path)
    where = f"{url}/{keys.DESCRIPTOR}"
    mode = cast("PutMode", CREATE)
    try:
        read_decoded(objects, keys.DESCRIPTOR, DESCRIPTOR_BYTES_MAX, Descriptor.decode, where)
    except NotFoundError:
        if not has_records(objects):
            return ""
    except CorruptionError:
        mode = Update(objects.head(keys.DESCRIPTOR).version)
    else:
        return ""
    for found, source in _sources(location, url, objects, replicas):
        if not dry_run:
            try:
                put_idempotent(objects, keys.DESCRIPTOR, found, mode=mode)
            except ConflictError as error:
                raise ConflictError(f"{where} was changed in the meantime: try again", path=where) from error
        return source
    raise CorruptionError(
        f"{where} is damaged or missing, and no copy of this store was given: name one with `tierfs repair {url} --from`",
        path=where,
    )


def _sources(
    location: Location, url: str, objects: ObjectTier, replicas: Sequence[Store]
) -> Iterator[tuple[bytes, str]]:
    """Yield the right bytes of the descriptor, with their source."""
    for replica in replicas:
        if _is_copy(objects, replica.objects):
            yield replica.descriptor.encode(), replica.url
    known = known_descriptor(location, url)
    if known is not None:
        yield known.encode(), "what this host knows of the store"


def _is_copy(objects: ObjectTier, other: ObjectTier) -> bool:
    """Return whether two stores have a record in common. Each write has a random id, so other stores have none."""

    def is_in_both(key: str) -> bool:
        try:
            return objects.read(key, RECORD_BYTES_MAX)[0] == other.read(key, RECORD_BYTES_MAX)[0]
        except (NotFoundError, CorruptionError):  # deleted, or too large
            return False

    return any(is_in_both(item.key) for item in itertools.islice(objects.list(keys.TREE), COMPARED_MAX))
