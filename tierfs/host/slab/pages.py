"""Pages of a file in shared memory: allocate, map and release them. As a script: allocate them at the lowest priority.

Uses huge pages if the kernel has them. The kernel clears a huge page several times faster than 512 small ones.
A copy into it, or a direct disk write from it, looks up one address instead of 512.

The script has processors while hardly any other program wants them. A thread of that priority would stop its process:
it gets no processor while it holds the lock of the process's address space or the interpreter's lock. The script
imports nothing of tierfs, so that it starts in 20 ms.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import signal
import sys

# madvise(2), Linux 5.14: allocates missing pages and maps all of them in one pass. It replaces fallocate and a touch of
# each page.
MADV_POPULATE_WRITE = 23
# Linux 6.1: replaces small pages by a huge page and keeps their content. It ignores the setting in
# /sys/kernel/mm/transparent_hugepage, which applies to page faults.
MADV_COLLAPSE = 25
HUGE_BYTES = 2 << 20  # if small pages have 4 KiB; otherwise the kernel refuses it, or the range covers more
PAGE_BYTES = 4096
MAP_FIXED = 0x10  # mmap(2); the mmap module lacks it
NICER = 19  # of two programs on a processor, the one with this nice value gets 1.4 %; all of an idle processor
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that this process gets when the thread that started it has ended
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2  # fallocate(2)
# A signal to the process waits until madvise returns, and interrupts fallocate, which then starts over. With pieces of
# this size a profiler's timer does not outrun fallocate.
PIECE_BYTES = 4 << 20
_logger = logging.getLogger("tierfs.local")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def map_file(fd: int, length: int, *, writable: bool = True) -> memoryview:
    """Map the beginning of a file, shared, at a huge-page boundary. Unmapped when the last reference is gone.

    The mapping keeps no descriptor, unlike one that Python makes of ``fd``.

    Raises:
        OSError: The kernel refused, or the file is shorter.
    """
    if os.fstat(fd).st_size < length:
        raise OSError(errno.EINVAL, "its file is shorter")
    # Map anonymous memory, which Python unmaps in the end, then map the file in its place: mmap(2), MAP_FIXED.
    room = mmap.mmap(-1, length + (HUGE_BYTES if length >= HUGE_BYTES else 0), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = -_address(room) % HUGE_BYTES if len(room) > length else 0
    memory = memoryview(room)[at : at + length]
    begin, prot = _address(memory), mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if _libc.mmap(begin, length, prot, mmap.MAP_SHARED | MAP_FIXED, fd, 0) != begin:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memory if writable else memory.toreadonly()


def _address(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def allocate_piece(memory: memoryview, at: int, length: int) -> bool:
    """Allocate and map the pages of a range, with huge pages for the whole ones in it. Releases the GIL.

    Returns:
        As `populate`.
    """
    whole = length // HUGE_BYTES * HUGE_BYTES
    # The kernel collapses only ranges with at least one page in them.
    has_pages = all(populate(memory, begin, PAGE_BYTES) for begin in range(at, at + whole, HUGE_BYTES))
    if whole and has_pages and _libc.madvise(_address(memory) + at, whole, MADV_COLLAPSE):
        _say_small(ctypes.get_errno())
    return populate(memory, at, length)


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


def punch(fd: int, begin: int, end: int) -> int:
    """Release the memory of a range of a file. Return 0, or the number of the error."""
    return ctypes.get_errno() if _libc.fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, begin, end - begin) else 0


def main(fd: int, size: int, parent: int) -> bool:
    """Allocate all pages of a file at the lowest priority. Ends when ``parent`` does. Return whether all are allocated."""
    os.nice(NICER)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    memory = map_file(fd, size)
    pieces = range(0, size, PIECE_BYTES)
    return os.getppid() == parent and all(allocate_piece(memory, at, min(PIECE_BYTES, size - at)) for at in pieces)


if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:])))
