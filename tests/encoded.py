"""What tests encode by themselves."""

from tierfs.buffers import fresh
from tierfs.store.desks import desks
from tierfs.store.encoding import encode_chunk, moved


def encoded_chunk(raw, plans, **options):
    """The blocks of a chunk, in memory of their own."""
    with desks().lend() as desk:
        return moved(encode_chunk(raw, plans, desk, **options), fresh(len(raw)))
