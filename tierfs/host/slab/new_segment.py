"""Create a segment for this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from tierfs.clock import boot_id
from tierfs.errors import InvalidInputError
from tierfs.host.slab.allocate import allocate
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.segment_file import OwnedFd, Reservation, SegmentHeader
from tierfs.host.slab.table.allocator import SlotAllocator
from tierfs.host.slab.table.table import Layout

UUID_DIGITS = 32
OWNER_DIGITS = 16


def make_header(layout: Layout, *, store: str, owner: str, number: int) -> SegmentHeader:
    """Return the header of a new segment. No other segment of the process ``owner`` may have had this number.

    Raises:
        InvalidInputError: The segment has no room for data, or an id is invalid.
    """
    store = store.replace("-", "")
    if layout.data_bytes <= 0:
        raise InvalidInputError(f"a segment of {layout.size} bytes has no room for {layout.slots} slots")
    if len(store) != UUID_DIGITS or len(owner) != OWNER_DIGITS:
        raise InvalidInputError(f"store {store!r} or owner {owner!r} is not an id")
    return SegmentHeader(layout, secrets.token_hex(16), store, boot_id(), owner, number)


def make_in(
    reservation: Reservation, *, threads: int | None = None, stopped: Callable[[], bool] = lambda: False
) -> Segment | None:
    """Make a segment of a reserved file. The caller then calls `Reservation.finish`.

    All its memory is allocated now, which takes a second or two per GiB.

    Args:
        reservation: The file.
        threads: Maximum number of threads that allocate memory; see `allocate`.
        stopped: Called after each piece of memory.

    Returns:
        None if ``stopped`` returned True. Then, and on an error, the file is removed.

    Raises:
        CapacityError: There is not enough memory, or not enough room in the folder.
        StoreError: The segment cannot be made.
    """
    try:
        fd, header = reservation.fd, reservation.header
        memory = allocate(fd.number, header.layout.size, str(reservation.path), threads=threads, stopped=stopped)
        if memory is None:
            reservation.cancel()
            return None
        return _begin(fd, header, reservation.path, memory)
    except BaseException:
        reservation.cancel()
        raise


def _begin(fd: OwnedFd, header: SegmentHeader, path: Path, memory: memoryview) -> Segment:
    fd.write(header.encode())
    segment = Segment(fd, header, path, memory=memory)
    segment._table.owner[0] = int(header.creator, 16)
    segment.start(SlotAllocator(header.layout))
    return segment
