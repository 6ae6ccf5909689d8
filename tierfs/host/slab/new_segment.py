"""Create a segment for this process, or adopt the segment of a dead process."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tierfs.clock import boot_id
from tierfs.errors import InvalidInputError
from tierfs.host.slab.allocate import allocate, map_shared
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.segment_file import OwnedFd, Reservation, SegmentHeader, open_segment
from tierfs.host.slab.table.allocator import SlotAllocator
from tierfs.host.slab.table.table import Layout, SlotState, changing

UUID_DIGITS = 32
OWNER_DIGITS = 16

# A page fault maps the neighbouring pages as well (64 KiB by default), but only those with memory.
FAULT_AROUND_BYTES = 64 << 10
TOUCH_BYTES = 64 << 20


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


def adopt(path: Path, owner: str) -> Segment:
    """Become the owner of a segment whose owner is dead. The caller keeps other processes from doing so concurrently.

    Slots that were being filled are freed; the others stay as they are. The memory is allocated already.

    Raises:
        CorruptionError: Its table contradicts itself. Otherwise as `Segment.attach`.
    """
    fd, header = open_segment(path)
    segment = Segment(fd, header, path, memory=map_shared(fd.number, header.layout.size))
    table = segment._table
    with segment._lock.held():
        allocator = SlotAllocator.of(table, str(path))
        table.owner[0], table.retired[0] = int(owner, 16), 0
        with changing(table):
            table.state[table.state == SlotState.FILLING] = SlotState.FREE
        segment.start(allocator)
    _map_pages(segment)
    return segment


def _begin(fd: OwnedFd, header: SegmentHeader, path: Path, memory: memoryview) -> Segment:
    fd.write(header.encode())
    segment = Segment(fd, header, path, memory=memory)
    segment._table.owner[0] = int(header.creator, 16)
    segment.start(SlotAllocator(header.layout))
    return segment


def _map_pages(segment: Segment) -> None:
    """Map all pages, which exist already, so that the first copy is as fast as later ones. Releases the GIL."""
    pages = np.ndarray((segment.size,), np.uint8, buffer=segment._map)
    for at in range(0, segment.size, TOUCH_BYTES):
        pages[at : at + TOUCH_BYTES : FAULT_AROUND_BYTES].max()
