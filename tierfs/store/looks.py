"""Bounded requests to an object tier that may be unreachable."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

from tierfs.errors import StoreError
from tierfs.threads import start_daemon

LOOK_S = 5.0
_Answer = TypeVar("_Answer")


def begin(look: Callable[[], _Answer]) -> concurrent.futures.Future[_Answer]:
    """Call ``look``, which asks the object tier, on a daemon thread of its own.

    On a thread that transfers chunks it would block saves and delay the exit of this process.
    """
    future: concurrent.futures.Future[_Answer] = concurrent.futures.Future()

    def ask() -> None:
        try:
            future.set_result(look())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            future.set_exception(error)

    if start_daemon(ask, name="look") is None:
        ask()
    return future


def within(seconds: float, look: Callable[[], _Answer]) -> _Answer:
    """Return the result of ``look``, which asks the object tier, or fail after this many seconds.

    ``look`` continues after a timeout.

    Raises:
        StoreError: There was no answer in time. The error is transient.
        TierfsError: Raised by ``look``.
    """
    try:
        return begin(look).result(seconds)
    except concurrent.futures.TimeoutError:
        raise StoreError(
            f"the object tier did not answer within {seconds:g} s", transient=True, tier="object"
        ) from None
