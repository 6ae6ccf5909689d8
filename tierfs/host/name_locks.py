"""Locks on names, such as a path or a chunk, among all threads and processes of a host."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import xxhash

from tierfs._fork import renew_in_children
from tierfs.clock import Clock, SystemClock
from tierfs.errors import StoreError

__all__ = ["NameLocks"]

# Longer than a chunk takes that is slow to come, so that only what has stopped is fetched twice.
PATIENCE_S = 20.0
# Waiting is a little longer than the fetch at most: by a fifth, and by no more than the longest pause.
_PAUSE_S_MIN = 0.0005
_PAUSE_S_MAX = 0.005
_OFFSETS = 1 << 40
_logger = logging.getLogger("tierfs.flush")


class NameLocks:
    """One lock for each name: among threads by a table, among processes by one byte of a file.

    Two names that share a byte wait for each other for nothing, which happens once in 10^12 pairs. Nobody waits for good:
    who holds a lock may be stopped, by a signal or with its container.

    Args:
        path: The file whose bytes are locked. It stays empty.
        clock: Measures the waits.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        self._path = path
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._fd: int | None = None
        self._passed_by = 0
        renew_in_children(self)

    def __repr__(self) -> str:
        return f"NameLocks({str(self._path)!r}, {len(self._busy)} under way, {self._passed_by} not waited for)"

    @contextlib.contextmanager
    def single_flight(self, name: bytes) -> Iterator[None]:
        """Hold the name of a chunk while it is fetched, or find out in `PATIENCE_S` that somebody else goes on holding it. Then the lock only saves work.

        What was wanted may be there by now: somebody else may have held it until just then.
        """
        with self._held(name, PATIENCE_S) as is_held:
            if not is_held:
                self._passed_by += 1
                if self._passed_by == 1:
                    _logger.warning(
                        "%s: a chunk is fetched that somebody else on this host began to fetch %.0f s ago: it is slow,"
                        " or was stopped",
                        self._path,
                        PATIENCE_S,
                    )
            yield

    @contextlib.contextmanager
    def alone(self, name: bytes, *, timeout_s: float) -> Iterator[None]:
        """Hold a name, which is waited for.

        Raises:
            StoreError: Somebody else held it for so long; it is transient.
            OSError: The file cannot be opened, or locked.
        """
        with self._held(name, timeout_s) as is_held:
            if not is_held:
                why = f"{self._path}: somebody else kept a byte of it locked for {timeout_s:g} s"
                raise StoreError(why, transient=True)
            yield

    @contextlib.contextmanager
    def _held(self, name: bytes, timeout_s: float) -> Iterator[bool]:
        offset = xxhash.xxh3_64_intdigest(name) % _OFFSETS
        fd = self._wait(offset, self._clock.monotonic() + timeout_s)
        try:
            yield fd is not None
        finally:
            if fd is not None:
                with self._lock:
                    self._busy.discard(offset)
                    if fd == self._fd:  # closing the file released it
                        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(fcntl.F_UNLCK, offset))

    def _wait(self, offset: int, deadline_s: float) -> int | None:
        """The descriptor by which a byte is locked, or ``None`` where it was waited for in vain."""
        pause_s = _PAUSE_S_MIN
        while (fd := self._try(offset)) is None:
            if self._clock.monotonic() >= deadline_s:
                return None
            self._clock.sleep(pause_s)
            pause_s = min(pause_s * 1.25, _PAUSE_S_MAX)
        return fd

    def _try(self, offset: int) -> int | None:
        with self._lock:
            if offset in self._busy:
                return None
            fd = self._open()
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, offset))
            except BlockingIOError:
                return None
            self._busy.add(offset)
            return fd

    def close(self) -> None:
        """Close the file. What is held meanwhile is released."""
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                os.close(fd)

    def _renew(self) -> None:
        """In a forked child: its locks belong to the open file, which a child must not keep open."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._fd


def _byte(kind: int, offset: int) -> bytes:
    """One byte of a file as fcntl(2) wants it, for locks of the open file.

    Locks of the process would see deadlocks among its threads where there are none.
    """
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, 1, 0)
