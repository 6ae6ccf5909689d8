"""Allocate and map the memory of a file in shared memory, so that the first copy into it is as fast as later ones.

Uses huge pages if the kernel has them. The kernel clears a huge page several times faster than 512 small ones.
A copy into it, or a direct disk write from it, looks up one address instead of 512. `SlotAllocator` then hands the memory
out, slot by slot.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import heapq
import logging
import mmap
import os
import threading
from collections.abc import Collection, Sequence

import numpy as np

from tierfs.buffers import PAGE_BYTES
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError, CorruptionError, StoreError
from tierfs.host.slab.table import Layout, padded

# madvise(2), Linux 5.14: allocates missing pages and maps all of them in one pass. It replaces fallocate and a touch of
# each page.
MADV_POPULATE_WRITE = 23
# Linux 6.1: replaces small pages by a huge page and keeps their content. It ignores the setting in
# /sys/kernel/mm/transparent_hugepage, which applies to page faults.
MADV_COLLAPSE = 25
HUGE_BYTES = 2 << 20  # if small pages have 4 KiB; otherwise the kernel refuses it, or the range covers more
MAP_FIXED = 0x10  # mmap(2); the mmap module lacks it
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2  # fallocate(2)
# A signal to the process waits until madvise returns, and interrupts fallocate, which then starts over. With pieces of
# this size a profiler's timer does not outrun fallocate.
PIECE_BYTES = 4 << 20
_logger = logging.getLogger("tierfs.local")
# Zeroing pages is bound by memory bandwidth: more threads than this gain nothing.
THREADS_MAX = 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def allocate(fd: int, size: int, path: str, *, threads: int | None = None, populates: bool = True) -> memoryview:
    """Reserve all the memory of a file, so that later writes cannot fail, and map it. Releases the GIL.

    Args:
        fd: The file, of this size. What it holds already stays.
        size: Size in bytes.
        path: Name of the file in errors.
        threads: Maximum number of threads; by default `THREADS_MAX`. Never more than processors.
        populates: Whether to map its pages now. If not, only its room on the disk is reserved.

    Returns:
        The file, shared and writable.

    Raises:
        CapacityError: There is not enough memory.
        StoreError: The kernel refused for another reason.
    """
    memory = map_shared(fd, size)
    pieces = iter(range(0, size, PIECE_BYTES))  # shared by the threads
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for at in pieces:
                if failures:
                    break
                length = min(PIECE_BYTES, size - at)
                if populates:
                    _have_huge(memory, at, length)
                if not populates or not populate(memory, at, length):
                    # madvise does not say why it failed. posix_fallocate does, and is the only way on an older kernel.
                    os.posix_fallocate(fd, at, length)
        except BaseException as error:  # noqa: BLE001 - raised when all threads have ended, an interrupt too
            failures.append(error)

    count = min(threads or THREADS_MAX, len(os.sched_getaffinity(0)), -(-size // PIECE_BYTES))
    helpers = [threading.Thread(target=work, name="tierfs-allocate", daemon=True) for _ in range(count - 1)]
    with contextlib.suppress(RuntimeError):  # no new thread starts while the interpreter shuts down
        for helper in helpers:
            helper.start()
    work()
    for helper in helpers:
        if helper.ident is not None:
            helper.join()
    for error in failures:
        if not isinstance(error, OSError):
            raise error
        kind = CapacityError if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT} else StoreError
        raise kind(f"no memory for {path}: {error.strerror}", path=path, tier="ram") from error
    return memory


def _have_huge(memory: memoryview, at: int, length: int) -> None:
    """Back the whole huge pages of a range with huge pages, as far as there are any. Releases the GIL."""
    whole = length // HUGE_BYTES * HUGE_BYTES
    # The kernel collapses only ranges with at least one page in them.
    has_pages = all(populate(memory, begin, PAGE_BYTES) for begin in range(at, at + whole, HUGE_BYTES))
    if whole and has_pages and _libc.madvise(_address(memory) + at, whole, MADV_COLLAPSE):
        _say_small(ctypes.get_errno())


def populate(memory: memoryview, at: int, length: int) -> bool:
    """Allocate and map the pages of a range on page boundaries. Releases the GIL.

    Returns:
        False if the kernel has no memory for it, or does not support this.
    """
    if _libc.madvise(_address(memory) + at, length, MADV_POPULATE_WRITE) == 0:
        return True
    if ctypes.get_errno() == errno.EINVAL:
        _say_once()
    return False


@functools.cache
def _say_once() -> None:
    _logger.warning("this kernel cannot map memory ahead (Linux 5.14 can): the first copy into each segment is slower")


@functools.cache
def _say_small(number: int) -> None:
    _logger.info(
        "the kernel (Linux 6.1 or newer) gives segments no huge pages, or too few: %s; copies into the other pages "
        "are slower",
        os.strerror(number),
    )


def map_shared(fd: int, length: int, *, writable: bool = True) -> memoryview:
    """Map the beginning of a segment, shared, at a huge-page boundary. Unmapped when the last reference is gone.

    The mapping keeps no descriptor, unlike one that Python makes of ``fd``.

    Raises:
        StoreError: The kernel refused, or the file is shorter.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        if os.fstat(fd).st_size < length:
            raise OSError(errno.EINVAL, "its file is shorter")
        # Map anonymous memory, which Python unmaps in the end, then map the file in its place: mmap(2), MAP_FIXED.
        room = mmap.mmap(
            -1, length + (HUGE_BYTES if length >= HUGE_BYTES else 0), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot
        )
        at = -_address(room) % HUGE_BYTES if len(room) > length else 0
        memory = memoryview(room)[at : at + length]
        begin = _address(memory)
        if _libc.mmap(begin, length, prot, mmap.MAP_SHARED | MAP_FIXED, fd, 0) != begin:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    except OSError as error:
        raise StoreError(f"a segment of {length} bytes cannot be mapped: {error.strerror}", tier="ram") from error
    return memory


