"""A training loop on the CPU that measures its steps while a save drains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

WIDTH = 512
BATCH = 64


class Training:
    """Steps of a small model, one after the other."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(
            *(layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()))
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(BATCH, WIDTH)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()

    def seconds_per_step(self, is_over: Callable[[], bool]) -> tuple[float, float]:
        """Train until `is_over` returns true. Return the seconds per step and in all."""
        begin, steps = time.perf_counter(), 0
        while not is_over() or not steps:
            self.step()
            steps += 1
        took = time.perf_counter() - begin
        return took / steps, took


def after(seconds: float) -> Callable[[], bool]:
    """Return a function that says whether `seconds` have passed since this call."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def when_done(wait: Callable[[], object]) -> Callable[[], bool]:
    """Call ``wait()`` on a thread, and return a function that says whether it has returned."""
    thread = threading.Thread(target=wait)
    thread.start()
    return lambda: not thread.is_alive()
