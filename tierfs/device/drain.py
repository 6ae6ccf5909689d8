"""The paced drain: it moves bytes from the GPU to host memory in pieces, so that training's own copies run in between.

A GPU has one copy engine per direction. The engine is first in, first out, ignores stream priorities, and runs
consecutive copies of one stream as one block. So a large copy delays every small copy of training. The drain therefore
copies pieces, queues a tiny kernel behind each, and queues the next piece only after the previous one has arrived.
Measured figures: docs/explanation/device.md.

Copies between the GPU and pageable memory run at a fraction of the link's speed and block the calling thread. So
regions of host memory are registered with the GPU once, and released before unmapping. Registration takes about a
second per 10 GB, so regions stay registered from save to save.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tierfs.device.accelerator import Accelerator
from tierfs.errors import InvalidInputError, TierfsError
from tierfs.units import parse_size

PIECE_BYTES = 32 << 20
FINISH_S = 30.0
"""Seconds in all that a closed gate delays one drain. After that, the drain continues."""
LOOK_S = 0.02
"""Seconds between checks of the other events, while a drain waits at a closed gate."""
PIN_BYTES_MAX = 64 << 30
"""Registrations of more than this in one call fail on some drivers."""


class Gate:
    """Controls when the drain may use the link. The trainer opens and closes it; it is open at first. Thread-safe."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()

    def __repr__(self) -> str:
        return f"Gate({'open' if self._is_open.is_set() else 'closed'})"

    def open(self) -> None:
        """Let the drain continue."""
        self._is_open.set()

    def close(self) -> None:
        """Hold the drain before its next piece. The piece in flight completes."""
        self._is_open.clear()

    def wait(self, timeout_s: float, *others: threading.Event) -> float:
        """Wait until the gate is open or another event is set, at most ``timeout_s``. Return the seconds waited."""
        begun = time.monotonic()
        waited_s = 0.0
        while not self._is_open.is_set() and waited_s < timeout_s and not any(other.is_set() for other in others):
            self._is_open.wait(min(LOOK_S, timeout_s - waited_s))
            waited_s = time.monotonic() - begun
        return waited_s


