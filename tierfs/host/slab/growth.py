"""How large the next segment of a process is. Pure."""

from __future__ import annotations

from tierfs.digest import CHUNK_BYTES
from tierfs.host.slab.table.table import Layout

__all__ = ["CHUNKS_BUDGET_BYTES", "FIRST_DATA_BYTES", "TRANSIT_BYTES", "largest", "next_layout", "wished_layout"]

# A store that holds a few small files takes this much shared memory.
FIRST_DATA_BYTES = 2 << 20

# Whole chunks, of which nobody knows how many follow, begin with so much, because each segment has its descriptors.
CHUNKS_DATA_BYTES = 64 << 20

# Not worth a file of its own, unless somebody asks for just that much. A segment that whole chunks fill has so much more, for what
# comes with them: a shard file's header would need another segment.
SMALL_BYTES = 1 << 20

# The least budget for files of any length: for a chunk, and something small.
CHUNKS_BUDGET_BYTES = Layout.for_data(CHUNK_BYTES + SMALL_BYTES).size

# The budget of a process that hands chunks on while the ram tier is off: nothing stays there.
TRANSIT_BYTES = 128 << 20


def wished_layout(length: int, *, held: int, data_bytes_max: int, known: int = 0) -> Layout:
    """The next segment where the budget allows it: as much as the process has already, so that its memory doubles.

    Args:
        length: Of the slot that it must hold at least.
        held: Data bytes of the process's segments.
        data_bytes_max: The most data that a segment holds, beside the mebibyte for what is small.
        known: What is wanted now, where it is known that there is more than that slot: then no more than that is made, or an eighth
            of what the process has. Without that eighth, memory that grows little by little would come in very many segments.
    """
    wanted = max(length, known)
    if wanted >= CHUNK_BYTES:
        wanted = -(-wanted // CHUNK_BYTES) * CHUNK_BYTES if known else max(wanted, CHUNKS_DATA_BYTES)
    elif wanted > FIRST_DATA_BYTES // 2:
        wanted += SMALL_BYTES
    return _roomy(min(max(FIRST_DATA_BYTES, wanted, held // 8 if known else held), data_bytes_max))


def next_layout(length: int, *, wish: Layout, room: int, data_bytes_max: int) -> Layout | None:
    """The next segment: as wished, but at most half of what is left, so that other processes find room, too.

    Args:
        length: Of the slot that it must hold at least.
        wish: See `wished_layout`.
        room: What is left of the budget, in bytes.
        data_bytes_max: See `wished_layout`.

    Returns:
        None if there is not room enough.
    """
    least = Layout.for_data(max(length, 1))
    small = Layout.for_data(min(SMALL_BYTES, data_bytes_max))
    if wish.size > room // 2:
        wish = Layout.for_size(room // 2)
        wish = min(wish, _roomy(wish.data_bytes), key=lambda layout: layout.data_bytes)
        if wish.size < small.size:
            wish = small if small.size <= room else least
    layout = max(wish, least, key=lambda layout: layout.data_bytes)
    return layout if layout.size <= room else None


def _roomy(data_bytes: int) -> Layout:
    """For whole chunks and something small, if there is a chunk in it: nothing longer is left over behind the last."""
    chunks = data_bytes // CHUNK_BYTES * CHUNK_BYTES
    return Layout.for_data(chunks + SMALL_BYTES if chunks else data_bytes)


def largest(budget_bytes: int, data_bytes_max: int) -> int:
    """The longest slot that any segment can hold."""
    return max(min(Layout.for_size(budget_bytes).data_bytes, data_bytes_max), 0)
