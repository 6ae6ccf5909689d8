"""The memory that offloaded bytes may take: slots of host memory within a budget, and extents of one unlinked file."""

from __future__ import annotations

import errno
import os
import secrets
import weakref
from pathlib import Path
from typing import NamedTuple

import torch

from tierfs.buffers import PAGE_BYTES
from tierfs.device.accelerator import Accelerator
from tierfs.digest import CHUNK_BYTES
from tierfs.host.filesystems import disk_errors
from tierfs.host.nvme.chunk_file import padded_pages, transfer
from tierfs.host.slab.slot_allocator import FreeRanges
from tierfs.host.slab.table import padded

SEGMENT_BYTES = 256 << 20
"""Page-locked memory is allocated in segments of at least this size. No slot crosses from one to the next."""


class HostSlot(NamedTuple):
    """A part of a segment: page-aligned, whole pages. Without a segment, an account of memory that is not ours."""

    segment: int | None
    at: int
    length: int


class HostMemory:
    """Slots of host memory. Not thread-safe.

    Attributes:
        budget_bytes: Most bytes of all segments, and of the memory that is accounted for.
        held_bytes: Bytes of the slots that are taken.
        used_bytes: The same, and the free parts of segments.
        used_bytes_max: The most there was of these.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = self.used_bytes = self.used_bytes_max = 0
        self._segments: list[tuple[torch.Tensor, FreeRanges]] = []

    def take(self, length: int, accelerator: Accelerator | None) -> HostSlot | None:
        """Allocate a slot that a GPU can copy to, or account for memory of the host. Return None if there is no room."""
        size = padded(length)
        found = HostSlot(None, 0, length) if accelerator is None and self._grow(length) else None
        if accelerator is not None:
            for number, (_, free) in enumerate(self._segments):
                at = free.take(size)
                if at is not None:
                    found = HostSlot(number, at, size)
                    break
            else:
                whole = next(
                    (one for one in (max(size + PAGE_BYTES, SEGMENT_BYTES), size + PAGE_BYTES) if self._grow(one)), 0
                )
                if whole:
                    memory, free = accelerator.host_memory(whole), FreeRanges()
                    memory = memory[-memory.data_ptr() % PAGE_BYTES :]
                    free.give(size, len(memory) // PAGE_BYTES * PAGE_BYTES)
                    self._segments.append((memory, free))
                    found = HostSlot(len(self._segments) - 1, 0, size)
        self.held_bytes += found.length if found else 0
        return found

    def give(self, slot: HostSlot) -> None:
        """Free a slot."""
        self.held_bytes -= slot.length
        if slot.segment is None:
            self.used_bytes -= slot.length
        else:
            self._segments[slot.segment][1].give(slot.at, slot.at + slot.length)

    def of(self, slot: HostSlot) -> torch.Tensor:
        """Return the memory of a slot, uint8 of one dimension."""
        assert slot.segment is not None
        return self._segments[slot.segment][0][slot.at : slot.at + slot.length]

    def _grow(self, length: int) -> bool:
        fits = self.used_bytes + length <= self.budget_bytes
        self.used_bytes += length if fits else 0
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)
        return fits


class SpillFile:
    """A file without a name: the kernel frees it when the process ends, however it ends.

    `take` and `give` are not thread-safe. `write` and `read` are, on different extents.

    Args:
        directory: An existing directory.
        budget_bytes: Most bytes of the file.

    Attributes:
        used_bytes: Bytes of the extents that are taken.
        is_direct: Whether the file bypasses the page cache.
    """

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self.used_bytes = 0
        self._directory = directory
        self._free = FreeRanges()
        self._free.give(0, budget_bytes // PAGE_BYTES * PAGE_BYTES)
        with disk_errors(directory):
            try:
                self._fd, self.is_direct = _open_unlinked(directory, os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fd, self.is_direct = _open_unlinked(directory, 0), False
        weakref.finalize(self, os.close, self._fd)

    def take(self, length: int) -> int | None:
        """Return the offset of a free extent, or None if there is no room."""
        at = self._free.take(padded(length))
        self.used_bytes += 0 if at is None else padded(length)
        return at

    def give(self, at: int, length: int) -> None:
        """Free an extent."""
        self._free.give(at, at + padded(length))
        self.used_bytes -= padded(length)

    def write(self, at: int, data: memoryview) -> None:
        """Write bytes to an extent. Page-aligned memory saves a copy.

        Raises:
            CapacityError, StoreError: The disk is full, or fails. The extent's content is undefined.
        """
        with disk_errors(self._directory):
            for begin in range(0, len(data), CHUNK_BYTES):
                with padded_pages(data[begin : begin + CHUNK_BYTES]) as pieces:
                    transfer(os.pwritev, self._fd, pieces, at + begin)

    def read(self, at: int, out: memoryview) -> None:
        """Fill page-aligned memory, whole pages, from an extent. Raises `StoreError` if the disk fails."""
        with disk_errors(self._directory):
            transfer(os.preadv, self._fd, [out], at)


def _open_unlinked(directory: Path, direct: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | direct
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR}:  # the filesystem has no files without a name
            raise
    path = directory / f"activations-{secrets.token_hex(8)}"
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd
