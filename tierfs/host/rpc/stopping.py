"""Stops a flusher, without starting one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

from tierfs.host.rpc.client import FlusherClient

_PAUSE_S = 0.02


class _NobodyError(Exception):
    """No flusher runs."""


def stop_flusher(directory: Path, version: str, *, timeout_s: float) -> bool:
    """Stop the flusher of one store after the steps in progress, and wait until it has ended. Return whether one ran.

    Pending changes stay where they are, for the next flusher.

    Raises:
        TimeoutError: It has not ended yet, but will.
        ReadOnlyError, StoreError: It cannot be asked.
    """
    ends = time.monotonic() + timeout_s
    with FlusherClient(directory, _start_none, version, dict) as client:
        if not client.is_running():
            return False
        try:
            client.request("stop", timeout_s=timeout_s)
        except _NobodyError:
            return True  # the flusher ended meanwhile
    while client.is_running():
        if time.monotonic() >= ends:
            raise TimeoutError(f"the flusher has not ended within {timeout_s:g} s: a step is still under way")
        time.sleep(_PAUSE_S)
    return True


def _start_none() -> NoReturn:
    raise _NobodyError