class Drain:
    """Moves bytes from one GPU to host memory, for one caller at a time. Thread-safe.

    Args:
        finish_s: Most seconds in all that the gate delays one call of `move`.

    Attributes:
        gate: For the trainer, to hold the drain back.
        turn: A lock. The caller holds it around `move`.
        pins: Host memory that is registered with the GPU. Change it only while `turn` is held and no copy is in flight.
        moved_bytes: Bytes moved so far.
        moved_s: Seconds spent on moving, without the time at the gate.
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
        self._lock = threading.Lock()
        self._rushing = 0
        self._rush = threading.Event()

    @contextlib.contextmanager
    def rush(self) -> Iterator[None]:
        """Let every drain of this GPU pass the gate meanwhile, because training waits for one of them."""
        with self._lock:
            self._rushing += 1
            self._rush.set()
        try:
            yield
        finally:
            with self._lock:
                self._rushing -= 1
                if not self._rushing:
                    self._rush.clear()

    def __repr__(self) -> str:
        return f"Drain({self._accelerator!r}, finish_s={self._finish_s}, moved_bytes={self.moved_bytes})"

    def move(
        self,
        pieces: Iterable[tuple[torch.Tensor, torch.Tensor]],
        hurry: threading.Event,
        stop: threading.Event,
        queued: Callable[[Any], None],
    ) -> None:
        """Move pieces to the host, with one in flight, while the gate is open. Returns when all have arrived.

        Args:
            pieces: Host and device memory of equal length, uint8 of one dimension. The drain's stream already waits
                for the writers of the device memory.
            hurry: If any thread sets it, all remaining pieces are queued at once, without regard to the gate.
            stop: If any thread sets it, the remaining pieces are skipped.
            queued: Called once the last piece is queued, with the event behind it.
        """
        accelerator, piece_bytes = self._accelerator, _piece_bytes()
        held_s, begun = 0.0, time.monotonic()
        try:
            for host, device in pieces:
                for target, source in zip(host.split(piece_bytes), device.split(piece_bytes), strict=True):
                    if stop.is_set():
                        break
                    if not hurry.is_set():
                        held_s += self.gate.wait(self._finish_s - held_s, hurry, stop, self._rush)
                    is_paced = not hurry.is_set()
                    accelerator.fetch(self.stream, target, source)
                    self.moved_bytes += target.numel()
                    if is_paced:
                        accelerator.touch(self.stream)
                        accelerator.record(self.stream).synchronize()
            event = accelerator.record(self.stream)
            queued(event)
            event.synchronize()
        except BaseException:
            # The caller releases the targets, so no copy to them may be in flight.
            with contextlib.suppress(Exception):
                accelerator.record(self.stream).synchronize()
            raise
        self.moved_s += time.monotonic() - begun - held_s


_drains: dict[int, Drain] = {}
_lock = threading.Lock()


def drain_of(accelerator: Accelerator) -> Drain:
    """Return the drain of a GPU. There is one per process, because the GPU has one copy engine per direction."""
    with _lock:
        found = _drains.get(id(accelerator))
        if found is None:
            found = _drains[id(accelerator)] = Drain(accelerator)
        return found


def _piece_bytes() -> int:
    said = os.environ.get("TIERFS_DEVICE_PIECE")
    if not said:
        return PIECE_BYTES
    try:
        found = parse_size(said)
    except InvalidInputError as error:
        raise InvalidInputError(f"TIERFS_DEVICE_PIECE: {error}") from error
    if found < 1:
        raise InvalidInputError(f"TIERFS_DEVICE_PIECE={said!r}: a piece has at least one byte")
    return found


class Pins:
    """The registered regions of one process and GPU. Not thread-safe; no copy to a region may be in flight.

    A registration keeps the region mapped until `sweep` finds that it is no longer used.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        # By key, the memory, and whether it is still used. No memory: it is pageable, or other code registered it.
        self._regions: dict[str, tuple[torch.Tensor | None, Callable[[], bool]]] = {}
        self.failed = 0

    def __repr__(self) -> str:
        return f"Pins({self.registered_bytes} bytes, failed={self.failed})"

    @property
    def registered_bytes(self) -> int:
        """Number of registered bytes."""
        return sum(memory.numel() for memory, _ in list(self._regions.values()) if memory is not None)

    def add(
        self,
        key: str,
        memory: Callable[[], memoryview],
        is_used: Callable[[], bool],
        fall_back: Callable[[str, str], None],
    ) -> None:
        """Register a region, unless it was registered or refused before.

        Args:
            key: Unique name of the region. It is never reused for another one.
            memory: Returns the whole region, writable. The registration keeps a reference to it.
            is_used: Returns whether any code still writes to the region.
            fall_back: Called with a name and a message if the region cannot be registered.
        """
        if key in self._regions:
            return
        whole = torch.frombuffer(memory(), dtype=torch.uint8)
        pinned: torch.Tensor | None = None
        try:
            if not self._accelerator.is_pinned(whole):
                self._pin(whole)
                pinned = whole
        except (TierfsError, RuntimeError) as error:
            self.failed += 1
            fall_back(
                "unpinned",
                "host memory cannot be registered with the GPU, so copies to it are slow and block their thread: "
                f"{error}; raise the limit on locked memory (ulimit -l)",
            )
        self._regions[key] = pinned, is_used

    def sweep(self) -> None:
        """Release the regions that are no longer used."""
        for key in [key for key, (_, is_used) in self._regions.items() if not is_used()]:
            memory, _ = self._regions.pop(key)
            for piece in memory.split(PIN_BYTES_MAX) if memory is not None else ():
                self._accelerator.unpin(piece)

    def _pin(self, whole: torch.Tensor) -> None:
        done: list[torch.Tensor] = []
        try:
            for piece in whole.split(PIN_BYTES_MAX):
                self._accelerator.pin(piece)
                done.append(piece)
        except BaseException:
            for piece in done:
                self._accelerator.unpin(piece)
            raise
