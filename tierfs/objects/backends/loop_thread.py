"""An event loop on a thread of its own, for asynchronous cloud clients.

fsspec's single loop is not used: its one thread would copy every byte of every request, and be the bottleneck.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

CLOSE_S_MAX = 2.0

Answer = TypeVar("Answer")


class _Call(Future[Answer]):
    """A coroutine for the loop to run, and the future of its outcome."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Answer]) -> None:
        super().__init__()
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[Answer] | None = None

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._begin)

    def stop(self) -> None:
        """Cancel the coroutine. It has an outcome soon, even if `start` was interrupted before it took effect."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.done():  # the loop calls in order, so `_begin` will not be called any more
            self._coroutine.close()
            self.set_exception(asyncio.CancelledError())

    def _end(self, task: asyncio.Task[Answer]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class LoopThread:
    """Runs coroutines for other threads until it is closed."""

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
        """Run a coroutine and wait for its result.

        If the wait is interrupted, the coroutine is cancelled, and has ended when this raises. So the caller owns the
        buffers again that it lent.

        Raises:
            BaseException: The coroutine raised it.
            RuntimeError: Called on the loop's own thread, where it would wait for itself. A destructor that the garbage
                collector runs there may do so.
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
            )  # an error holds this frame: a cycle would keep all lent buffers until garbage is collected

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> None:
        """Run a last coroutine, and end the loop. Waits for a limited time, and not on the loop's own thread."""
        _Call(self._loop, self._end_after(last)).start()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S_MAX)

    async def _end_after(self, last: Coroutine[Any, Any, object] | None) -> None:
        with contextlib.suppress(Exception):  # no caller is left to handle an error
            if last is not None:
                await asyncio.wait_for(last, CLOSE_S_MAX)
        self._loop.stop()


def body_reader(loop: LoopThread, pieces: AsyncIterator[bytes]) -> Callable[[memoryview], int]:
    """Return a `Content.read_into` for the body of an answer, whose pieces arrive on the loop of the client."""
    rest = memoryview(b"")

    async def fill(out: memoryview) -> int:
        nonlocal rest
        at = 0
        while at < len(out):
            if not rest:
                piece = await anext(pieces, None)
                if piece is None:
                    break
                rest = memoryview(piece)
            count = min(len(rest), len(out) - at)
            out[at : at + count] = rest[:count]
            rest = rest[count:]
            at += count
        return at

    return lambda out: loop.run(fill(out))
