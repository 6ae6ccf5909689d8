"""Move regions of bytes down while the forward pass runs, and up again before the backward pass needs them.

::

    DEVICE -> RAM -> SPILLING -> DISK -> READING -> READ -> RISING -> RETURNED

Bytes of a GPU go through all of these places. Bytes of the host begin in RAM, which is the tensor's own memory, and
return from there. If the backward pass comes early, a region returns from where it is.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from tierfs.buffers import fresh
from tierfs.device.accelerator import Accelerator
from tierfs.device.drain import Drain
from tierfs.errors import CapacityError, StoreError, TierfsError
from tierfs.experimental.activations.memory import HostMemory, HostSlot, SpillFile
from tierfs.host.slab.table import padded

AHEAD = 2
"""Number of regions that are read ahead from each tier."""
SPILL_FROM = 0.75
"""Above this share of the RAM budget, the oldest region is written to the disk, so that the next one need not wait."""
_THREADS = {"drain": 1, "write": 1, "read": 2, "rise": 1}
_logger = logging.getLogger("tierfs.activations")


class Place(enum.Enum):
    """Where the bytes of a region are; see the module."""

    DEVICE = enum.auto()
    RAM = enum.auto()
    SPILLING = enum.auto()
    DISK = enum.auto()
    READING = enum.auto()
    READ = enum.auto()
    RISING = enum.auto()
    RETURNED = enum.auto()


@dataclass(slots=True)
class _Held:
    """The resources of a region. They outlive it until a thread frees them."""

    length: int
    slot: HostSlot | None = None
    extent: int | None = None


class Region:
    """Bytes that autograd keeps. Its resources are freed once the last reference to it goes.

    Only `Regions` changes it, under its lock.

    Attributes:
        storage: A weak reference to the storage that the bytes came from. It keeps the address from being reused.
    """

    def __init__(self, seq: int, held: _Held, source: torch.Tensor, accelerator: Accelerator | None) -> None:
        self.seq = seq
        self.held = held
        self.storage: Any = None
        self.accelerator = accelerator
        self.place = Place.RAM if accelerator is None else Place.DEVICE
        self.bytes: torch.Tensor = source  # on the device in DEVICE and RETURNED, else on the host; uint8, flat
        self.event: Any = None  # behind the copy back to the GPU
        self.error: BaseException | None = None
        self.dead: deque[_Held] | None = None

    def __del__(self) -> None:
        # Any thread may run this, even one that holds the lock of `Regions`.
        if self.dead is not None:
            self.dead.append(self.held)


class Regions:
    """The regions of one process, in host memory and in a file. Thread-safe.

    Args:
        ram_bytes: Most bytes in host memory.
        file: The file; None if there is no disk.

    Attributes:
        memory: The host memory.
        moved_bytes: Bytes moved so far, by step: ``drain``, ``write``, ``read``, ``rise``.
        moved_s: Seconds spent on each step.
        waited_s: Seconds that the forward and the backward pass waited here.
        failures: Counts of failures, by kind. The first of each kind is logged.
    """

    def __init__(self, ram_bytes: int, file: SpillFile | None) -> None:
        self.memory = HostMemory(ram_bytes)
        self.moved_bytes: Counter[str] = Counter()
        self.moved_s: dict[str, float] = dict.fromkeys(_THREADS, 0.0)
        self.waited_s = 0.0
        self.failures: Counter[str] = Counter()
        self._file = file
        self._can_write = file is not None
        self._changed = threading.Condition(threading.RLock())
        self._dead: deque[_Held] = deque()
        self._seq = 0
        self._alive: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()  # by seq, ascending
        self._spilling_bytes = 0
        self._draining = 0
        self._drains: dict[tuple[int, str], Drain] = {}
        self._hurry, self._never = threading.Event(), threading.Event()
        self._hurry.set()
        self._threads = {
            step: ThreadPoolExecutor(count, thread_name_prefix=f"tierfs-activations-{step}")
            for step, count in _THREADS.items()
        }

    def hold(self, source: torch.Tensor, accelerator: Accelerator | None) -> Region | None:
        """Take over bytes. Blocks while older regions are written to the disk, if the budget needs that.

        Args:
            source: uint8 of one dimension. It must not change until it is released.
            accelerator: The GPU that has it; None for host memory.

        Returns:
            The region; None if there is no room for it.
        """
        with self._changed:
            held = _Held(source.numel())
            if not self._make_room(held, accelerator):
                return None
            region = Region(self._seq, held, source, accelerator)
            region.dead = self._dead
            self._alive[self._seq] = region
            self._seq += 1
            if accelerator is not None:
                self._draining += 1
                self._threads["drain"].submit(self._drain, region, accelerator.record(accelerator.current()))
            return region

    def restore(self, region: Region) -> torch.Tensor:
        """Return the bytes on their own device. Blocks until they are there. Begins to read what is needed next.

        Raises:
            StoreError: The disk cannot be read.
            CapacityError: The GPU has no memory left.
        """
        begun = time.monotonic()
        with self._changed:
            self._reap()
            region.error = None
            while region.place is not Place.RETURNED:
                if region.error is not None:
                    raise StoreError(
                        f"{region.held.length} bytes for the backward pass cannot be read back: {region.error}; "
                        "run the step again, with directory= on another disk",
                        tier="nvme",
                    ) from region.error
                self._advance(region)
            self._read_ahead(region.seq)
            self.waited_s += time.monotonic() - begun
            return region.bytes

    def disk_bytes(self) -> int:
        """Return the bytes of the file that are in use."""
        with self._changed:
            self._reap()
            return self._file.used_bytes if self._file is not None else 0

    # -- down ----------------------------------------------------------------------------------------------------------

    def _make_room(self, held: _Held, accelerator: Accelerator | None) -> bool:
        begun, memory, wanted = time.monotonic(), self.memory, padded(held.length)
        while wanted <= memory.budget_bytes:
            self._reap()
            limit = memory.budget_bytes * SPILL_FROM
            while memory.held_bytes - self._spilling_bytes + wanted > limit and self._spill_oldest():
                pass
            held.slot = memory.take(held.length, accelerator)
            # A slot needs contiguous room, for which more than the share may have to go.
            if held.slot or not (self._spilling_bytes or self._spill_oldest() or (self._draining and self._can_write)):
                break
            self._changed.wait()
        self.waited_s += time.monotonic() - begun
        return held.slot is not None

    def _spill_oldest(self) -> bool:
        """Begin to write the oldest region in RAM to the disk. Return False if there is none, or no room."""
        region = next((one for one in list(self._alive.values()) if one.place is Place.RAM), None)
        if region is None or self._file is None or not self._can_write:
            return False
        held = region.held
        held.extent = self._file.take(held.length)
        if held.extent is None:
            self._fail("nvme_full", "nvme= is used up, so tensors stay in memory")
            return False
        region.place = Place.SPILLING
        self._spilling_bytes += held.length
        self._threads["write"].submit(self._write, self._file, weakref.ref(region), held.length)
        return True

    def _drain(self, region: Region, captured: Any) -> None:
        """Copy a region from the GPU to its slot, unless the backward pass has it already."""
        accelerator, source, held = region.accelerator, region.bytes, region.held
        assert accelerator is not None
        assert held.slot is not None
        target = self.memory.of(held.slot)[: held.length]

        def move() -> None:
            if region.place is Place.DEVICE:
                drain = self._drain_of(accelerator, "down")
                accelerator.wait(drain.stream, captured)
                drain.move([(target, source)], self._never, self._never, lambda _: None)

        error = self._run("drain", held.length, move)
        with self._changed:
            self._draining -= 1
            if region.place is Place.DEVICE and error is None:
                region.bytes, region.place = target, Place.RAM
            else:
                region.place = Place.RETURNED
                self._free_slot(held)
            self._changed.notify_all()

    def _write(self, file: SpillFile, reference: weakref.ref[Region], length: int) -> None:
        """Write a region to its extent, unless it is gone, or the backward pass has it already."""
        region, error = reference(), None
        if region is not None and region.place is Place.SPILLING:
            extent, host = region.held.extent, region.bytes
            assert extent is not None
            error = self._run("write", length, lambda: file.write(extent, memoryview(host.numpy())))
            del host
        with self._changed:
            self._spilling_bytes -= length
            self._can_write = self._can_write and error is None
            if region is not None and region.place is Place.SPILLING and error is None:
                region.bytes, region.place = torch.empty(0, dtype=torch.uint8, device="cpu"), Place.DISK
                self._free_slot(region.held)
            elif region is not None:
                self._free_extent(region.held)
                region.place = Place.RAM if region.place is Place.SPILLING else region.place
            self._changed.notify_all()

    # -- up ------------------------------------------------------------------------------------------------------------

    def _advance(self, region: Region) -> None:
        """Take a region one step towards `Place.RETURNED`, or wait for a change."""
        accelerator, place = region.accelerator, region.place
        if place is Place.DEVICE:
            region.place = Place.RETURNED  # `_drain` frees the slot
        elif place is Place.DISK:
            self._begin_read(region, is_needed=True)
        elif place in {Place.RAM, Place.SPILLING, Place.READ}:
            if accelerator is not None:
                self._begin_rise(region, accelerator)
            else:
                region.place = Place.RETURNED
                self._free_slot(region.held)
        elif accelerator is None or region.event is None:
            self._changed.wait()
        else:
            accelerator.wait(accelerator.current(), region.event)
            region.place = Place.RETURNED

    def _read_ahead(self, seq: int) -> None:
        """Begin to restore the regions that were saved last before this one."""
        alive = list(self._alive.values())
        read = sum(one.place in {Place.READING, Place.READ} for one in alive)
        risen = sum(one.place is Place.RISING for one in alive)
        for region in reversed(alive):
            if region.seq >= seq:
                continue
            if region.place is Place.DISK and read < AHEAD:
                read += 1 if self._begin_read(region, is_needed=False) else AHEAD
            elif region.place in {Place.RAM, Place.READ} and region.accelerator is not None and risen < AHEAD:
                try:
                    self._begin_rise(region, region.accelerator)
                except CapacityError:
                    break
                risen += 1

    def _begin_read(self, region: Region, *, is_needed: bool) -> bool:
        """Begin to read a region from the disk. Unless it is needed now, only if the budget has room."""
        slot = self.memory.take(region.held.length, region.accelerator)
        if slot is not None or is_needed:
            region.held.slot, region.place = slot, Place.READING
            self._threads["read"].submit(self._read, region)
        return region.place is Place.READING

    def _read(self, region: Region) -> None:
        """Read a region from the disk."""
        held, file = region.held, self._file
        assert file is not None
        assert held.extent is not None
        extent = held.extent
        if held.slot is not None and held.slot.segment is not None:
            memory = self.memory.of(held.slot)
        else:
            memory = torch.frombuffer(fresh(padded(held.length)), dtype=torch.uint8)
        error = self._run("read", held.length, lambda: file.read(extent, memoryview(memory.numpy())))
        with self._changed:
            if error is None:
                region.bytes, region.place = memory[: held.length], Place.READ
                self._free_extent(held)
            else:
                region.place, region.error = Place.DISK, error
                self._free_slot(held)
            self._changed.notify_all()

    def _begin_rise(self, region: Region, accelerator: Accelerator) -> None:
        """Begin to copy a region back to its GPU. Raises `CapacityError`."""
        target = accelerator.allocate(region.held.length)
        # Work that was queued before the memory was freed may still read it.
        allocated = accelerator.record(accelerator.current())
        region.place = Place.RISING
        self._threads["rise"].submit(self._rise, region, accelerator, target, allocated)

    def _rise(self, region: Region, accelerator: Accelerator, target: torch.Tensor, allocated: Any) -> None:
        """Copy a region back to its GPU."""
        source = region.bytes

        def queued(event: Any) -> None:
            with self._changed:
                region.bytes, region.event = target, event
                self._changed.notify_all()

        def move() -> None:
            drain = self._drain_of(accelerator, "up")
            accelerator.wait(drain.stream, allocated)
            drain.move([(target, source)], self._hurry, self._never, queued)

        error = self._run("rise", region.held.length, move)
        with self._changed:
            if region.event is None:
                region.place, region.error = Place.READ, error
            else:
                self._free_slot(region.held)
            self._changed.notify_all()

    # -- both ----------------------------------------------------------------------------------------------------------

    def _run(self, step: str, length: int, task: Callable[[], None]) -> BaseException | None:
        """Run a task, and count it. Return its error, which is logged if it is the first of this step."""
        begun = time.monotonic()
        try:
            task()
        except (TierfsError, RuntimeError) as error:
            with self._changed:
                self._fail(step, f"{step} failed, so tensors stay where they are: {error}")
            return error
        with self._changed:
            self.moved_bytes[step] += length
            self.moved_s[step] += time.monotonic() - begun
        return None

    def _fail(self, kind: str, message: str) -> None:
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            _logger.warning("activations: %s", message)

    def _reap(self) -> None:
        """Free the resources of regions that are gone."""
        while self._dead:
            held = self._dead.popleft()
            self._free_slot(held)
            self._free_extent(held)

    def _free_slot(self, held: _Held) -> None:
        if held.slot is not None:
            self.memory.give(held.slot)
            held.slot = None

    def _free_extent(self, held: _Held) -> None:
        if held.extent is not None and self._file is not None:
            self._file.give(held.extent, held.length)
            held.extent = None

    def _drain_of(self, accelerator: Accelerator, direction: str) -> Drain:
        """Return the stream and pacing for one direction. Only one thread uses each."""
        key = id(accelerator), direction
        if key not in self._drains:
            self._drains[key] = Drain(accelerator)
        return self._drains[key]
