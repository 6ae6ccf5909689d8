"""One at a time, of what several threads and processes of a host want to do at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

from tierfs.errors import StoreError
from tierfs.forks import renew_in_children

__all__ = ["SingleFlight"]

LOOK_AGAIN_S = 0.002
_OFFSETS = 1 << 40
_HELD = frozenset({errno.EAGAIN, errno.EACCES})


class SingleFlight:
    """Locks on names: among threads by an entry in a table, among processes by one byte of a file.

    Two names that share a byte wait for each other for nothing, which happens once in 10^12 pairs.

    Args:
        path: The file whose bytes are locked. It stays empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._busy: dict[int, threading.Event] = {}
        self._fd: int | None = None
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"SingleFlight({str(self._path)!r}, {len(self._busy)} under way)"

    @contextlib.contextmanager
    def holding(self, name: bytes, *, timeout_s: float | None = None) -> Iterator[None]:
        """Hold a name. What was wanted may be there by now: somebody else may have held it until just then.

        Args:
            name: Which.
            timeout_s: How long to wait for it; ``None`` for as long as it takes.

        Raises:
            StoreError: Somebody else held it for so long; it is transient.
            OSError: The file cannot be opened, or locked.
        """
        offset = xxhash.xxh3_64_intdigest(name) % _OFFSETS
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                other = self._busy.get(offset)
                if other is None:
                    fd = self._open()
                    mine = self._busy[offset] = threading.Event()
                    break
            if not other.wait(None if ends is None else max(0.0, ends - time.monotonic())):
                raise self._is_kept(timeout_s)
        try:
            if not _lock(fd, offset, ends):
                raise self._is_kept(timeout_s)
            try:
                yield
            finally:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(fcntl.F_UNLCK, offset))
        finally:
            with self._lock:
                self._busy.pop(offset, None)
            mine.set()

    def close(self) -> None:
        """Close the file. What is held meanwhile is let go of."""
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                os.close(fd)

    def _renew(self) -> None:
        """In a forked child: it holds none of its parent's locks."""
        self._lock, self._busy = threading.Lock(), {}
        if self._fd is not None:
            # Its locks belong to the open file, which is the parent's as well.
            os.close(self._fd)
            self._fd = None

    def _is_kept(self, timeout_s: float | None) -> StoreError:
        return StoreError(f"{self._path}: somebody else kept a byte of it locked for {timeout_s} s", transient=True)

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._fd


def _lock(fd: int, offset: int, ends: float | None) -> bool:
    """Lock a byte, by that time; false if somebody else has it still."""
    if ends is None:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _byte(fcntl.F_WRLCK, offset))
        return True
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, offset))
        except OSError as error:
            if error.errno not in _HELD:
                raise
        else:
            return True
        if time.monotonic() >= ends:
            return False
        time.sleep(LOOK_AGAIN_S)


def _byte(kind: int, offset: int) -> bytes:
    """One byte of a file as fcntl(2) wants it, for locks of the open file.

    Locks of the process would see deadlocks among its threads where there are none.
    """
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, 1, 0)
