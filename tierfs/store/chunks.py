"""Put one chunk into the object tier, encoded as its caller chooses. Identical bytes are sent once.

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

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tierfs.buffers import buffers
from tierfs.clock import Pace
from tierfs.digest import BLOCK_BYTES, Buffer, combine, digests_of
from tierfs.errors import AlreadyExistsError, CorruptionError, FormatError, StoreError
from tierfs.format import keys
from tierfs.format.envelope import Block, Envelope, block_count
from tierfs.format.keys import NO_RECIPE, ChunkName
from tierfs.format.manifest import Manifest, Row
from tierfs.objects.checksums import checksum_for
from tierfs.objects.protocol import CREATE
from tierfs.objects.wrappers.verify import PromisedObjects
from tierfs.store.encode.pipeline import Bases, Encoded, Pressure, SourcePiece
from tierfs.store.encode.tensors import NO_CONTEXT, ChunkContext
from tierfs.store.read.fetch import fetch, fetch_object
from tierfs.store.read.lookup import DAMAGED, GENERATIONS_MAX, are_there, inspect
from tierfs.store.store import Store

if TYPE_CHECKING:
    from tierfs.host.chunk_sources import ChunkSources


LOOK_BYTES_MIN = 1 << 20
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


@dataclass(frozen=True, slots=True)
class SendPlan:
    """How to encode and send one chunk.

    Attributes:
        context: Facts about the chunk.
        rows: The stored chunks of its file, to which the context's sources refer by index; ``None`` for a chunk that is
            not stored yet.
        local: Copies of chunks on this host; ``None`` if the chunk is encoded by itself.
        pace: Limits the bytes per second.
        pressure: Whether the chunk has to be sent soon, and may be sent raw for that.
    """

    context: ChunkContext = NO_CONTEXT
    rows: Sequence[Row | None] = ()
    local: ChunkSources | None = None
    pace: Pace | None = None
    pressure: Pressure = "none"


def store_chunk(
    store: Store,
    raw: memoryview,
    context: ChunkContext = NO_CONTEXT,
    *,
    into: memoryview | None = None,
    pressure: Pressure = "none",
) -> Row:
    """Make sure that the store holds these bytes, and return their row. Identical bytes are sent once.

    If a chunk is already stored, `is_sound` decides how much of it is read back. A damaged chunk is
    stored again.

    Args:
        raw: 1 byte to 16 MiB. Borrowed for the call.
        context: Facts about the chunk that guide its encoding.
        into: Memory for the encoded bytes, as long as ``raw``. May be ``raw`` itself if the caller no longer needs its
            content. By default a buffer is borrowed.
        pressure: See `SendPlan`.

    Raises:
        StoreError, CapacityError, ReadOnlyError: The object tier failed.
    """
    digests, _ = digests_of(store.descriptor.digest_kind, raw)
    with buffers().lend(len(raw)) if into is None else contextlib.nullcontext(into) as memory:
        return send_chunk(store, raw, digests, SendPlan(context, pressure=pressure), memory)[0]


def send_chunk(
    store: Store, raw: memoryview, digests: Sequence[bytes], plan: SendPlan, into: memoryview
) -> tuple[Row, bool]:
    """Do the work of `store_chunk` for a chunk whose blocks have these digests.

    Returns:
        The row, and whether the bytes were sent.
    """
    name = combine(store.descriptor.digest_kind, len(raw), digests)
    unread = plan.context.unread
    reread = unread is not None and name in unread
    is_sent = False
    term = store.lease_cache.ensure()
    row = store.lease_cache.find(name)
    if row is not None and not is_sound(store, row, reread=reread):
        row = None
    if row is None:
        row = _find_listed(store, name, len(raw))
        if row is None:
            row, is_sent = _find_or_put(store, name, raw, digests, plan, into, reread=reread)
        store.lease_cache.learn(term, [row])
    if unread is not None:
        unread.discard(name)
    return row, is_sent


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
    plan: SendPlan,
    into: memoryview,
    *,
    reread: bool,
) -> tuple[Row, bool]:
    encoded: Encoded | None = None
    for generation in range(GENERATIONS_MAX):
        standing = _look(store, ChunkName(name, generation), len(raw))
        if standing is not None and standing is not DAMAGED:
            store.lease_cache.earn_looks()
            if is_sound(store, standing, reread=reread):
                return standing, encoded is not None
            standing = DAMAGED
        if encoded is None:
            encoded = _encode(store, name, raw, plan, into)
            table = [
                Block(d, codec, len(data), reason)
                for d, (codec, reason, data) in zip(digests, encoded.blocks, strict=True)
            ]
            envelope = Envelope(store.descriptor.digest_kind, name, len(raw), tuple(table), encoded.bases)
            payload: list[Buffer] = [envelope.encode(), *(data for _, _, data in encoded.blocks)]
        row = Row(ChunkName(name, generation, envelope.recipe), len(raw), envelope.stored_length, encoded.needs)
        if (standing is DAMAGED and not encoded.bases) or _is_unusable(store, row.name):
            continue
        found = _put(store, row, payload, plan.pace)
        if found is not DAMAGED:
            return found, True
    raise StoreError(
        f"{store.where(keys.chunk_key(ChunkName(name)))}: {GENERATIONS_MAX} generations of this chunk are damaged or "
        "condemned: run `tierfs verify`",
        tier="object",
    )


def _encode(store: Store, digest: bytes, raw: memoryview, plan: SendPlan, into: memoryview) -> Encoded:
    """Encode a chunk, against those bases and sources of the plan that it may need."""
    context, chain_max = plan.context, store.descriptor.chain_max
    if store.lease_cache.is_lost(ChunkName(digest)):
        # Other chunks may be encoded against the lost chunk. Only a chunk that is encoded by itself heals them.
        context = replace(context, base=None, sources=())
    if context.base is not None and not _may_need(store, context.base, digest, chain_max - 1):
        context = replace(context, base=None)
    sources = [(plan.rows[part.chunk], part) for part in context.sources]
    pieces = [
        SourcePiece(row, part.offset, part.length)
        for row, part in sources
        if row is not None and row.stored_length and _may_need(store, row, digest, chain_max)
    ]
    bases = BaseReader(store, plan.local)
    found = pieces if len(pieces) == len(sources) else ()
    return store.encoder.encode(raw, context, found, into=into, bases=bases, pressure=plan.pressure)


def _may_need(store: Store, row: Row, digest: bytes, steps_max: int) -> bool:
    """Return whether the chunk with this digest may be encoded against the chunk of a row.

    It may not if the row is the chunk itself, or if the row or one of its bases is damaged or may be deleted at any
    time. The chain from the row to chunks that are encoded by themselves has at most ``steps_max`` steps. A row only
    tells whether its bases are encoded by themselves, so longer chains than one step are refused.
    """
    steps = 0 if not row.bases else 1 if all(name.recipe == NO_RECIPE for name in row.bases) else 2
    return (
        row.name.digest != digest
        and steps <= min(steps_max, 1)
        and not any(store.lease_cache.is_unusable(name) for name in (row.name, *row.bases))
    )


class BaseReader(Bases):
    """See `Bases`.

    Args:
        store: The store, without local tiers.
        local: Copies on this host; ``None`` if there are none.
    """

    def __init__(self, store: Store, local: ChunkSources | None) -> None:
        self._store = store
        self._local = local

    def read_source(self, row: Row, out: memoryview) -> bool:
        return self._local is not None and self._local.read_whole(row, out) is not None

    def read_base(self, row: Row, out: memoryview) -> bool:
        return self.read_source(row, out) and is_sound_base(self._store, row)

    def fetch(self, row: Row, out: memoryview) -> None:
        fetch(self._store, row, [(0, out)], self._store.url)


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


def _put(store: Store, row: Row, payload: list[Buffer], pace: Pace | None) -> Row:
    """Create a chunk object. Return the object that is stored afterwards, or `DAMAGED`."""
    checksum = checksum_for(store.objects.capabilities, payload)
    try:
        with store.encoder.sending(row.stored_length):
            if pace is not None:
                pace.take(row.stored_length)
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


def rescue(store: Store, row: Row, where: str, local: ChunkSources | None = None) -> Row:
    """Make a chunk safe to name that may no longer be: inspect it, and store it again if it is condemned or missing.

    ``local`` finds copies of the chunk on this host. ``where`` is the chunk's file, for errors.

    Raises:
        StoreError: The last copy of the chunk is gone. The caller must write the file again.
    """
    with buffers().lend(row.raw_length) as raw:
        return _rescue(store, row, where, local, raw)


def _rescue(store: Store, row: Row, where: str, local: ChunkSources | None, raw: memoryview) -> Row:
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
        if local is None or local.read_whole(row, raw) is None:
            fetch(store, row, [(0, raw)], where)
    except CorruptionError as error:
        raise StoreError(
            f"{where}: chunk {keys.chunk_key(row.name)} was collected while this writer had lost contact with the "
            "store: nothing was published; write the file again",
            path=where,
            tier="object",
        ) from error
    return store_chunk(store, raw, into=raw)
