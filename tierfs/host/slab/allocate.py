"""Allocate and map the memory of a file in shared memory, so that the first copy into it is as fast as later ones.

`SlotAllocator` then hands the memory out, slot by slot.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import heapq
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError, CorruptionError, StoreError
from tierfs.host.slab import pages
from tierfs.host.slab.pages import PIECE_BYTES
from tierfs.host.slab.table import Layout, padded
from tierfs.threads import processors

# Zeroing pages is bound by memory bandwidth: more threads than this gain nothing.
THREADS_MAX = 4
LOOK_S = 0.02  # how often `allocate_idly` asks whether the memory is still wanted


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

    def work(at: int) -> None:
        length = min(PIECE_BYTES, size - at)
        if not populates or not pages.allocate_piece(memory, at, length):
            # madvise does not say why it failed. posix_fallocate does, and is the only way on an older kernel.
            os.posix_fallocate(fd, at, length)

    try:
        processors().share_out(work, range(0, size, PIECE_BYTES), threads_max=threads or THREADS_MAX)
    except OSError as error:
        kind = CapacityError if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT} else StoreError
        raise kind(f"no memory for {path}: {error.strerror}", path=path, tier="ram") from error
    return memory


def allocate_idly(fd: int, size: int, is_wanted: Callable[[], bool], unwanted: Callable[[], object]) -> bool:
    """Allocate the memory of a file at the lowest priority, in a process of its own.

    Args:
        fd, size: As for `allocate`.
        is_wanted: Asked again and again. Once it returns false, the work stops.
        unwanted: Called then, before the process has ended: on a busy machine that takes long.

    Returns:
        Whether all of it is allocated.

    Raises:
        OSError: No process can be started.
    """
    command = [sys.executable, "-I", "-S", pages.__file__, str(fd), str(size), str(os.getpid())]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=null, stdout=null, stderr=null, cwd="/", pass_fds=[fd]) as process:  # noqa: S603 - of tierfs
        while process.returncode is None and is_wanted():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        if process.returncode is None:
            process.kill()
            unwanted()
    return process.returncode == 0


def map_shared(fd: int, length: int, *, writable: bool = True) -> memoryview:
    """Map the beginning of a segment: see `tierfs.host.slab.pages.map_file`.

    Raises:
        StoreError: The kernel refused, or the file is shorter.
    """
    try:
        return pages.map_file(fd, length, writable=writable)
    except OSError as error:
        raise StoreError(f"a segment of {length} bytes cannot be mapped: {error.strerror}", tier="ram") from error


def give_up(fd: int, begin: int, end: int) -> None:
    """Release the memory of a range of a file, in whole pages. It then reads as zeros; a write allocates memory again.

    Raises:
        StoreError: The filesystem does not support this.
    """
    if number := pages.punch(fd, begin, end):
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
