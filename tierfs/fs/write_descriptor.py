"""The descriptor of a file being written, for code that does not call ``write``: torch, NumPy, child processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from tierfs.digest import BLOCK_BYTES
from tierfs.errors import StoreError

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


class WriteDescriptor:
    """A file in memory (memfd) that user code writes to. `collect` takes its bytes and releases their memory.

    Offsets in it are offsets in the file being written. Collected bytes become a hole, so memory holds only the bytes
    written since. The user's descriptor is write-only, because a hole would read as zeros. ``length`` is the number of
    bytes that the file has already.
    """

    def __init__(self, path: str, length: int) -> None:
        self._path = path
        self._collected = length
        self._is_sealed = False
        self._memory = os.memfd_create("tierfs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._memory, length)
            self.number = os.open(f"/proc/self/fd/{self._memory}", os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self._memory)
            raise
        os.lseek(self.number, length, os.SEEK_SET)

    @property
    def length(self) -> int:
        """Length of the file in bytes, including bytes that are not collected yet."""
        return os.fstat(self._memory).st_size

    def go_to_end(self) -> None:
        """Set the offset to the end. Code that used a duplicate of the descriptor may have moved it."""
        os.lseek(self.number, 0, os.SEEK_END)

    def write(self, data: memoryview, store: Callable[[memoryview], object]) -> None:
        """Append bytes behind those that other code wrote to the descriptor, and collect all of them."""
        self.go_to_end()
        for start in range(0, len(data), BLOCK_BYTES):
            piece = data[start : start + BLOCK_BYTES]
            while piece:
                piece = piece[os.write(self.number, piece) :]
            self.collect(store)

    def collect(self, store: Callable[[memoryview], object]) -> None:
        """Pass the bytes written since the last call to ``store``, in order.

        Raises:
            StoreError: Bytes that were collected before have been changed or cut off. They cannot be recalled.
        """
        length = self.length
        if length < self._collected or self._is_changed():
            raise StoreError(
                f"{self._path}: bytes before offset {self._collected} were changed through the file's descriptor, which "
                "can only be written from start to end: write the file locally and copy it with fs.put",
                path=self._path,
            )
        while self._collected < length:
            piece = os.pread(self._memory, min(BLOCK_BYTES, length - self._collected), self._collected)
            store(memoryview(piece))
            if not self._is_sealed:
                from tierfs.host.slab.allocate import give_up  # noqa: PLC0415 - it loads NumPy

                give_up(self._memory, 0, self._collected + len(piece))
            self._collected += len(piece)

    def seal(self) -> None:
        """Forbid writes by any process. A child that still holds the descriptor gets an error from then on."""
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, _SEALS)
        self._is_sealed = True

    def close(self) -> None:
        """Close the descriptors in this process."""
        os.close(self.number)
        os.close(self._memory)

    def _is_changed(self) -> bool:
        """Whether the hole contains a nonzero byte."""
        try:
            at = os.lseek(self._memory, 0, os.SEEK_DATA)
        except OSError:
            return False  # ENXIO: the whole file is a hole
        while at < self._collected:
            piece = os.pread(self._memory, min(BLOCK_BYTES, self._collected - at), at)
            if piece.count(0) != len(piece):
                return True
            at += len(piece)
        return False
