"""Put one chunk into the object tier. Identical bytes travel once, others encoded as the caller has them encoded."""

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
from tierfs.store.soundness import is_sound
from tierfs.store.store import Store

__all__ = ["ChunkSend", "rescue", "store_chunk"]

LOOK_BYTES_MIN = 1 << 20
_logger = logging.getLogger("tierfs.store")


class ChunkSend:
    """One chunk on its way to the object tier: here without the flusher, encoded by itself.

    Args:
        store: The store.
        context: The facts about it.
    """

    def __init__(self, store: Store, context: ChunkContext = NO_CONTEXT) -> None:
        self._store = store
        self._context = context

    def encode(self, raw: memoryview, digest: bytes, into: memoryview) -> Encoded:
        """Encode it.

        Args:
            raw: The chunk. Borrowed; blocks that are stored as they are lie in it afterwards.
            digest: Its own.
            into: Memory for the encoded blocks, as long as the chunk; ``raw`` itself where the chunk may be overwritten.
        """
        del digest
        return self._store.encoder.encode(raw, self._context, (), into=into, read=lambda *_: False, fetch=self._fetch)

    def putting(self, row: Row) -> AbstractContextManager[None]:
        """Enter this around the request that sends the chunk."""
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
    """Make sure that the store holds these bytes, and say under which name. Identical bytes travel once.

    Of what is in the store already, `tierfs.store.soundness` says how much is read back. What is damaged is stored again.

    Args:
        store: The store.
        raw: 1 byte to 16 MiB. Borrowed for the call.
        sending: How to encode them, if they have to travel; by themselves unless it is given.
        into: Memory for what they are encoded as, as long as they are: ``raw`` itself where the caller needs them no more.
        unread: Digests of chunks of the file that is replaced, which are read back whatever was read of them before. Each is
            taken out when that was done.

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
    """The chunk that a manifest names for these bytes, if it is there, and what it is encoded against.

    A manifest tells what may be referred to, not that it was not lost since; and these bytes may be what heals it.
    """
    listed = store.lease_cache.find_listed(digest)
    if listed is None:
        return None
    found = inspect(store, listed.name, raw_length)
    if found is None:
        store.lease_cache.clear_damaged(listed.name)  # it is lost, and others may be encoded against it
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
    """The object under a name, as known before anything is sent: see `inspect`."""
    if _is_unusable(store, name):
        return DAMAGED
    # Where a put does not say that it found something, there is nothing else; else one of little costs no more than a look.
    looks = not store.objects.capabilities.conditional_create or (
        raw_length >= LOOK_BYTES_MIN and store.lease_cache.spend_look()
    )
    return inspect(store, name, raw_length) if looks else None


def _is_unusable(store: Store, name: ChunkName) -> bool:
    """Whether nothing is to be put, or found, under a name. Where a damaged object was removed, what is put heals all that names it."""
    if store.lease_cache.is_damaged(name) and not are_there(store, [name]):
        store.lease_cache.clear_damaged(name)
    return store.lease_cache.is_unusable(name)


def _put(store: Store, row: Row, payload: list[Buffer], sending: ChunkSend) -> Row:
    """Create a chunk object; return what stands there then, or `DAMAGED`."""
    checksum = checksum_for(store.objects.capabilities, payload)
    try:
        with sending.putting(row):
            store.objects.put(keys.chunk_key(row.name), payload, mode=CREATE, checksum=checksum)
    except (AlreadyExistsError, StoreError) as error:
        if isinstance(error, AlreadyExistsError):
            store.lease_cache.earn_looks()
        if isinstance(error, StoreError) and not error.transient:
            raise
        # Somebody else was faster, or it was our own put whose answer was lost: what counts is what stands there.
        found = inspect(store, row.name, row.raw_length)
        if found is None:
            raise
        if found is DAMAGED:
            return found
        if isinstance(error, AlreadyExistsError):
            return found if is_sound(store, found) else DAMAGED
        if isinstance(store.objects, PromisedObjects) and store.objects.reads_back:
            # An acknowledged chunk is read back, and nobody has read this one.
            return _read_back(store, found)
        return found
    store.lease_cache.note_put(row.name)
    return row


def _read_back(store: Store, row: Row) -> Row:
    """A chunk object with all its bytes right; `DAMAGED`, reported, if they are not."""
    where = store.where(keys.chunk_key(row.name))
    try:
        with buffers().lend(row.raw_length) as out:
            fetch_object(store, row, [(0, out)], where)
    except CorruptionError as error:
        _logger.warning("a chunk was stored wrong, the bytes are stored again beside it: %s", error)
        return DAMAGED
    return row


def rescue(store: Store, row: Row, where: str, read: ReadRow | None = None) -> Row:
    """Refer to a chunk that is not known to be safe any more: look again, and store it anew where it is condemned or gone.

    Args:
        store: The store.
        row: The chunk.
        where: Its file, for errors.
        read: Gets at it where it lies on this host.

    Raises:
        StoreError: It is gone, and with it the only copy: the caller has to write the file again.
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
                store.report_damage(row.name)  # or it is found again below
        if read is None or not read(row, 0, raw) or digests_of(store.descriptor.digest_kind, raw)[1] != row.name.digest:
            fetch(store, row, [(0, raw)], where)
    except CorruptionError as error:
        raise StoreError(
            f"{where}: chunk {keys.chunk_key(row.name)} was collected while this writer was out of touch with the store: "
            "nothing was published; write the file again",
            path=where,
            tier="object",
        ) from error
    return store_chunk(store, raw, into=raw)
