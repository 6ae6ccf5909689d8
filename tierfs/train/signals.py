"""Signals that announce the end of this process. A handler only takes a note; the training loop acts on it."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from tierfs.errors import InvalidInputError

__all__ = ["Signals"]

_logger = logging.getLogger("tierfs.train")


class Signals:
    """Handles signals until `close`, and calls the handlers that were there before.

    Python lets only the main thread set handlers. Elsewhere this logs a warning and handles nothing.

    Args:
        wanted: Which signals.

    Raises:
        InvalidInputError: One is none, or cannot be handled, as SIGKILL cannot. No handler is set then.

    Attributes:
        received: The number of the first one that came; 0 for none.
        received_s: When it came, by `time.monotonic`.
    """

    def __init__(self, wanted: Iterable[signal.Signals]) -> None:
        self.received = 0
        self.received_s = 0.0
        self._before: dict[int, Any] = {}
        numbers = sorted(set(wanted))
        if not numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(number).name for number in numbers)
            _logger.warning("%s are not handled: the manager was not made on the main thread", names)
            return
        try:
            for number in numbers:
                self._before[number] = signal.signal(number, self._handle)
        except (OSError, ValueError) as error:
            self.close()
            raise InvalidInputError(f"signal {int(number)} cannot be handled: {error}") from error

    def __repr__(self) -> str:
        return f"Signals({sorted(self._before)}, received={self.received})"

    def close(self) -> None:
        """Set the earlier handlers again, except where somebody else has set another one since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # A handler that C code had set reads as None, and cannot be set from here.
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received_s = time.monotonic()
            self.received = number
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
