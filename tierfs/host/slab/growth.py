"""How large the next segment of a process is. Pure."""

from __future__ import annotations

from tierfs.digest import CHUNK_BYTES
from tierfs.host.slab.table import Layout

__all__ = ["CHUNKS_BUDGET_BYTES", "FIRST_DATA_BYTES", "largest", "next_layout"]

FIRST_DATA_BYTES = 64 << 20

# Not worth a file of its own, unless somebody asks for just that much. A segment that whole chunks fill has so much more, for what
# comes with them: a shard file's header would need another segment.
SMALL_BYTES = 1 << 20

# The least budget for files of any length: for a chunk, and something small.
CHUNKS_BUDGET_BYTES = Layout.for_data(CHUNK_BYTES + SMALL_BYTES).size


def next_layout(length: int, *, newest: Layout | None, room: int, data_bytes_max: int, known: int = 0) -> Layout | None:
    """The next segment: twice the newest, but at most half of what is left, so that other processes find room, too.

    Args:
        length: Of the slot that it must hold at least.
        newest: The segment that was made last; None before the first.
        room: What is left of the budget, in bytes.
        data_bytes_max: The most data that a segment holds, beside the mebibyte for what is small.
        known: What is waited for now, where it is known that there is more than that slot: then so much is made, and the rest
            ahead of its use.

    Returns:
        None if there is not room enough.
    """
    least = Layout.for_data(max(length, 1))
    small = Layout.for_data(min(SMALL_BYTES, data_bytes_max))
    next_bytes = FIRST_DATA_BYTES if newest is None else 2 * newest.data_bytes
    wish_bytes = -(-max(FIRST_DATA_BYTES, known) // CHUNK_BYTES) * CHUNK_BYTES if known else next_bytes
    wish = _roomy(min(wish_bytes, data_bytes_max))
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
