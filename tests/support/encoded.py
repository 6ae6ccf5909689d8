"""Encode chunks for tests."""

from tierfs.digest import digests_of
from tierfs.format import keys
from tierfs.format.envelope import Block, Envelope
from tierfs.format.manifest import Row
from tierfs.store.encode.pipeline import Encoded, encode_chunk


def encoded_chunk(raw, plans, **options):
    """Return the encoded blocks of a chunk, in new memory."""
    return encode_chunk(raw, plans, memoryview(bytearray(len(raw))), **options)


def put_encoded(store, raw, encoded: Encoded) -> Row:
    """Put a chunk into a store as it was encoded, and return its row."""
    digests, name = digests_of(store.descriptor.digest_kind, raw)
    table = [
        Block(d, codec, len(data), reason) for d, (codec, reason, data) in zip(digests, encoded.blocks, strict=True)
    ]
    envelope = Envelope(store.descriptor.digest_kind, name, len(raw), tuple(table), encoded.bases)
    row = Row(keys.ChunkName(name, 0, envelope.recipe), len(raw), envelope.stored_length, encoded.needs)
    store.objects.put(keys.chunk_key(row.name), [envelope.encode(), *(data for _, _, data in encoded.blocks)])
    return row
