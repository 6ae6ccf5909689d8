"""The threads on which the asynchronous interface runs the synchronous core; one set per process.

These threads wait for the threads that transfer chunks (`tierfs.store.transfers`), so the two sets are separate.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from tierfs._fork import PerProcess
from tierfs.store.transfers import Transfers

_Out = TypeVar("_Out")

CALLS_MAX = 16


async def run_in_thread(function: Callable[..., _Out], *args: Any, **kwargs: Any) -> _Out:
    """Await ``function(*args, **kwargs)`` without blocking the event loop."""
    return await asyncio.wrap_future(_calls().submit(_call, functools.partial(function, *args, **kwargs)))


def _call(function: Callable[[], _Out]) -> _Out:
    return function()


_calls = PerProcess(lambda: Transfers(CALLS_MAX, name="tierfs-call"))
