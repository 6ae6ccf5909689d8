"""Memory for a file in shared memory: reserved as a whole, and mapped, so that the first copy into it is as fast as any.

In huge pages where the kernel has them: it clears one in a fraction of the time that its 512 small pages take, and who copies into it, or
has the disk write it, looks up one address and not 512.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

from tierfs.errors import CapacityError, StoreError
from tierfs.host.ground import PAGE_BYTES

__all__ = ["allocate", "give_up", "map_shared", "populate"]

# madvise(2), Linux 5.14: gets the pages that are missing and maps all, as fallocate and a touch of each would, in one pass.
MADV_POPULATE_WRITE = 23
# Linux 6.1: has one huge page take the place of small ones, whatever /sys/kernel/mm/transparent_hugepage says, which is for those who
# touch memory and do not ask. What lies there stays.
MADV_COLLAPSE = 25
HUGE_BYTES = 2 << 20  # where small pages have 4 KiB; elsewhere it is refused, or covers more
MAP_FIXED = 0x10  # mmap(2); Python has no name for it
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2  # fallocate(2)
# Both calls hold up whoever wants the process to stop, and fallocate is undone and begun anew when a signal comes in between,
# so a profiler's timer must not outrun it. Also, what is being reserved can be discarded after each piece.
PIECE_BYTES = 4 << 20
_logger = logging.getLogger("tierfs.local")
# Zeroing pages is bound by memory: more threads than this gain nothing.
THREADS_MAX = 4


def allocate(
    fd: int, size: int, path: str, *, threads: int | None = None, stopped: Callable[[], bool] = lambda: False
) -> memoryview | None:
    """Reserve the memory of a file as a whole, so that writing to it later cannot fail, and map it. Releases the GIL.

    Args:
        fd: The file, empty and of that size.
        size: In bytes.
        path: What errors call it.
        threads: On how many; by default as many as help.
        stopped: Asked now and then.

    Returns:
        The file, shared and writable; None if ``stopped`` said so meanwhile.

    Raises:
        CapacityError: There is not so much memory.
        StoreError: The kernel refused for another reason.
    """
    memory = map_shared(fd, size)
    pieces = iter(range(0, size, PIECE_BYTES))  # every thread takes the next one
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for at in pieces:
                if failures or stopped():
                    break
                length = min(PIECE_BYTES, size - at)
                _have_huge(memory, at, length)
                if not populate(memory, at, length):
                    # It does not say why; this does, and it is all that an older kernel has.
                    os.posix_fallocate(fd, at, length)
        except BaseException as error:  # noqa: BLE001 - raised when all threads have ended, an interrupt too
            failures.append(error)

    count = min(threads or THREADS_MAX, len(os.sched_getaffinity(0)), -(-size // PIECE_BYTES))
    helpers = [threading.Thread(target=work, name="tierfs-allocate", daemon=True) for _ in range(count - 1)]
    with contextlib.suppress(RuntimeError):  # at the end of the interpreter there are no new threads
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
    return None if stopped() else memory


def _have_huge(memory: memoryview, at: int, length: int) -> None:
    """Get huge pages for as much of a part of a mapping as whole ones fit into, if there are any. Does not hold the GIL."""
    whole = length // HUGE_BYTES * HUGE_BYTES
    # Of an empty file nothing is made huge, only of what has one page at least.
    has_pages = all(populate(memory, begin, PAGE_BYTES) for begin in range(at, at + whole, HUGE_BYTES))
    if whole and has_pages and (number := _collapse(_address(memory) + at, whole)):
        _say_small(number)


def _collapse(begin: int, length: int) -> int:
    """The number of the error."""
    return ctypes.get_errno() if _libc.madvise(begin, length, MADV_COLLAPSE) else 0


def populate(memory: memoryview, at: int, length: int) -> bool:
    """Get and map the pages of a part of a mapping, on page boundaries. Does not hold the GIL.

    Returns:
        False where the kernel has no memory for it, or cannot do this.
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
        "the kernel (Linux 6.1 or newer) gives no huge pages, or not as many as segments have: %s; copies into the others are slower",
        os.strerror(number),
    )


def map_shared(fd: int, length: int, *, writable: bool = True) -> memoryview:
    """Map the beginning of a segment, shared, where huge pages may begin. Unmapped when nobody refers to it any more.

    The mapping keeps no descriptor, as one that Python makes of ``fd`` would.

    Raises:
        StoreError: The kernel refused, or the file is shorter.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        if os.fstat(fd).st_size < length:
            raise OSError(errno.EINVAL, "its file is shorter")
        # A mapping of nothing, which Python unmaps in the end, and the file in its place: mmap(2), MAP_FIXED.
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
    """Give the memory of a part of a file back, in whole pages. It reads as zeros, and writing to it takes memory anew.

    Raises:
        StoreError: The filesystem does not do that.
    """
    if _libc.fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, begin, end - begin):
        number = ctypes.get_errno()
        raise StoreError(f"memory of a segment cannot be given back: {os.strerror(number)}", tier="ram")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
