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

# Longer than a slow fetch of a chunk, so that only a stopped fetch is repeated.
PATIENCE_S = 20.0
# A waiter overshoots the fetch by at most a fifth of its wait, and by at most the longest pause.
_PAUSE_S_MIN = 0.0005
_PAUSE_S_MAX = 0.005
_OFFSETS = 1 << 40
_logger = logging.getLogger("tierfs.flush")


class NameLocks:
    """One lock for each name: a table excludes other threads, a lock on one byte of a file excludes other processes.

    The file stays empty. Two names may share a byte, with a probability of 10^-12; then one waits needlessly.
    Every wait has a time limit, because a holder may be stopped by a signal or with its container.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        self._path = path
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._fd: int | None = None
        self._passed_by = 0
        renew_in_children(self)

    @contextlib.contextmanager
    def single_flight(self, name: bytes) -> Iterator[None]:
        """Hold the name of a chunk while it is fetched, but wait at most `PATIENCE_S` for it.

        After that, go on without the lock, which only saves work. The chunk may be in a local tier by then, because the
        previous holder fetched it.
        """
        with self._held(name, PATIENCE_S) as is_held:
            if not is_held:
                self._passed_by += 1
                if self._passed_by == 1:
                    _logger.warning(
                        "%s: fetching a chunk that another thread or process of this host began to fetch %.0f s ago: "
                        "it is slow, or was stopped",
                        self._path,
                        PATIENCE_S,
                    )
            yield

    @contextlib.contextmanager
    def alone(self, name: bytes, *, timeout_s: float) -> Iterator[None]:
        """Hold a name; wait for it.

        Raises:
            StoreError: Another holder had it for the whole timeout; transient.
            OSError: The file cannot be opened or locked.
        """
        with self._held(name, timeout_s) as is_held:
            if not is_held:
                why = f"{self._path}: another thread or process kept a byte of it locked for {timeout_s:g} s"
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
                    if fd == self._fd:  # otherwise closing the file has released it
                        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _byte(fcntl.F_UNLCK, offset))

    def _wait(self, offset: int, deadline_s: float) -> int | None:
        """Return the descriptor through which the byte is locked, or None after the deadline."""
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
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                os.close(fd)

    def _renew(self) -> None:
        """In a forked child: close the open file, which the parent's locks belong to."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._fd


def _byte(kind: int, offset: int) -> bytes:
    """Return one byte of a file as a struct flock for fcntl(2), for open file description locks.

    Locks of the process would report deadlocks among its threads where there are none.
    """
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, 1, 0)
