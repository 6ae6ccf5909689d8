"""Whether a stored chunk can be read. A save checks that before its manifest refers to the chunk.

A save whose bytes are already in the store does not send them. It relies on an object that was stored earlier and may
have been damaged or removed since. So the save reads the object back and checks its digests:

- the whole object, the first time that this writer refers to it;
- the whole object, if the replaced file names the chunk, because a person heals a file by saving it again;
- else one block, drawn at random, once in the duration of a lease.

If the object tier is not a directory of this host, an object that this writer put counts as read, because the endpoint
verified its checksum or the writer read it back. One of its blocks is still read once in the duration of a lease.

The same rules hold for an object that is used as a base, if the object tier is a directory of this host.
Elsewhere one block of a base is read, once, and none if this writer put the object.
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

_logger = logging.getLogger("tierfs.store")


def is_sound(store: Store, row: Row, *, reread: bool = False) -> bool:
    """Return whether a manifest may refer to a chunk object. Read as much of it back as the rules demand.

    With ``reread`` all of it is read, even if it was read before. A chunk object that cannot be read is marked as
    damaged.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    facts = store.lease_cache.facts(row.name)
    is_near = store.descriptor.endpoint.host_local
    if reread or not (facts.is_checked or (facts.is_own and not is_near)):
        return _can_be_read(store, row, whole=True)
    if facts.checked_s is not None and store.clock.monotonic() < facts.checked_s + store.descriptor.lease_s:
        return True
    return _can_be_read(store, row, whole=False)


def is_sound_base(store: Store, row: Row) -> bool:
    """Return whether a chunk may be encoded against this chunk object. Raises as `is_sound` does."""
    if store.descriptor.endpoint.host_local:
        return is_sound(store, row)
    facts = store.lease_cache.facts(row.name)
    if facts.is_own or facts.checked_s is not None:
        return not store.lease_cache.is_unusable(row.name)
    return _can_be_read(store, row, whole=False)


def replaced_chunks(store: Store, path: str) -> set[bytes]:
    """Return the digests of the chunks of the file at a path, if this process knows its record. Sends no request.

    If it does not know the record, it has not read the chunks either, so `is_sound` reads them for that reason.
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
            # Without the local tiers: their copies of the bases would hide damage in the object tier.
            fetch(store.without_local_tiers(), row, [(start, out)], where, exact=True)
    except (CorruptionError, FormatError) as error:
        _logger.warning("a stored chunk cannot be read, so its bytes are stored again: %s", error)
        if not store.lease_cache.is_damaged(row.name):
            store.report_damage(row.name)
        return False
    store.lease_cache.note_check(row.name, now, is_whole=whole or blocks == 1)
    return True
