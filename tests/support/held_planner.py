"""A planner that stops a save at one step, so that another save overtakes it."""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from support.waiting import HANG_S


class Held(DefaultSavePlanner):
    """Wait at one step of a save until the test sets `go_on`. Then raise `error` if the test set one."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.arrived, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        real = getattr(self, step)

        @functools.wraps(real)  # DCP inspects the parameters
        def held(*arguments: Any, **options: Any) -> Any:
            self.arrived.set()
            assert self.go_on.wait(HANG_S)
            if self.error is not None:
                raise self.error
            return real(*arguments, **options)

        setattr(self, step, held)
