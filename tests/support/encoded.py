"""Encode chunks for tests."""

from tierfs.store.encode.pipeline import encode_chunk


def encoded_chunk(raw, plans, **options):
    """Return the encoded blocks of a chunk, in new memory."""
    return encode_chunk(raw, plans, memoryview(bytearray(len(raw))), **options)
