"""The threads on which the synchronous core runs under the asynchronous face; one set per process.

They are not the ones that move chunks (`tierfs.store.transfers`): a call waits here for its chunks there.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tierfs.store.transfers import Errand

__all__ = ["run_in_thread"]

_Out = TypeVar("_Out")

CALLS_MAX = 16

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None


async def run_in_thread(function: Callable[..., _Out], *args: Any, **kwargs: Any) -> _Out:
    """Await ``function(*args, **kwargs)`` without blocking the event loop; at the interpreter's end, when threads take no more, do it here."""
    errand = Errand(_call, functools.partial(function, *args, **kwargs))
    try:
        _threads().submit(errand.run)
    except RuntimeError:
        errand.run()
    return await asyncio.wrap_future(errand.future)


def _call(function: Callable[[], _Out]) -> _Out:
    return function()


def _threads() -> ThreadPoolExecutor:
    global _executor  # noqa: PLW0603 - made at first use, and anew in a forked child
    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="tierfs-call")
        return _executor


def _renew() -> None:
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_renew)
