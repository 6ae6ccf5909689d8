"""An event loop on a thread of its own, for the clients of clouds that are asynchronous.

fsspec's one loop is left to others: a thread that copies every byte of every request is the first thing to be full.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

__all__ = ["BodyReader", "LoopThread"]

CLOSE_S_MAX = 2.0

Answer = TypeVar("Answer")


class _Call(Future[Answer]):
    """A coroutine for the loop to run, and its outcome to come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Answer]) -> None:
        super().__init__()
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[Answer] | None = None

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._begin)

    def stop(self) -> None:
        """Cancel it. It has an outcome soon, also where `start` was interrupted and may not have taken effect."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.done():  # the loop keeps the order: it will never be begun
            self._coroutine.close()
            self.set_exception(asyncio.CancelledError())

    def _end(self, task: asyncio.Task[Answer]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class LoopThread:
    """Runs coroutines for other threads, until it is closed.

    Args:
        name: For the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"tierfs-loop-{name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for a coroutine.

        If the wait is interrupted, the coroutine is cancelled, and has ended when this raises: the caller owns again what it lent.

        Raises:
            BaseException: The coroutine's.
            RuntimeError: Called on the loop's own thread, where it would wait for itself, as a destructor may do that the
                collector runs there.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("an event loop of tierfs cannot wait for a request")
        sending = _Call(self._loop, coroutine)
        try:
            sending.start()
            return sending.result()
        except BaseException:
            while not sending.done():
                with contextlib.suppress(BaseException):  # another interrupt must not cut this one's wait short
                    sending.stop()
                    wait([sending])
            raise
        finally:
            del (
                sending,
                coroutine,
            )  # an error holds this frame: it would hold itself, and all that was lent, until collected

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> None:
        """Run a last coroutine, and end. Waits a while for both, but not on the loop's own thread."""
        _Call(self._loop, self._end_after(last)).start()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S_MAX)

    async def _end_after(self, last: Coroutine[Any, Any, object] | None) -> None:
        with contextlib.suppress(Exception):  # nobody waits for an answer any more
            if last is not None:
                await asyncio.wait_for(last, CLOSE_S_MAX)
        self._loop.stop()


class BodyReader:
    """Fills buffers with the body of an answer.

    Args:
        loop: The loop of the client whose answer it is.
        pieces: The body, as it comes.
    """

    def __init__(self, loop: LoopThread, pieces: AsyncIterator[bytes]) -> None:
        self._loop = loop
        self._pieces = pieces
        self._rest = memoryview(b"")

    def __call__(self, out: memoryview) -> int:
        """See `Content.read_into`."""
        return self._loop.run(self._fill(out))

    async def _fill(self, out: memoryview) -> int:
        at = 0
        while at < len(out):
            if not self._rest:
                piece = await anext(self._pieces, None)
                if piece is None:
                    break
                self._rest = memoryview(piece)
            count = min(len(self._rest), len(out) - at)
            out[at : at + count] = self._rest[:count]
            self._rest = self._rest[count:]
            at += count
        return at
