"""What tests encode by themselves."""

from tierfs.store.encode.desks import desks
from tierfs.store.encode.pipeline import encode_chunk


def encoded_chunk(raw, plans, **options):
    """The blocks of a chunk, in memory of their own."""
    with desks().lend() as desk:
        blocks = encode_chunk(raw, plans, desk, **options)
        return [block._replace(data=memoryview(bytes(block.data))) for block in blocks]
