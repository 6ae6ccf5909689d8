"""Bounded threads and reusable buffers for moving chunks; one set per process.

A task handed to these threads never hands another one to them and waits for it, so they cannot wait for each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tierfs.digest import CHUNK_BYTES

__all__ = ["Transfers", "transfers"]

_In = TypeVar("_In")
_Out = TypeVar("_Out")

WORKERS = 16
BUFFERS_MAX = 8


class Transfers:
    """Threads for requests to the object tier, and a few chunk-sized buffers that are used again and again.

    Buffers are kept because first touch of fresh memory is far slower than a copy into warm memory.

    Args:
        workers: Requests under way at once.
        buffers: Free buffers kept, each of 16 MiB.
    """

    def __init__(self, workers: int = WORKERS, buffers: int = BUFFERS_MAX) -> None:
        self.workers = workers
        self._buffers_max = buffers
        # Garbage may be collected while it is held, and what is collected may hand a buffer back.
        self._lock = threading.RLock()
        self._places = threading.BoundedSemaphore(workers)
        self._executor: ThreadPoolExecutor | None = None
        self._free: list[bytearray] = []

    def __repr__(self) -> str:
        return f"Transfers(workers={self.workers}, buffers={self._buffers_max})"

    def submit(self, task: Callable[[_In], _Out], argument: _In) -> Future[_Out]:
        """Start ``task(argument)`` on one of the threads."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix="tierfs-transfer")
            return self._executor.submit(task, argument)

    def send(self, task: Callable[[bytearray], _Out], buffer: bytearray) -> Future[_Out]:
        """Start ``task(buffer)``, waiting first while as many buffers as there are threads are on their way.

        So however many files are written at once, what is on its way takes no more memory than that.
        """
        self._places.acquire()
        try:
            future = self.submit(task, buffer)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        return future

    def map(self, task: Callable[[_In], _Out], arguments: Iterable[_In]) -> list[_Out]:
        """Run ``task`` on every argument and return the results in order.

        Raises:
            BaseException: The first error of a task, after every task has ended.
        """
        items = list(arguments)
        if len(items) < 2:  # noqa: PLR2004 - one item needs no thread
            return [task(item) for item in items]
        futures = [self.submit(task, item) for item in items]
        errors = [error for error in [future.exception() for future in futures] if error is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def take_buffer(self) -> bytearray:
        """A buffer of one chunk's size. Its content is undefined; give it back with `give_buffer`."""
        with self._lock:
            return self._free.pop() if self._free else bytearray(CHUNK_BYTES)

    def give_buffer(self, buffer: bytearray) -> None:
        """Hand a buffer back; the caller must not use it any more."""
        with self._lock:
            if len(self._free) < self._buffers_max:
                self._free.append(buffer)


_shared = Transfers()


def transfers() -> Transfers:
    """This process's `Transfers`."""
    return _shared


def _renew() -> None:
    global _shared  # noqa: PLW0603 - a forked child has none of the parent's threads, and maybe a held lock
    _shared = Transfers()


os.register_at_fork(after_in_child=_renew)
