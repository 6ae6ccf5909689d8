"""Put one chunk into the object tier, and get verified bytes out of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tierfs import digest
from tierfs.codec import decode_block, encode_block
from tierfs.digest import BLOCK_BYTES, Buffer
from tierfs.errors import AlreadyExistsError, CorruptionError, FormatError, NotFoundError, StoreError
from tierfs.flush.draft import local_name
from tierfs.format import keys
from tierfs.format.envelope import Block, Envelope, block_count, envelope_bytes
from tierfs.format.keys import NO_RECIPE, ChunkName
from tierfs.format.manifest import Row
from tierfs.format.ranges import BlockTargets
from tierfs.objects.protocol import CREATE, checksum_for
from tierfs.store.store import Store

__all__ = ["fetch", "find_chunk", "rescue", "store_chunk"]

GENERATIONS_MAX = 64
_logger = logging.getLogger("tierfs.store")


def store_chunk(store: Store, raw: memoryview) -> Row:
    """Make sure that the store holds these bytes, and say under which name. Identical bytes travel once.

    Args:
        store: The store.
        raw: 1 byte to 16 MiB. Borrowed for the call.

    Raises:
        StoreError, CapacityError, ReadOnlyError: The object tier failed.
    """
    kind = store.descriptor.digest_kind
    blocks = [raw[at : at + BLOCK_BYTES] for at in range(0, len(raw), BLOCK_BYTES)]
    digests = [digest.hash_bytes(kind, block) for block in blocks]
    name = digest.combine(kind, len(raw), digests)
    term = store.presence.ensure()
    row = store.presence.find(name)
    if row is None:
        row = _find_or_put(store, name, blocks, digests)
        store.presence.learn(term, [row])
    return row


def _find_or_put(store: Store, name: bytes, blocks: Sequence[memoryview], digests: Sequence[bytes]) -> Row:
    raw_length = sum(map(len, blocks))
    envelope: Envelope | None = None
    payload: list[Buffer] = []
    for generation in range(GENERATIONS_MAX):
        candidate = ChunkName(name, generation)
        if store.presence.is_unusable(candidate):
            continue
        found = _inspect(store, candidate, raw_length)
        if found is None:
            if envelope is None:
                encoded = [encode_block(block) for block in blocks]
                table = [Block(d, codec, len(data)) for d, (codec, data) in zip(digests, encoded, strict=True)]
                envelope = Envelope(store.descriptor.digest_kind, name, raw_length, tuple(table))
                payload = [envelope.encode(), *(data for _, data in encoded)]
            found = _put(store, candidate, envelope, payload)
        if found != _DAMAGED:
            return Row(candidate, raw_length, found)
    raise StoreError(
        f"{store.where(keys.chunk_key(ChunkName(name)))}: {GENERATIONS_MAX} generations of this chunk are damaged or "
        "condemned: run `tierfs verify`",
        tier="object",
    )


_DAMAGED = -1


def _inspect(store: Store, name: ChunkName, raw_length: int) -> int | None:
    """Stored length of a chunk object if it is there and whole; `_DAMAGED`, reported, if it is there and not."""
    kind = store.descriptor.digest_kind
    key = keys.chunk_key(name)
    head = bytearray(envelope_bytes(kind, block_count(raw_length)))
    try:
        info = store.objects.get(key, [(0, memoryview(head))])
        envelope = Envelope.decode(head, store.where(key), stored_length=info.size)
        if envelope.digest != name.digest:
            raise CorruptionError(f"{store.where(key)}: holds another chunk", path=key)
    except NotFoundError:
        return None
    except (CorruptionError, FormatError) as error:
        _logger.warning("a stored chunk is damaged, the bytes are stored again beside it: %s", error)
        return _DAMAGED
    return info.size


def _put(store: Store, name: ChunkName, envelope: Envelope, payload: list[Buffer]) -> int:
    """Create a chunk object; return the stored length of what stands there then, or `_DAMAGED`."""
    checksum = checksum_for(store.objects.capabilities, payload)
    try:
        store.objects.put(keys.chunk_key(name), payload, mode=CREATE, checksum=checksum)
    except (AlreadyExistsError, StoreError) as error:
        if isinstance(error, StoreError) and not error.transient:
            raise
        # Somebody else was faster, or it was our own put whose answer was lost: what counts is what stands there.
        found = _inspect(store, name, envelope.raw_length)
        if found is None:
            raise
        return found
    return envelope.stored_length


def fetch(store: Store, row: Row, start: int, out: memoryview, where: str) -> None:
    """Copy verified bytes of one chunk into ``out``, from the nearest tier that has them.

    A first mismatch is read again once, because a bit may have flipped on the way; a second one is an error.

    Args:
        store: The store.
        row: The chunk.
        start: First byte wanted, counted in the raw chunk.
        out: Where to; its length says how many.
        where: What file the chunk belongs to, for errors.

    Raises:
        CorruptionError: The object is missing, cut short or damaged; ``out`` is undefined.
        FormatError: Written by a newer tierfs.
        StoreError, ReadOnlyError: The object tier failed.
    """
    if store.tiers is None:
        _fetch_verified(store, row, start, out, where)
        return
    name = local_name(store.descriptor.digest_kind, row.name.digest)

    def fetch_from(offset: int, target: memoryview) -> None:
        _fetch_verified(store, row, offset, target, where)

    store.tiers.cache.read_through(name, row.raw_length, start, out, fetch_from)


def find_chunk(store: Store, row: Row, where: str) -> Row:
    """The chunk object that holds what a row of a draft names.

    Raises:
        CorruptionError: There is none.
        StoreError, ReadOnlyError: The object tier failed.
    """
    for generation in range(GENERATIONS_MAX):
        candidate = ChunkName(row.name.digest, generation)
        if not store.presence.is_unusable(candidate):
            found = _inspect(store, candidate, row.raw_length)
            if found is None:
                break
            if found != _DAMAGED:
                return Row(candidate, row.raw_length, found)
    raise CorruptionError(
        f"{where}: chunk {row.name.digest.hex()} is in no tier: the file has to be written again", path=where
    )


def _fetch_verified(store: Store, row: Row, start: int, out: memoryview, where: str) -> None:
    if not row.stored_length:
        row = find_chunk(store, row, where)  # of a draft that was opened before it was published
    try:
        _fetch(store, row, start, out, where)
    except CorruptionError as error:
        _logger.warning("reading a chunk again after a mismatch: %s", error)
        try:
            _fetch(store, row, start, out, where)
        except CorruptionError:
            # The next save of these bytes stores them anew beside the damaged object.
            store.presence.distrust(row.name)
            raise


def _fetch(store: Store, row: Row, start: int, out: memoryview, where: str) -> None:
    if row.bases or row.name.recipe != NO_RECIPE:
        raise FormatError(f"{where}: a chunk encoded against others: use a newer tierfs", path=where)
    key = keys.chunk_key(row.name)
    place = f"{where}: chunk {key} in the object tier"
    try:
        _fetch_object(store, key, row, start, out, place)
    except NotFoundError:
        raise CorruptionError(
            f"{place} is missing: restore it from another copy of the store, or delete the file; `tierfs verify` lists "
            "what else is damaged",
            path=where,
            tier="object",
        ) from None
    except CorruptionError as error:
        if str(error).startswith(place):
            raise
        # What the object tier itself finds out, an object cut short for example, names the key alone.
        raise CorruptionError(f"{place}: {error}", path=where, tier="object") from error


def _fetch_object(store: Store, key: str, row: Row, start: int, out: memoryview, place: str) -> None:
    kind = store.descriptor.digest_kind
    head = memoryview(bytearray(envelope_bytes(kind, block_count(row.raw_length))))
    targets = BlockTargets(row.raw_length, start, out)
    if row.stored_length == len(head) + row.raw_length:
        # Nothing in it is compressed, so every block's place is known and whole blocks go straight to the caller.
        pieces = [(len(head) + index * BLOCK_BYTES, targets.view(index)) for index in targets.blocks]
        info = store.objects.get(key, [(0, head), *pieces])
        envelope = _check(head, row, info.size, place)
    else:
        info = store.objects.get(key, [(0, head)])
        envelope = _check(head, row, info.size, place)
        sizes = [block.encoded_length for block in envelope.blocks]
        offset = len(head) + sum(sizes[: targets.blocks.start])
        encoded = memoryview(bytearray(sum(sizes[index] for index in targets.blocks)))
        store.objects.get(key, [(offset, encoded)], version=info.version)
        at = 0
        for index in targets.blocks:
            piece = encoded[at : at + sizes[index]]
            decode_block(envelope.blocks[index].codec, piece, targets.view(index), place)
            at += sizes[index]
    for index in targets.blocks:
        if digest.hash_bytes(kind, targets.view(index)) != envelope.blocks[index].digest:
            raise CorruptionError(
                f"{place} is damaged: block {index} does not have its digest", path=place, tier="object"
            )
    targets.finish()


def _check(head: memoryview, row: Row, size: int, place: str) -> Envelope:
    envelope = Envelope.decode(head, place, stored_length=size)
    if (envelope.digest, envelope.recipe, envelope.raw_length, size) != (
        row.name.digest,
        row.name.recipe,
        row.raw_length,
        row.stored_length,
    ):
        raise CorruptionError(f"{place} holds another chunk: objects were swapped", path=place, tier="object")
    if envelope.bases:
        raise FormatError(f"{place}: encoded against other chunks: use a newer tierfs", path=place)
    return envelope


def rescue(store: Store, row: Row, where: str) -> Row:
    """Refer to a chunk that is not known to be safe any more: look again, and store it anew where it is condemned.

    Raises:
        StoreError: It is gone, and with it the only copy: the caller has to write the file again.
    """
    raw = memoryview(bytearray(row.raw_length))
    term = store.presence.ensure()
    try:
        if not store.presence.is_unusable(row.name):
            found = _inspect(store, row.name, row.raw_length)
            if found == row.stored_length:
                store.presence.learn(term, [row])
                return row
        fetch(store, row, 0, raw, where)
    except CorruptionError as error:
        raise StoreError(
            f"{where}: chunk {keys.chunk_key(row.name)} was collected while this writer was out of touch with the store: "
            "nothing was published; write the file again",
            path=where,
            tier="object",
        ) from error
    return store_chunk(store, raw)
