"""The threads on which the synchronous core runs under the asynchronous face; one set per process.

They are not the ones that move chunks (`tierfs.store.transfers`): a call waits here for its chunks there.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from tierfs._fork import PerProcess
from tierfs.store.transfers import Transfers

__all__ = ["run_in_thread"]

_Out = TypeVar("_Out")

CALLS_MAX = 16


async def run_in_thread(function: Callable[..., _Out], *args: Any, **kwargs: Any) -> _Out:
    """Await ``function(*args, **kwargs)`` without blocking the event loop."""
    return await asyncio.wrap_future(_calls().submit(_call, functools.partial(function, *args, **kwargs)))


def _call(function: Callable[[], _Out]) -> _Out:
    return function()


_calls = PerProcess(lambda: Transfers(CALLS_MAX, name="tierfs-call"))
