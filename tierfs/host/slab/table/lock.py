"""Who may change the table of a segment: one thread of one process at a time.

Threads are kept apart by a lock of ours, processes by ``flock`` on an open file that no other process has. The counter
of changes is made odd before a change and even after it, so that those who look without a lock can tell.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierfs.host.slab.table.table import Table

if TYPE_CHECKING:
    from tierfs.host.slab.segment_file import OwnedFd

__all__ = ["TableLock", "changing"]


class TableLock:
    """The lock of one segment in one process.

    Args:
        fd: An open file of our own; ``None`` if it is closed.
    """

    def __init__(self, fd: OwnedFd | None) -> None:
        self._fd = fd
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other thread and process out; once it is closed, threads only."""
        with self._threads:
            fd = self._fd
            if fd is None:
                yield
                return
            fcntl.flock(fd.number, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(fd.number, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the open file."""
        self._fd = None


@contextlib.contextmanager
def changing(table: Table) -> Iterator[None]:
    """Tell those who look that the table changes. Under the lock. The counter is odd already if somebody died in here."""
    odd = (int(table.changes[0]) + 1) | 1
    table.changes[0] = odd
    try:
        yield
    finally:
        table.changes[0] = odd + 1
