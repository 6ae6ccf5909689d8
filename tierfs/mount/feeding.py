"""Store a new file while it is being written, so that little is left to do when it is closed.

A thread hands a `Writer` what was written from the start on without a gap. If something of that is changed afterwards, its work
is thrown away and the file is stored from the start when it is published: the staged file has all of it in any case.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from tierfs.buffers import buffers
from tierfs.digest import BLOCK_BYTES
from tierfs.store import Writer
from tierfs.threads import start_daemon

__all__ = ["FEED_FROM_BYTES", "Feeding"]

FEED_FROM_BYTES = 2 * BLOCK_BYTES
"""A smaller file is not worth a thread."""
FEEDING_MAX = 4
_logger = logging.getLogger("tierfs.mount")
_underway = threading.BoundedSemaphore(FEEDING_MAX)


class Feeding:
    """One file's. Use `start`.

    Args:
        fd: The staged file; a descriptor of its own, closed at the end.
        make: Makes the writer.
    """

    def __init__(self, fd: int, make: Callable[[], Writer]) -> None:
        self._fd, self._make = fd, make
        self._state = threading.Condition()
        self._length = self._claimed = self._fed = 0
        self._is_void = self._is_stopped = False
        self._writer: Writer | None = None
        self._ended = threading.Event()

    @classmethod
    def start(cls, fd: int, make: Callable[[], Writer]) -> Feeding | None:
        """Begin; ``None`` where enough files are being fed already."""
        if not _underway.acquire(blocking=False):
            return None
        feeding = cls(os.dup(fd), make)
        if start_daemon(feeding._run, name="mount-feed") is None:
            feeding._end()
            return None
        return feeding

    def grown(self, length: int) -> None:
        """Note that the file has this many bytes without a gap. Called after they were written."""
        with self._state:
            self._length = length
            self._state.notify()

    def changed(self, offset: int) -> None:
        """Note that bytes from ``offset`` on were changed. Called after they were."""
        with self._state:
            if offset < self._claimed:
                self._is_void = True
                self._state.notify()

    def finish(self) -> tuple[Writer, int] | None:
        """End it, and wait for what is under way.

        Returns:
            The writer and how many bytes it has, now the caller's; ``None`` where there is nothing that can be used.
        """
        with self._state:
            self._is_stopped = True
            self._state.notify()
        self._ended.wait()
        with self._state:
            writer, self._writer = self._writer, None
        if writer is None or not self._is_void:
            return None if writer is None else (writer, self._fed)
        writer.abort()
        return None

    def abandon(self) -> None:
        """End it, and do not wait."""
        with self._state:
            self._is_void = self._is_stopped = True
            self._state.notify()
            writer = self._writer if self._ended.is_set() else None
        if writer is not None:
            writer.abort()

    def _run(self) -> None:
        writer = None
        try:
            writer = self._make()
            with buffers().lend(BLOCK_BYTES) as buffer:
                while self._claim() and os.preadv(self._fd, [buffer], self._fed) == BLOCK_BYTES:
                    writer.write(buffer)
                    self._fed += BLOCK_BYTES
        except BaseException as error:  # noqa: BLE001 - it is stored from the start when it is published, which raises it
            _logger.debug("a file is not stored ahead: %r", error)
            self._is_void = True
        finally:
            with self._state:
                is_abandoned = self._is_void and self._is_stopped
                self._writer = None if is_abandoned else writer
                self._end()
            if is_abandoned and writer is not None:
                writer.abort()

    def _claim(self) -> bool:
        """Wait for the next block. False at the end."""
        with self._state:
            self._state.wait_for(lambda: self._is_stopped or self._is_void or self._length - self._fed >= BLOCK_BYTES)
            if self._is_stopped or self._is_void:
                return False
            self._claimed = self._fed + BLOCK_BYTES
            return True

    def _end(self) -> None:
        os.close(self._fd)
        _underway.release()
        self._ended.set()
