"""Whether a chunk that the store holds already can be read. A save asks that before its manifest refers to the chunk.

A save that finds its bytes in the store sends none of them. It acknowledges an object that somebody stored at another
time, and that object may have been damaged or removed since. So the save reads it back and checks its digests:

- all of it, the first time that this writer refers to the object, and
- all of it, where the file that is replaced names the chunk: saving a file again is how a person heals it;
- else one block, drawn at random, once in the duration of a lease.

Where a request crosses a network, an object that this writer put itself counts as read: the endpoint verified its checksum,
or the writer read it back. One of its blocks is read once in the duration of a lease, as above. An object that others are
encoded against is treated in the same way, but beyond a network only one block of it is read, and none of this writer's own.
"""

from __future__ import annotations

import logging

from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import CorruptionError, FormatError
from tierfs.format import keys
from tierfs.format.envelope import block_count
from tierfs.format.manifest import Manifest, Row
from tierfs.store.read.fetch import fetch
from tierfs.store.store import Store

__all__ = ["is_sound", "is_sound_base", "replaced_chunks"]

_logger = logging.getLogger("tierfs.store")


def is_sound(store: Store, row: Row, *, reread: bool = False) -> bool:
    """Whether a chunk object may be referred to, as far as this writer has to look. One that is not is marked as damaged.

    Args:
        store: The store.
        row: The chunk object.
        reread: Read all of it, whatever was read of it before.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    lease_cache = store.lease_cache
    checked = lease_cache.checked(row.name)
    is_near = store.descriptor.endpoint.host_local
    if reread or not ((checked and checked.is_whole) or (lease_cache.is_own(row.name) and not is_near)):
        return _can_be_read(store, row, whole=True)
    if checked and store.clock.monotonic() < checked.at + store.descriptor.lease_s:
        return True
    return _can_be_read(store, row, whole=False)


def is_sound_base(store: Store, row: Row) -> bool:
    """The same for a chunk object that another one is to be encoded against."""
    if store.descriptor.endpoint.host_local:
        return is_sound(store, row)
    lease_cache = store.lease_cache
    if lease_cache.is_own(row.name) or lease_cache.checked(row.name):
        return not lease_cache.is_unusable(row.name)
    return _can_be_read(store, row, whole=False)


def replaced_chunks(store: Store, path: str) -> set[bytes]:
    """Digests of the chunks of the file at a path, if this process knows that file. Asks nobody.

    Of a file that it does not know it knows no chunks either, so it reads them back for that reason.
    """
    known = store.records.get(keys.record_key(path))
    if known is None or not isinstance(known[1], Manifest) or known[1].indirect:
        return set()
    return {row.name.digest for row in known[1].rows}


def _can_be_read(store: Store, row: Row, *, whole: bool) -> bool:
    blocks = block_count(row.raw_length)
    start, stop = 0, row.raw_length
    if not whole:
        start = int.from_bytes(store.random_bytes(4), "little") % blocks * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, stop)
    where = store.where(keys.chunk_key(row.name))
    now = store.clock.monotonic()
    try:
        with buffers().lend(stop - start) as out:
            # Copies that this host has of what it is encoded against say nothing of the object tier.
            fetch(store.without_local_tiers(), row, [(start, out)], where, exact=True)
    except (CorruptionError, FormatError) as error:
        _logger.warning("a stored chunk cannot be read, so its bytes are stored again: %s", error)
        if not store.lease_cache.is_damaged(row.name):
            store.report_damage(row.name)
        return False
    store.lease_cache.note_check(row.name, now, is_whole=whole or blocks == 1)
    return True
