"""Look up chunk objects by their envelopes: which objects hold a content, and whether they are whole."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from tierfs.digest import Buffer
from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format import keys
from tierfs.format.envelope import ENVELOPE_BYTES_MAX, Envelope, block_count, envelope_bytes
from tierfs.format.keys import NO_RECIPE, ChunkName
from tierfs.format.manifest import Row
from tierfs.objects.checksums import twice
from tierfs.objects.protocol import objects_below
from tierfs.store.store import Store

GENERATIONS_MAX = 64
DAMAGED = Row(ChunkName(b""), 0, 0)
"""The result of `inspect` for a chunk object that exists and is not whole."""
_logger = logging.getLogger("tierfs.store")


def find_chunk(store: Store, row: Row, where: str) -> Row:
    """Return the chunk object that holds the content of a draft's row.

    Raises:
        CorruptionError: No object holds it.
        StoreError, ReadOnlyError: The object tier failed.
    """
    for generation in range(GENERATIONS_MAX):
        candidate = ChunkName(row.name.digest, generation)
        if not store.lease_cache.is_unusable(candidate):
            found = inspect(store, candidate, row.raw_length)
            if found is None:
                break
            if found is not DAMAGED:
                return found
    # The object may be encoded against others. Its key does not follow from the content, so list the candidates.
    for name in [name for name in names_beside(store, row.name.digest) if name.digest == row.name.digest]:
        if name.recipe != NO_RECIPE and not store.lease_cache.is_unusable(name):
            found = inspect(store, name, row.raw_length)
            if found is not None and found is not DAMAGED and are_there(store, found.bases):
                return found
    raise CorruptionError(f"{where}: no tier holds chunk {row.name.digest.hex()}: write the file again", path=where)


def names_beside(store: Store, content: bytes) -> Iterator[ChunkName]:
    """Yield the names of all chunk objects in a content's listing prefix: their digests begin with the same byte.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    # The prefix ends at a directory: in a filesystem, a prefix that ends within a name lists nothing.
    prefix = keys.chunk_key(ChunkName(content)).rpartition("/")[0]
    for item in objects_below(store.objects, f"{prefix}/"):
        with contextlib.suppress(FormatError):  # a stray object
            yield keys.parse_chunk_key(item.key, store.descriptor.digest_kind)


def inspect(store: Store, name: ChunkName, raw_length: int) -> Row | None:
    """Return the row of the object under a chunk's name, by its envelope. Its blocks are not read.

    Returns:
        None if there is no object. `DAMAGED`, after a log message, if the object or a base of it is not a whole chunk.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    key = keys.chunk_key(name)

    def read() -> tuple[Envelope, int]:
        head_bytes = envelope_bytes(store.descriptor.digest_kind, block_count(raw_length))
        if name.recipe != NO_RECIPE:
            head_bytes = min(store.objects.head(key).size, ENVELOPE_BYTES_MAX)
        head = bytearray(head_bytes)
        info = store.objects.get(key, [(0, memoryview(head))])
        envelope = Envelope.decode(head, store.where(key), stored_length=info.size)
        check_envelope(envelope, name, store.where(key))
        return envelope, info.size

    try:
        envelope, size = twice(read)
    except NotFoundError:
        return None
    except (CorruptionError, FormatError) as error:
        _logger.warning("a stored chunk is damaged: %s", error)
        return DAMAGED
    needs = dict.fromkeys(base.name for base in envelope.bases)
    for base in envelope.bases:
        if base.name.recipe != NO_RECIPE:
            found = inspect(store, base.name, base.raw_length)
            if found is None or found is DAMAGED:
                _logger.warning("%s is encoded against a chunk that is damaged or missing", store.where(key))
                return DAMAGED
            needs |= dict.fromkeys(found.bases)
    return Row(name, raw_length, size, tuple(needs))


def are_there(store: Store, names: Iterable[ChunkName]) -> bool:
    """Return whether objects exist under all these names.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    try:
        for name in names:
            store.objects.head(keys.chunk_key(name))
    except NotFoundError:
        return False
    return True


def read_envelope(store: Store, row: Row, where: str) -> Envelope:
    """Return the envelope of a chunk object.

    Raises:
        CorruptionError: The object is missing, truncated or damaged.
        FormatError: A newer tierfs wrote the object.
        StoreError, ReadOnlyError: The object tier failed.
    """
    place = f"{where}: chunk {keys.chunk_key(row.name)} in the object tier"
    head = memoryview(bytearray(min(row.stored_length, ENVELOPE_BYTES_MAX)))

    def read() -> Envelope:
        info = store.objects.get(keys.chunk_key(row.name), [(0, head)])
        return check_head(head, row, info.size, place)

    try:
        return twice(read)
    except NotFoundError:
        raise CorruptionError(f"{place} is missing", path=where, tier="object") from None


def check_head(head: Buffer, row: Row, size: int, place: str) -> Envelope:
    """Decode an envelope, and check that it is that of the row's chunk.

    ``head`` holds the first bytes of the object, ``size`` is the object's length in bytes.

    Raises:
        CorruptionError: The envelope is damaged, or is that of another chunk.
        FormatError: A newer tierfs wrote the object.
    """
    envelope = Envelope.decode(head, place, stored_length=size)
    if (envelope.digest, envelope.recipe, envelope.raw_length, size) != (
        row.name.digest,
        row.name.recipe,
        row.raw_length,
        row.stored_length,
    ):
        raise CorruptionError(f"{place} holds another chunk: objects were swapped", path=place, tier="object")
    return envelope


def check_envelope(envelope: Envelope, name: ChunkName, where: str) -> None:
    """Check that an envelope belongs to the chunk that the object is named after.

    Raises:
        CorruptionError: The envelope belongs to another chunk.
    """
    if (envelope.digest, envelope.recipe) != (name.digest, name.recipe):
        raise CorruptionError(f"{where} holds another chunk: objects were swapped", path=where, tier="object")