def _address(memory: memoryview | mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def give_up(fd: int, begin: int, end: int) -> None:
    """Release the memory of a range of a file, in whole pages. It then reads as zeros; a write allocates memory again.

    Raises:
        StoreError: The filesystem does not support this.
    """
    if _libc.fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, begin, end - begin):
        number = ctypes.get_errno()
        raise StoreError(f"memory of a segment cannot be released: {os.strerror(number)}", tier="ram")


class FreeRanges:
    """The free parts of a range of bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # in ascending order; no two of them touch

    def take(self, size: int, *, at_end: bool = False) -> int | None:
        """Take ``size`` bytes from the first range that has them, or from the last one. Return their offset."""
        for number in range(len(self._free))[:: -1 if at_end else 1]:
            begin, end = self._free[number]
            if end - begin >= size:
                at = end - size if at_end else begin
                rest = (begin, at) if at_end else (at + size, end)
                self._free[number : number + 1] = [rest] if rest[0] < rest[1] else []
                return at
        return None

    def has(self, size: int) -> bool:
        """Return whether a range has ``size`` bytes. Any thread may ask; the answer may be out of date."""
        return any(end - begin >= size for begin, end in tuple(self._free))

    def give(self, begin: int, end: int) -> None:
        """Add a range. It overlaps no free one."""
        if begin == end:
            return
        number = bisect.bisect(self._free, (begin, end))
        if number < len(self._free) and self._free[number][0] == end:
            end = self._free.pop(number)[1]
        if number and self._free[number - 1][1] == begin:
            number, begin = number - 1, self._free.pop(number - 1)[0]
        self._free.insert(number, (begin, end))


class SlotAllocator:
    """The free slots and pages of a segment. Not thread-safe.

    Args:
        layout: Of the segment.
        used: The index, offset and length in bytes of each slot in use.
        serial: The last serial that the segment gave.

    Raises:
        CorruptionError: Slots in use overlap.
    """

    def __init__(self, layout: Layout, used: Collection[tuple[int, int, int]] = (), serial: int = 0) -> None:
        self._sizes = {index: padded(max(length, 1)) for index, _, length in used}  # bytes of each allocated slot
        self._slots = [index for index in range(layout.slots) if index not in self._sizes]  # free slots, a heap
        self._serial = serial
        self._free = FreeRanges()
        at, end = layout.data_at, layout.data_at + layout.data_bytes // padded(1) * padded(1)
        for offset, index in sorted((offset, index) for index, offset, _ in used):
            if offset < at or offset % padded(1):
                raise CorruptionError("slots of a segment overlap", tier="ram")
            self._free.give(at, offset)
            at = offset + self._sizes[index]
        if at > end:
            raise CorruptionError("a slot lies beyond the end of its segment", tier="ram")
        self._free.give(at, end)

    def may_take(self, lengths: Sequence[int]) -> bool:
        """Return whether `take` would find room. Any thread may ask; the answer may be out of date."""
        return len(lengths) <= len(self._slots) and self._free.has(sum(padded(max(each, 1)) for each in lengths))

    def take(self, lengths: Sequence[int]) -> list[tuple[int, int, int]] | None:
        """Allocate adjacent slots of these lengths in bytes. Each starts on a page boundary.

        Return the index, new serial and offset in the segment of each slot; None if there is no room.
        """
        sizes = [padded(max(length, 1)) for length in lengths]
        total = sum(sizes)
        # Small slots lie at the end of the segment, so that whole chunks find contiguous room.
        at = self._free.take(total, at_end=total < CHUNK_BYTES // 2) if len(sizes) <= len(self._slots) else None
        if at is None:
            return None
        places = []
        for size in sizes:
            index, self._serial = heapq.heappop(self._slots), self._serial + 1
            self._sizes[index] = size
            places.append((index, self._serial, at))
            at += size
        return places

    def shrink(self, index: int, offset: int, length: int) -> None:
        """Release the pages behind the first ``length`` bytes of a slot."""
        kept, size = padded(max(length, 1)), self._sizes[index]
        self._free.give(offset + kept, offset + size)
        self._sizes[index] = kept

    def give(self, index: int, offset: int) -> None:
        """Free a slot and its bytes."""
        self._free.give(offset, offset + self._sizes.pop(index))
        heapq.heappush(self._slots, index)
