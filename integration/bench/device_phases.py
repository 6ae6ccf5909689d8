"""Where the host's time of a load goes: seconds by phase, each without the phases inside it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tierfs.dcp import TierLoadPlanner, TierReader
from tierfs.dcp.load.shards import ShardFiles
from tierfs.threads import Transfers

CALLS: tuple[tuple[type, str, str], ...] = (
    (TierReader, "read_metadata", "metadata"),
    *((TierLoadPlanner, f"{what}_plan", "planning") for what in ("create_local", "create_global", "finish")),
    (TierLoadPlanner, "set_up_planner", "planning"),
    *((TierReader, f"prepare_{what}_plan", "planning") for what in ("local", "global")),
    (TierReader, "read_data", "items"),
    (ShardFiles, "open", "opening files"),
    (Transfers, "map", "copies in host memory"),
)


class Phases:
    """Times the phases of one thread. Calls on other threads are part of the phase that waits for them.

    Attributes:
        seconds: By phase.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]  # seconds of the phases inside each phase that is open now
        self._thread = threading.get_ident()

    def timed(self, work: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:
                return work(*arguments, **options)
            begin = time.perf_counter()
            self._inner.append(0.0)
            try:
                return work(*arguments, **options)
            finally:
                took, inner = time.perf_counter() - begin, self._inner.pop()
                self._inner[-1] += took
                self.seconds[phase] = self.seconds.get(phase, 0.0) + took - inner

        return call


@contextlib.contextmanager
def phases_of_load(accelerator: Any) -> Iterator[dict[str, float]]:
    """Time the loads of this thread, whose tensors lie on one GPU. Yields the seconds by phase; ``rest`` is torch's."""
    phases = Phases()
    hash_, record = phases.timed(accelerator.hash, "launches"), accelerator.record

    def hash_later(*arguments: Any) -> Callable[[], bytes]:
        return phases.timed(hash_(*arguments), "waits for digests")

    def record_later(stream: Any) -> Any:
        event = record(stream)
        event.synchronize = phases.timed(event.synchronize, "waits for copies")
        return event

    begin = time.perf_counter()
    with contextlib.ExitStack() as patched:
        for owner, name, phase in CALLS:
            patched.enter_context(mock.patch.object(owner, name, phases.timed(getattr(owner, name), phase)))
        for name in ("copy", "send"):
            timed = phases.timed(getattr(accelerator, name), "launches")
            patched.enter_context(mock.patch.object(accelerator, name, timed))
        patched.enter_context(mock.patch.object(accelerator, "hash", hash_later))
        patched.enter_context(mock.patch.object(accelerator, "record", record_later))
        yield phases.seconds
    phases.seconds["rest"] = time.perf_counter() - begin - sum(phases.seconds.values())
