"""What tests encode by themselves."""

from tierfs.store.encode.pipeline import encode_chunk


def encoded_chunk(raw, plans, **options):
    """The blocks of a chunk, in memory of their own."""
    return encode_chunk(raw, plans, memoryview(bytearray(len(raw))), **options)
