"""Move regions of bytes down while the forward pass runs, and up again before the backward pass needs them.

Bytes of a GPU go from DEVICE to RAM, SPILLING, DISK, COMING and RETURNED. Bytes of the host begin in RAM, which is the
tensor's own memory. If the backward pass comes early, a region returns from where it is.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tierfs.buffers import fresh
from tierfs.device.accelerator import Accelerator
from tierfs.device.drain import Drain, Pins
from tierfs.errors import CapacityError, InvalidInputError, StoreError, TierfsError
from tierfs.experimental.activations.memory import PageRange, Space, SpillFile
from tierfs.host.slab.table import padded

AHEAD, LOOK = 2, 64
"""Number of regions that are brought back ahead of the one that is needed, among so many that were saved before it."""
SPILL_FROM = 0.75
"""Above this share of the RAM budget, the oldest region is written to the disk, so that the next one need not wait."""
_THREADS = {"drain": 1, "write": 2, "read": AHEAD, "rise": 0}  # reading goes on to rise
_FAILURES = TierfsError, RuntimeError, MemoryError
_logger = logging.getLogger("tierfs.activations")

Phase = enum.Enum("Phase", "DEVICE RAM SPILLING DISK COMING RETURNED")


class Region:
    """Bytes that autograd keeps. Only `Regions` changes it, under its lock. ``note`` is the caller's.

    ``kept`` says why the bytes stay where they are; "" if they do not.
    """

    def __init__(self, source: torch.Tensor, accelerator: Accelerator | None, kept: str, note: Any) -> None:
        # uint8 of one dimension; on the GPU in DEVICE and RETURNED, else on the host
        self.bytes, self.accelerator, self.kept, self.note = source, accelerator, kept, note
        self.length, self.seq = source.numel(), 0
        self.phase = Phase.RETURNED if kept else Phase.RAM if accelerator is None else Phase.DEVICE
        self.slot: PageRange | None = None
        self.extent: PageRange | None = None
        self.job: Future[None] | None = None  # brings the bytes back


class Regions:
    """The regions of one process, in host memory and in a file. Thread-safe.

    Attributes:
        moved_bytes: Bytes moved so far, by step: ``drain``, ``write``, ``read``, ``rise``.
        moved_s: Seconds spent on each step.
        waited_s: Seconds that the forward and the backward pass waited here.
        failures: Counts of failures, by kind. The first of each kind is logged.
    """

    def __init__(self, memory: Space, file: SpillFile) -> None:
        self.memory, self.waited_s = memory, 0.0
        self.moved_bytes: Counter[str] = Counter()
        self.moved_s = dict.fromkeys(_THREADS, 0.0)
        self.failures, self._busy = Counter[str](), Counter[str]()
        self._file, self._can_write = file, file.size > 0
        self._spilling_bytes = self._draining = self._seq = 0
        self._oldest, self._process = 0, os.getpid()  # no region before `_oldest` is written any more
        self._changed = threading.Condition(threading.RLock())
        self._alive: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()  # by seq
        self._drains: dict[tuple[int, str], Drain] = {}
        self._pinned: torch.Tensor | None = None  # the budget's memory, once a GPU needs it
        self._threads = {step: ThreadPoolExecutor(n, f"tierfs-activations-{step}") for step, n in _THREADS.items() if n}

    def hold(self, source: torch.Tensor, accelerator: Accelerator | None, kept: str = "", note: Any = None) -> Region:
        """Take over bytes, uint8 of one dimension, which must not change. They lie on a GPU, or in host memory.

        Blocks while older regions are written to the disk, if the budget needs that. With ``kept``, and without room,
        the bytes stay where they are.
        """
        self._check_process()
        with self._changed:
            slot = None if kept else self._room_for(source.numel())
            region = Region(source, accelerator, kept or ("" if slot else "no room"), note)
            region.seq, region.slot = self._seq, slot
            self._alive[region.seq], self._seq = region, region.seq + 1
            if accelerator is not None and slot is not None:
                self._draining += 1
                captured = accelerator.record(accelerator.current())
                self._threads["drain"].submit(self._drain, region, accelerator, slot, captured)
            return region

    def restore(self, region: Region) -> torch.Tensor:
        """Return the bytes on their own device. Blocks until they are there. Begins to bring what is needed next.

        Raises:
            StoreError: The bytes cannot be read or copied.
            CapacityError: The GPU has no memory left.
        """
        self._check_process()
        begun = time.monotonic()
        with self._changed:
            on_host = region.accelerator is None and region.phase in {Phase.RAM, Phase.SPILLING}
            if on_host or region.phase is Phase.DEVICE:
                region.phase, region.slot = Phase.RETURNED, None
            elif region.phase is not Phase.RETURNED and region.job is None:
                self._bring(region, is_needed=True)
            self._bring_ahead(region.seq)
            job = region.job
        error = job.exception() if job is not None else None
        if error is not None:
            raise StoreError(
                f"{region.length} bytes that the backward pass needs are lost: {error}; run the step again", tier="nvme"
            ) from error
        with self._changed:
            region.phase, region.slot, region.job = Phase.RETURNED, None, None
            self.waited_s += time.monotonic() - begun
            return region.bytes

    def stats(self) -> dict[str, Any]:
        """Return counts for `Activations.stats`."""
        with self._changed:
            counts = {"moved_bytes": dict(self.moved_bytes), "failures": dict(self.failures), "waited_s": self.waited_s}
            return {**counts, "ram_bytes_max": self.memory.most_bytes, "disk_bytes": self._file.taken_bytes}

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError("this process was forked after these Activations were made: make others in it")

    def _room_for(self, length: int) -> PageRange | None:
        begun, memory, slot = time.monotonic(), self.memory, None
        staying = memory.size * SPILL_FROM - length
        while padded(length) <= memory.size:
            while memory.taken_bytes - self._spilling_bytes > staying and self._spill_oldest():
                pass
            slot = memory.take(length)
            # A slot needs contiguous room, for which more than the share may have to go.
            if slot or not (self._spilling_bytes or self._spill_oldest() or (self._draining and self._can_write)):
                break
            self._changed.wait()
        self.waited_s += time.monotonic() - begun
        return slot

    def _spill_oldest(self) -> bool:
        """Begin to write the oldest region in RAM to the disk. Return False if there is none, or no room."""
        region = self._alive.get(self._oldest)
        while self._oldest < self._seq and (region is None or region.phase not in {Phase.DEVICE, Phase.RAM}):
            self._oldest += 1
            region = self._alive.get(self._oldest)
        if region is None or region.phase is Phase.DEVICE or not self._can_write:
            return False
        region.extent = self._file.take(region.length)
        if region.extent is None:
            self._fail("full", "nvme= is used up, so tensors stay in memory")
            return False
        region.phase = Phase.SPILLING
        self._spilling_bytes += region.length
        self._threads["write"].submit(self._write, weakref.ref(region), region.length, region.extent)
        return True

    def _drain(self, region: Region, accelerator: Accelerator, slot: PageRange, captured: Any) -> None:
        """Copy a region from the GPU to its slot, unless the backward pass has it already."""
        target, is_done = self._memory_of(slot, accelerator)[: region.length], False
        if region.phase is Phase.DEVICE:
            try:
                with self._timed("drain", region.length):
                    self._copy(accelerator, "down", captured, target, region.bytes)
                is_done = True
            except _FAILURES as error:
                self._fail("drain", f"tensors stay on the GPU, because they cannot be copied: {error}")
        with self._changed:
            self._draining -= 1
            if is_done and region.phase is Phase.DEVICE:
                region.bytes, region.phase = target, Phase.RAM
            else:
                region.phase, region.slot = Phase.RETURNED, None
            self._changed.notify_all()

    def _write(self, reference: weakref.ref[Region], length: int, extent: PageRange) -> None:
        """Write a region to its extent, unless it is gone, or the backward pass has it already."""
        region, is_done = reference(), False
        with self._changed:
            source = region.bytes if region is not None and region.phase is Phase.SPILLING else None
        try:
            if source is not None:
                with self._timed("write", length):
                    self._file.write(extent, memoryview(source.numpy()))
                is_done = True
        except _FAILURES as error:
            self._can_write = False
            self._fail("write", f"nothing more is written to the disk, so tensors stay in memory: {error}")
        with self._changed:
            self._spilling_bytes -= length
            if region is not None and region.phase is Phase.SPILLING and is_done:
                region.bytes, region.slot, region.phase = region.bytes[:0].clone(), None, Phase.DISK
            elif region is not None:
                region.extent, region.phase = None, Phase.RAM if region.phase is Phase.SPILLING else region.phase
            self._changed.notify_all()

    def _bring_ahead(self, seq: int) -> None:
        """Begin to bring back the regions that were saved last before this one."""
        ahead = 0
        for region in filter(None, map(self._alive.get, range(seq - 1, max(seq - LOOK, 0) - 1, -1))):
            is_away = region.phase is Phase.DISK or (region.accelerator is not None and region.phase is Phase.RAM)
            if ahead == AHEAD or (is_away and not self._bring(region, is_needed=False)):
                break
            ahead += region.phase is Phase.COMING

    def _bring(self, region: Region, *, is_needed: bool) -> bool:
        """Begin to bring a region back. Return False if there is no room, and it is not needed now."""
        accelerator, host, slot, target, ready = region.accelerator, region.bytes, region.slot, None, None
        extent = region.extent if region.phase is Phase.DISK else None
        if extent is not None:
            slot = self.memory.take(region.length)
            if slot is None and not is_needed:
                return False
            if slot is not None and accelerator is not None:
                host = self._memory_of(slot, accelerator)
            else:
                host = torch.frombuffer(fresh(padded(region.length)), dtype=torch.uint8)
        if accelerator is not None:
            try:
                target = accelerator.allocate(region.length)
            except CapacityError:
                if is_needed:
                    raise
                return False
            # Work that was queued before the memory was freed may still read it.
            ready = accelerator.record(accelerator.current())
        region.phase, region.slot = Phase.COMING, slot
        region.job = self._threads["read"].submit(self._come, region, host, target, ready, extent)
        return True

    def _come(
        self, region: Region, host: torch.Tensor, target: torch.Tensor | None, ready: Any, extent: PageRange | None
    ) -> None:
        """Read a region from the disk, if it is there, and copy it to its GPU, if it has one."""
        try:
            if extent is not None:
                with self._timed("read", region.length):
                    self._file.read(extent, memoryview(host.numpy()))
            host = host[: region.length]
            if target is not None and region.accelerator is not None:
                with self._timed("rise", region.length):
                    self._copy(region.accelerator, "up", ready, target, host)
        except _FAILURES as error:
            self._fail("read", f"tensors cannot be read back: {error}")
            raise
        with self._changed:
            region.bytes, region.slot = (host, region.slot) if target is None else (target, None)
            region.extent = None
            self._changed.notify_all()

    def _copy(self, accelerator: Accelerator, way: str, after: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between the host and a GPU, after an event, in paced pieces. Each way has its own stream."""
        with self._changed:
            key = id(accelerator), way
            drain = self._drains[key] = self._drains.get(key) or Drain(accelerator)
        with drain.turn:
            accelerator.wait(drain.stream, after)
            drain.move([(target, source)], threading.Event(), threading.Event(), lambda _: None)

    def _memory_of(self, slot: PageRange, accelerator: Accelerator) -> torch.Tensor:
        """Return the memory of a slot. The first call registers the whole budget with the GPU."""
        with self._changed:
            if self._pinned is None:
                memory, pins, alive = fresh(self.memory.size), Pins(accelerator), weakref.ref(self)
                pins.add("activations", lambda: memory, lambda: alive() is not None, self._fail)
                weakref.finalize(self, pins.sweep).atexit = False  # before the memory is unmapped
                self._pinned = torch.frombuffer(memory, dtype=torch.uint8)
            return self._pinned[slot.at : slot.at + slot.length]

    @contextlib.contextmanager
    def _timed(self, step: str, length: int) -> Iterator[None]:
        """Count a move. Time in which several threads do the same step counts once."""
        with self._changed:
            self._busy[step] += 1
            self.moved_s[step] -= time.monotonic() if self._busy[step] == 1 else 0.0
        done = 0
        try:
            yield
            done = length
        finally:
            with self._changed:
                self._busy[step] -= 1
                self.moved_bytes[step] += done
                self.moved_s[step] += 0.0 if self._busy[step] else time.monotonic()

    def _fail(self, kind: str, message: str) -> None:
        with self._changed:
            self.failures[kind] += 1
            if self.failures[kind] == 1:
                _logger.warning("activations: %s", message)
