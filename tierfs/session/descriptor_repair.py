"""Repair a store's descriptor, without which the store cannot be opened."""

from __future__ import annotations

from tierfs.errors import ConflictError, CorruptionError, NotFoundError
from tierfs.format import keys
from tierfs.format.correction import correct_descriptor
from tierfs.format.descriptor import DESCRIPTOR_BYTES_MAX, Descriptor
from tierfs.objects import connect
from tierfs.objects.checksums import put_idempotent, read_decoded
from tierfs.objects.protocol import Update
from tierfs.session.open import known_descriptor
from tierfs.session.url import Location, target_url


def mend_descriptor(location: Location, *, dry_run: bool = False) -> str:
    """Repair the descriptor of the store whose root is here, if it is damaged.

    Args:
        location: The root.
        dry_run: Change nothing.

    Returns:
        The source of the right bytes; empty if there is nothing to repair.

    Raises:
        CorruptionError: The descriptor is damaged, and cannot be repaired.
        ConflictError: Another process changed it meanwhile.
        StoreError, ReadOnlyError: The object tier failed.
    """
    objects = connect(location.protocol, location.path, location.options)
    url = target_url(location.protocol, location.path)
    where = f"{url}/{keys.DESCRIPTOR}"
    try:
        read_decoded(objects, keys.DESCRIPTOR, DESCRIPTOR_BYTES_MAX, Descriptor.decode, where)
    except NotFoundError:
        return ""
    except CorruptionError:
        data, info = objects.read(keys.DESCRIPTOR, DESCRIPTOR_BYTES_MAX)
        found, source = correct_descriptor(data, where), "its own bytes"
        if found is None and (known := known_descriptor(location, url)) is not None:
            found, source = known.encode(), "what this host knows of the store"
        if found is None:
            raise
        if not dry_run:
            try:
                put_idempotent(objects, keys.DESCRIPTOR, found, mode=Update(info.version))
            except ConflictError as error:
                raise ConflictError(f"{where} was changed in the meantime: try again", path=where) from error
        return source
    return ""
