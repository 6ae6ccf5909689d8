"""The lock on the table of a segment: one thread of one process may change the table at a time.

A `threading.Lock` excludes other threads. ``flock`` on an open file that no other process shares excludes other
processes. A writer makes the counter of changes odd before a change and even after it, so that readers without the lock
detect the change.
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


class TableLock:
    """The lock of one segment in one process.

    Args:
        fd: An open file description that only this object locks; None if the segment is closed.
    """

    def __init__(self, fd: OwnedFd | None) -> None:
        self._fd = fd
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Exclude every other thread and process. After `close`, exclude threads only."""
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
        """Drop the reference to the open file."""
        self._fd = None


@contextlib.contextmanager
def changing(table: Table) -> Iterator[None]:
    """Mark the table as changing for readers that hold no lock. The caller holds the lock.

    If a process died in here, the counter is odd already.
    """
    odd = (int(table.changes[0]) + 1) | 1
    table.changes[0] = odd
    try:
        yield
    finally:
        table.changes[0] = odd + 1
