"""The size of a process's next segment. Pure functions."""

from __future__ import annotations

from tierfs.digest import CHUNK_BYTES
from tierfs.host.slab.table.table import Layout

# A store with a few small files takes this much shared memory.
FIRST_DATA_BYTES = 2 << 20

# The first segment for whole chunks, if their number is unknown. Not smaller, because each segment needs descriptors.
CHUNKS_DATA_BYTES = 64 << 20

# A smaller segment is made only if a caller needs exactly that much. A segment for whole chunks is larger by this for
# small slots: otherwise a shard file's header would need another segment.
SMALL_BYTES = 1 << 20

# The least budget for files of any length: a chunk and something small.
CHUNKS_BUDGET_BYTES = Layout.for_data(CHUNK_BYTES + SMALL_BYTES).size

# The ram budget while the ram tier is off: chunks only pass through shared memory.
TRANSIT_BYTES = 128 << 20


def wished_layout(length: int, *, held: int, data_bytes_max: int, known: int = 0) -> Layout:
    """Return the next segment's layout if the budget allows it: as much data as ``held``, so that memory doubles.

    Args:
        length: Bytes of the slot that must fit.
        held: Data bytes of the process's segments.
        data_bytes_max: The most data in a segment, apart from 1 MiB for small slots.
        known: Bytes wanted now in all, if that is known to be more than the one slot. Then the segment holds no more
            than that, or an eighth of ``held`` if that is larger. Without the eighth, memory that grows in small steps
            would need very many segments.
    """
    wanted = max(length, known)
    if wanted >= CHUNK_BYTES:
        wanted = -(-wanted // CHUNK_BYTES) * CHUNK_BYTES if known else max(wanted, CHUNKS_DATA_BYTES)
    elif wanted > FIRST_DATA_BYTES // 2:
        wanted += SMALL_BYTES
    return _roomy(min(max(FIRST_DATA_BYTES, wanted, held // 8 if known else held), data_bytes_max))


def next_layout(length: int, *, wish: Layout, room: int, data_bytes_max: int) -> Layout | None:
    """Return the next segment's layout: the wish, but at most half of the remaining budget.

    The other half is for other processes. A small segment may take more.

    Args:
        length: Bytes of the slot that must fit.
        wish: The result of `wished_layout`.
        room: Remaining budget, in bytes.
        data_bytes_max: See `wished_layout`.

    Returns:
        None if there is not enough room.
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
    """Return a layout for the whole chunks in this length and 1 MiB for small slots: no larger rest stays unused."""
    chunks = data_bytes // CHUNK_BYTES * CHUNK_BYTES
    return Layout.for_data(chunks + SMALL_BYTES if chunks else data_bytes)


def largest(budget_bytes: int, data_bytes_max: int) -> int:
    """Return the bytes of the longest slot that any segment can hold."""
    return max(min(Layout.for_size(budget_bytes).data_bytes, data_bytes_max), 0)
