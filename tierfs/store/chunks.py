"""Put one chunk into the object tier, encoded as its caller chooses. Identical bytes are sent once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from tierfs.buffers import buffers
from tierfs.digest import Buffer, digests_of
from tierfs.errors import AlreadyExistsError, CorruptionError, StoreError
from tierfs.format import keys
from tierfs.format.envelope import Block, Envelope
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.objects.checksums import checksum_for
from tierfs.objects.protocol import CREATE
from tierfs.objects.wrappers.verify import PromisedObjects
from tierfs.store.encode.contexts import NO_CONTEXT, ChunkContext, ReadRow
from tierfs.store.encode.pipeline import Encoded
from tierfs.store.read.fetch import fetch, fetch_object
from tierfs.store.read.lookup import DAMAGED, GENERATIONS_MAX, are_there, inspect
from tierfs.store.read_back import is_sound
from tierfs.store.store import Store

LOOK_BYTES_MIN = 1 << 20
_logger = logging.getLogger("tierfs.store")


class ChunkSend:
    """Encodes and sends one chunk. This class serves writers without the flusher: it uses no base chunks.

    Args:
        context: Facts about the chunk that guide its encoding.
    """

    def __init__(self, store: Store, context: ChunkContext = NO_CONTEXT) -> None:
        self._store = store
        self._context = context

    def encode(self, raw: memoryview, digest: bytes, into: memoryview) -> Encoded:
        """Encode the chunk.

        Args:
            raw: The chunk. Borrowed. A block that is stored uncompressed may remain a view of this memory.
            digest: The chunk's digest.
            into: Memory for the encoded blocks, as long as the chunk. May be ``raw`` itself if the chunk may be
                overwritten.
        """
        del digest
        return self._store.encoder.encode(raw, self._context, (), into=into, read=lambda *_: False, fetch=self._fetch)

    def putting(self, row: Row) -> AbstractContextManager[None]:
        """Return a context manager to enter around the request that sends the chunk."""
        del row
        return self._store.encoder.sending()

    def _fetch(self, row: Row, start: int, out: memoryview) -> None:
        fetch(self._store, row, [(start, out)], self._store.url)


def store_chunk(
    store: Store,
    raw: memoryview,
    sending: ChunkSend | None = None,
    *,
    into: memoryview | None = None,
    unread: set[bytes] | None = None,
) -> Row:
    """Make sure that the store holds these bytes, and return their row. Identical bytes are sent once.

    If a chunk is already stored, `tierfs.store.read_back` decides how much of it is read back. A damaged chunk is
    stored again.

    Args:
        store: The store.
        raw: 1 byte to 16 MiB. Borrowed for the call.
        sending: Encodes the bytes if they must be sent. By default they are encoded without a base.
        into: Memory for the encoded bytes, as long as ``raw``. May be ``raw`` itself if the caller no longer needs its
            content. By default a buffer is borrowed.
        unread: Digests of the chunks of the replaced file. Such a chunk is read back in full, even if this process read
            it before. The call removes its digest from the set.

    Raises:
        StoreError, CapacityError, ReadOnlyError: The object tier failed.
    """
    digests, name = digests_of(store.descriptor.digest_kind, raw)
    reread = unread is not None and name in unread
    term = store.lease_cache.ensure()
    row = store.lease_cache.find(name)
    if row is not None and not is_sound(store, row, reread=reread):
        row = None
    if row is None:
        row = _find_listed(store, name, len(raw))
        if row is None:
            with buffers().lend(len(raw)) if into is None else contextlib.nullcontext(into) as memory:
                row = _find_or_put(store, name, raw, digests, sending or ChunkSend(store), memory, reread=reread)
        store.lease_cache.learn(term, [row])
    if unread is not None:
        unread.discard(name)
    return row


def _find_listed(store: Store, digest: bytes, raw_length: int) -> Row | None:
    """Return the chunk that a manifest names for these bytes, if it and its bases are stored and sound.

    A manifest proves that a chunk may be referred to, not that the chunk still exists. These very bytes may be needed
    to heal it.
    """
    listed = store.lease_cache.find_listed(digest)
    if listed is None:
        return None
    found = inspect(store, listed.name, raw_length)
    if found is None:
        store.lease_cache.clear_damaged(listed.name)  # it is lost, and other chunks may be encoded against it
        return None
    lost = [name for name in found.bases if not are_there(store, [name])]
    for name in [listed.name] if found is DAMAGED else lost:
        store.report_damage(name)
    return found if found is not DAMAGED and not lost and is_sound(store, found) else None


def _find_or_put(
    store: Store,
    name: bytes,
    raw: memoryview,
    digests: Sequence[bytes],
    sending: ChunkSend,
    into: memoryview,
    *,
    reread: bool = False,
) -> Row:
    encoded: Encoded | None = None
    for generation in range(GENERATIONS_MAX):
        standing = _look(store, ChunkName(name, generation), len(raw))
        if standing is not None and standing is not DAMAGED:
            store.lease_cache.earn_looks()
            if is_sound(store, standing, reread=reread):
                return standing
            standing = DAMAGED
        if encoded is None:
            encoded = sending.encode(raw, name, into)
            table = [
                Block(d, codec, len(data), reason)
                for d, (codec, reason, data) in zip(digests, encoded.blocks, strict=True)
            ]
            envelope = Envelope(store.descriptor.digest_kind, name, len(raw), tuple(table), encoded.bases)
            payload: list[Buffer] = [envelope.encode(), *(data for _, _, data in encoded.blocks)]
        row = Row(ChunkName(name, generation, envelope.recipe), len(raw), envelope.stored_length, encoded.needs)
        if (standing is DAMAGED and not encoded.bases) or _is_unusable(store, row.name):
            continue
        found = _put(store, row, payload, sending)
        if found is not DAMAGED:
            return found
    raise StoreError(
        f"{store.where(keys.chunk_key(ChunkName(name)))}: {GENERATIONS_MAX} generations of this chunk are damaged or "
        "condemned: run `tierfs verify`",
        tier="object",
    )


def _look(store: Store, name: ChunkName, raw_length: int) -> Row | None:
    """Inspect the object under a name before anything is sent: see `inspect`. May skip the request and return None."""
    if _is_unusable(store, name):
        return DAMAGED
    # An endpoint without conditional create cannot report an existing object, so every name is inspected.
    # Elsewhere a small chunk is put right away, because the put costs no more than an inspection. A large chunk is put
    # right away if no look is left.
    looks = not store.objects.capabilities.conditional_create or (
        raw_length >= LOOK_BYTES_MIN and store.lease_cache.spend_look()
    )
    return inspect(store, name, raw_length) if looks else None


def _is_unusable(store: Store, name: ChunkName) -> bool:
    """Return whether a name must be neither put nor used.

    If a damaged object was removed since, its mark is cleared: a put under the same name then heals every
    record that names it.
    """
    if store.lease_cache.is_damaged(name) and not are_there(store, [name]):
        store.lease_cache.clear_damaged(name)
    return store.lease_cache.is_unusable(name)


def _put(store: Store, row: Row, payload: list[Buffer], sending: ChunkSend) -> Row:
    """Create a chunk object. Return the object that is stored afterwards, or `DAMAGED`."""
    checksum = checksum_for(store.objects.capabilities, payload)
    try:
        with sending.putting(row):
            store.objects.put(keys.chunk_key(row.name), payload, mode=CREATE, checksum=checksum)
    except (AlreadyExistsError, StoreError) as error:
        if isinstance(error, AlreadyExistsError):
            store.lease_cache.earn_looks()
        if isinstance(error, StoreError) and not error.transient:
            raise
        # Another writer was faster, or the answer to our own put was lost: the stored object decides.
        found = inspect(store, row.name, row.raw_length)
        if found is None:
            raise
        if found is DAMAGED:
            return found
        if isinstance(error, AlreadyExistsError):
            return found if is_sound(store, found) else DAMAGED
        if isinstance(store.objects, PromisedObjects) and store.objects.reads_back:
            # The wrapper reads acknowledged puts back, and this put was not acknowledged.
            return _read_back(store, found)
        return found
    store.lease_cache.note_put(row.name)
    return row


def _read_back(store: Store, row: Row) -> Row:
    """Return the row if all bytes of the object verify. Otherwise log the damage and return `DAMAGED`."""
    where = store.where(keys.chunk_key(row.name))
    try:
        with buffers().lend(row.raw_length) as out:
            fetch_object(store, row, [(0, out)], where)
    except CorruptionError as error:
        _logger.warning("a chunk was stored wrong; its bytes are stored again under another name: %s", error)
        return DAMAGED
    return row


def rescue(store: Store, row: Row, where: str, read: ReadRow | None = None) -> Row:
    """Make a chunk safe to name that may no longer be: inspect it, and store it again if it is condemned or missing.

    ``read`` reads the chunk from a tier of this host, if one holds it. ``where`` is the chunk's file, for
    errors.

    Raises:
        StoreError: The last copy of the chunk is gone. The caller must write the file again.
    """
    with buffers().lend(row.raw_length) as raw:
        return _rescue(store, row, where, read, raw)


def _rescue(store: Store, row: Row, where: str, read: ReadRow | None, raw: memoryview) -> Row:
    term = store.lease_cache.ensure()
    try:
        if not any(store.lease_cache.is_unusable(name) for name in (row.name, *row.bases)):
            found = inspect(store, row.name, row.raw_length)
            is_it = found is not None and found.stored_length == row.stored_length
            if found is not None and is_it and are_there(store, found.bases) and is_sound(store, found):
                store.lease_cache.learn(term, [found], named=True)
                return found
            if row.bases:
                store.report_damage(row.name)  # otherwise `store_chunk` below finds it again
        if read is None or not read(row, 0, raw) or digests_of(store.descriptor.digest_kind, raw)[1] != row.name.digest:
            fetch(store, row, [(0, raw)], where)
    except CorruptionError as error:
        raise StoreError(
            f"{where}: chunk {keys.chunk_key(row.name)} was collected while this writer had lost contact with the "
            "store: nothing was published; write the file again",
            path=where,
            tier="object",
        ) from error
    return store_chunk(store, raw, into=raw)
