"""The paced drain: bytes move from the GPU to host memory in pieces, so that training's own copies get in between.

A GPU has one copy engine per direction. It works first in, first out, ignores stream priorities, and runs consecutive copies
of one stream as one block, so a large copy delays every small one that training asks for. The drain therefore copies
pieces, puts a tiny kernel behind each, and queues the next piece only after the last one has arrived. Measured figures:
docs/explanation/device.md.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from tierfs.device.accelerator import Accelerator, Event
from tierfs.device.pins import Pins
from tierfs.errors import InvalidInputError
from tierfs.units import parse_size

__all__ = ["Drain", "DrainPiece", "Gate", "drain_of"]

PIECE_BYTES = 32 << 20
FINISH_S = 30.0
"""A closed gate holds a drain up for so long in all; then the drain goes on."""
LOOK_S = 0.02
"""How often a drain at a closed gate looks whether somebody is in a hurry."""


class DrainPiece(NamedTuple):
    """Bytes to move.

    Attributes:
        target: Host memory, uint8 of one dimension.
        source: Device memory, uint8 of one dimension, of the same length.
    """

    target: torch.Tensor
    source: torch.Tensor


class Gate:
    """Opened and closed by the trainer to say when the drain may use the link. Open until somebody closes it.

    Safe for use by many threads.
    """

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()

    def __repr__(self) -> str:
        return f"Gate({'open' if self._is_open.is_set() else 'closed'})"

    def open(self) -> None:
        """Let the drain go on."""
        self._is_open.set()

    def close(self) -> None:
        """Hold the drain before its next piece; the piece under way ends."""
        self._is_open.clear()

    def wait(self, timeout_s: float, *others: threading.Event) -> float:
        """Wait until the gate is open or another event is set, at most so many seconds; returns for how many."""
        begun = time.monotonic()
        waited_s = 0.0
        while not self._is_open.is_set() and waited_s < timeout_s and not any(other.is_set() for other in others):
            self._is_open.wait(min(LOOK_S, timeout_s - waited_s))
            waited_s = time.monotonic() - begun
        return waited_s


class Drain:
    """Moves bytes from one GPU to host memory, for one caller at a time. Safe for use by many threads.

    Args:
        accelerator: The GPU.
        finish_s: The most seconds that the gate holds one caller up, in all.

    Attributes:
        gate: For the trainer.
        turn: Held around `move` by the one caller.
        pins: Host memory that is registered with the GPU. To be changed while `turn` is held, when no copy is under way.
        stream: The drain's stream.
        moved_bytes: How much was moved so far.
        moved_s: Seconds that it took, without the time at the gate.
    """

    def __init__(self, accelerator: Accelerator, finish_s: float = FINISH_S) -> None:
        self.gate = Gate()
        self.pins = Pins(accelerator)
        self.stream: Any = accelerator.new_stream()
        self.moved_bytes = 0
        self.moved_s = 0.0
        self._accelerator = accelerator
        self._finish_s = finish_s
        self.turn = threading.Lock()

    def __repr__(self) -> str:
        return f"Drain({self._accelerator!r}, finish_s={self._finish_s}, moved_bytes={self.moved_bytes})"

    def move(
        self,
        pieces: Iterable[DrainPiece],
        hurry: threading.Event,
        stop: threading.Event,
        queued: Callable[[Event], None],
    ) -> None:
        """Move bytes, one piece in flight, as the gate allows. In a hurry, queue all that is left at once.

        Args:
            pieces: Of any length. The drain's stream already waits for the writers of the sources.
            hurry: Set by whoever needs everything queued now, on any thread.
            stop: Set by whoever does not need the rest, on any thread.
            queued: Called with the event behind the last piece, when that is queued.
        """
        try:
            self._move(pieces, hurry, stop, queued)
        except BaseException:
            # The caller gives the targets back: nothing may be written there any more.
            with contextlib.suppress(Exception):
                self._accelerator.record(self.stream).synchronize()
            raise

    def _move(
        self,
        pieces: Iterable[DrainPiece],
        hurry: threading.Event,
        stop: threading.Event,
        queued: Callable[[Event], None],
    ) -> None:
        accelerator, piece_bytes = self._accelerator, _piece_bytes()
        held_s, begun = 0.0, time.monotonic()
        for piece in pieces:
            for target, source in zip(piece.target.split(piece_bytes), piece.source.split(piece_bytes), strict=True):
                if stop.is_set():
                    break
                if not hurry.is_set():
                    held_s += self.gate.wait(self._finish_s - held_s, hurry, stop)
                is_paced = not hurry.is_set()
                accelerator.fetch(self.stream, target, source)
                self.moved_bytes += target.numel()
                if is_paced:
                    accelerator.touch(self.stream)
                    accelerator.record(self.stream).synchronize()
        event = accelerator.record(self.stream)
        queued(event)
        event.synchronize()
        self.moved_s += time.monotonic() - begun - held_s


_drains: dict[int, Drain] = {}
_lock = threading.Lock()


def drain_of(accelerator: Accelerator) -> Drain:
    """The drain of a GPU: one per process, since the copy engine is one."""
    with _lock:
        found = _drains.get(id(accelerator))
        if found is None:
            found = _drains[id(accelerator)] = Drain(accelerator)
        return found


def _piece_bytes() -> int:
    said = os.environ.get("TIERFS_DEVICE_PIECE")
    if not said:
        return PIECE_BYTES
    found = parse_size(said)
    if found < 1:
        raise InvalidInputError(f"TIERFS_DEVICE_PIECE={said!r}: a piece has one byte at least")
    return found
