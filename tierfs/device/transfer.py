"""One save's tensors on their way from the GPU into host memory.

A transfer has two halves. `capture` queues, on the current stream, the copies that make the tensors safe to change, or notes
which tensors must not change yet. `run` moves the bytes to the host, on whichever thread the caller has for that. Three
modes differ only in how much is captured:

- ``device``: everything, in a generation of the device tier. Training goes on at once.
- ``lazy``: small tensors, in scratch memory. The large ones are read in place, and `fence` keeps the optimizer off them.
- ``ram``: small tensors as well, which spares a copy operation for each; then the trainer waits for `run`.

Lazy mode is the scheme of DataStates-LLM (Maurya et al., HPDC 2024): tensors do not change between two optimizer steps.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tierfs import digest
from tierfs.device.accelerator import Accelerator, Event
from tierfs.device.detached import detached
from tierfs.device.digests import DIGEST_BYTES, cut_blocks
from tierfs.device.drain import Drain, DrainPiece
from tierfs.device.tier import ALIGN_BYTES, DeviceTier, Generation, Spot
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, DigestKind
from tierfs.errors import CapacityError, InvalidInputError, StoreError
from tierfs.processors import processors

__all__ = ["BESIDE_TRAINING", "CaptureMode", "MemoryRegion", "Transfer", "fence_all"]

SMALL_BYTES = 1 << 20
"""Regions whose tensors are all shorter are gathered on the device, and cross the link as one."""


BESIDE_TRAINING = 4
"""Threads that copy or hash at once while training goes on. More of them keep its thread from the interpreter's lock."""


class CaptureMode(enum.Enum):
    """How a transfer makes tensors safe to change. See the module."""

    DEVICE = "device"
    LAZY = "lazy"
    RAM = "ram"


class MemoryRegion(NamedTuple):
    """Bytes that lie side by side in host memory.

    Attributes:
        length: In bytes.
        parts: Offset in the region, and the tensor: on the device, strided. They cover the region without gaps.
    """

    length: int
    parts: Sequence[tuple[int, torch.Tensor]]


class HostMemory(NamedTuple):
    """The owner of the host memory, as a transfer sees it.

    Attributes:
        pin: Registers the memory with the GPU, as far as it is not.
        find: Finds the chunks that the host has, by their digests: for each a function that fills a place with its bytes and
            returns whether it did. ``None`` where the store's digests are of another kind.
        fall_back: Called with a name and a message for what a fallback did.
    """

    pin: Callable[[], None]
    find: Callable[[Collection[bytes]], Mapping[bytes, Callable[[memoryview], bool]]] | None
    fall_back: Callable[[str, str], None]


class Transfer:
    """See the module. `fence`, `wait` and `cancel` may be called on any thread.

    Args:
        mode: How tensors are made safe.
        accelerator: The GPU on which they lie.
        drain: Its drain.
        tier: The device tier; needed for `CaptureMode.DEVICE`.
        host: See `HostMemory`.

    Attributes:
        mode: The mode in effect: ``ram`` where the device tier has no room.
        generation: Where the snapshot lies, in `CaptureMode.DEVICE`.
        offsets: Where each region begins in the generation.
        digests: For each region, the digest of each of its chunks, as of before the bytes left the device; empty without CuPy.
        skipped_bytes: How many bytes did not cross the link, because the host had equal chunks.
    """

    def __init__(
        self, mode: CaptureMode, accelerator: Accelerator, drain: Drain, tier: DeviceTier | None, host: HostMemory
    ) -> None:
        self.mode = mode
        self.generation: Generation | None = None
        self.offsets: list[int] = []
        self.digests: list[list[bytes]] = []
        self.skipped_bytes = 0
        self._accelerator = accelerator
        self._drain = drain
        self._tier = tier
        self._host = host
        self._regions: Sequence[MemoryRegion] = ()
        self._sources: list[torch.Tensor | None] = []  # per region, where it was gathered on the device
        self._kept: list[tuple[torch.Tensor, int]] = []  # what is read in place, and its version
        self._captured: Event | None = None
        self._last: Event | None = None
        self._is_fenced = False
        self._checking = threading.Lock()
        self._hurry = threading.Event()
        self._stop = threading.Event()
        self._queued = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"Transfer({self.mode.value}, {'done' if self._done.is_set() else 'under way'})"

    # -- on the trainer's thread ---------------------------------------------------------------------------------------

    def capture(self, regions: Sequence[MemoryRegion]) -> None:
        """Make the tensors safe to change, on the current stream, as far as the mode does that.

        Raises:
            InvalidInputError: The current stream is being captured into a CUDA graph.
        """
        if self._accelerator.is_capturing():
            raise InvalidInputError(
                "a state cannot be staged while a CUDA graph is captured: stage before or after the capture"
            )
        self._regions = regions
        gathered = [self.mode is CaptureMode.DEVICE or _is_small(region) for region in regions]
        offsets, total = [], 0
        for region, is_gathered in zip(regions, gathered, strict=True):
            offsets.append(total)
            total += -(-region.length // ALIGN_BYTES) * ALIGN_BYTES if is_gathered else 0
        self.offsets = offsets
        memory = self._take(total)
        if memory is None and self.mode is CaptureMode.DEVICE:
            self.mode = CaptureMode.RAM
            self.capture(regions)
            return
        if memory is None:
            gathered = [False] * len(regions)
        parts: list[tuple[int, torch.Tensor]] = []
        for region, at, is_gathered in zip(regions, offsets, gathered, strict=True):
            if not is_gathered:
                self._sources.append(None)
                continue
            assert memory is not None
            self._sources.append(memory[at : at + region.length])
            parts += [(at + inside, tensor) for inside, tensor in region.parts]
        with torch.no_grad():
            if memory is not None:
                self._accelerator.gather(memory, parts)
            if not all(gathered):
                self._regions = [
                    region if is_gathered else region._replace(parts=[(at, _flat(one)) for at, one in region.parts])
                    for region, is_gathered in zip(regions, gathered, strict=True)
                ]
        if self.mode is CaptureMode.LAZY:
            direct = [
                tensor
                for region, is_gathered in zip(regions, gathered, strict=True)
                if not is_gathered
                for _, tensor in region.parts
            ]
            self._kept = [(tensor, version) for tensor in direct if (version := _version(tensor)) is not None]
        self._captured = self._accelerator.record(self._accelerator.current())
        if self.generation is not None:
            self.generation.taken_s = time.monotonic()
        if self.mode is CaptureMode.LAZY:
            _open.add(self)
            _hook_optimizers()
        if self.mode is CaptureMode.RAM:
            self._hurry.set()

    def _take(self, total: int) -> torch.Tensor | None:
        """Device memory for what is gathered; ``None`` where there is none, which is said."""
        try:
            if self.mode is CaptureMode.DEVICE:
                assert self._tier is not None
                self.generation = self._tier.take(total, self)
                return self.generation.memory
            return self._accelerator.allocate(total)
        except CapacityError as error:
            name = "device_tier" if self.mode is CaptureMode.DEVICE else "device_scratch"
            self._host.fall_back(name, f"tensors are copied to host memory while training waits: {error}")
            return None

    def fence(self) -> None:
        """Order whatever is queued on the current stream from now on behind the reads in place. Needed in `CaptureMode.LAZY`.

        Blocks until the rest of the copies is queued, not until they are done. The optimizer hook calls this. In the other modes
        the tensors may be changed anyway, and nothing is done.
        """
        if self.mode is not CaptureMode.LAZY or self._done.is_set() or self._is_fenced:
            return
        self._hurry.set()
        self._queued.wait()
        if self._last is not None:
            self._accelerator.wait(self._accelerator.current(), self._last)
        with (
            self._checking
        ):  # the drain's thread may look at the same moment, and training changes tensors when this returns
            self._check_unchanged()
            self._is_fenced = True

    # -- on any thread -------------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether nothing is under way any more."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the host memory holds what the tensors held.

        Raises:
            StoreError: A tensor was changed while it was read in place; or the transfer was cancelled.
            TierfsError, RuntimeError: The copy failed.
        """
        self._done.wait()
        if self._error is not None:
            raise detached(self._error)

    def cancel(self) -> None:
        """Give up: when this returns, nothing is written to the host memory any more."""
        self._stop.set()
        self._hurry.set()
        self._done.wait()

    def publish(self, save_id: str, items: dict[Any, Spot]) -> None:
        """See `DeviceTier.publish`."""
        if self._tier is not None:
            self._tier.publish(self, save_id, items)

    def discard(self, error: BaseException | None = None) -> None:
        """Give up what was captured and is not run, because of an error if there is one."""
        self._end(error or StoreError("what was staged was discarded: stage it again"))

    def run(self, targets: Sequence[torch.Tensor]) -> None:
        """Move the bytes to the host: they are there when this returns, or `wait` says why not.

        Args:
            targets: For each region host memory of its length, uint8 of one dimension.
        """
        error: BaseException | None = None
        try:
            with self._drain.turn:
                self._drain.pins.sweep()
                self._host.pin()
                assert self._captured is not None
                self._accelerator.wait(self._drain.stream, self._captured)
                missing = self._missing(targets)
                self._drain.move(missing, self._hurry, self._stop, self._note_queued)
            if self._stop.is_set():
                error = StoreError("what was staged was discarded: stage it again")
            with self._checking:
                if not self._is_fenced:
                    self._check_unchanged()
        except BaseException as raised:  # noqa: BLE001 - raised again by `wait`
            error = raised
        self._end(error)

    def _note_queued(self, event: Event) -> None:
        self._last = event
        self._queued.set()

    def _end(self, error: BaseException | None) -> None:
        try:
            if error is not None and self._error is None:
                self._error = detached(error)
            if self.generation is not None:
                assert self._tier is not None
                self._tier.give(self.generation, drained=self._error is None)
        finally:  # others wait for it
            self._regions, self._sources, self._kept = (), [], []
            # The owner of the host memory refers to us: it would live on until garbage is collected, and its memory with it.
            self._host = HostMemory(lambda: None, None, self._host.fall_back)
            _open.discard(self)
            self._queued.set()
            self._done.set()

    def _check_unchanged(self) -> None:
        changed = [tensor for tensor, version in self._kept if tensor._version != version]
        if changed:
            self._error = StoreError(
                f"{len(changed)} tensors, one of shape {list(changed[0].shape)}, were changed while they were being saved, so this "
                "save is void: call TierWriter.fence() before code that changes them outside of an optimizer's step(), or use "
                "stage='device' or stage='ram'"
            )

    def _missing(self, targets: Sequence[torch.Tensor]) -> Iterator[DrainPiece]:
        """The pieces that have to cross the link."""
        wanted = [[(0, region.length)] for region in self._regions]
        if self.generation is not None and self._accelerator.has_kernels and self._regions:
            wanted = self._without_known(targets)
        for region, source, target, ranges in zip(self._regions, self._sources, targets, wanted, strict=True):
            if source is not None:
                for begin, end in ranges:
                    yield DrainPiece(target[begin:end], source[begin:end])
            else:
                for at, tensor in region.parts:
                    yield DrainPiece(target[at : at + tensor.numel()], tensor)

    def _without_known(self, targets: Sequence[torch.Tensor]) -> list[list[tuple[int, int]]]:
        """Hash the snapshot on the device; fill in the chunks that the host has; return the other ranges of each region."""
        generation, stream = self.generation, self._drain.stream
        assert generation is not None
        cut = [cut_blocks(source.data_ptr(), source.numel()) for source in self._sources if source is not None]
        assert len(cut) == len(self._regions), "all of a snapshot is gathered"
        generation.blocks = np.concatenate([at for at, _ in cut]), np.concatenate([length for _, length in cut])
        generation.digests = self._accelerator.hash(stream, *generation.blocks)
        digests = generation.digests
        parts = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
        number = 0
        chunks: list[tuple[int, int, int, bytes]] = []  # region, begin, end, digest
        for index, region in enumerate(self._regions):
            self.digests.append([])
            for begin in range(0, region.length, CHUNK_BYTES):
                end = min(begin + CHUNK_BYTES, region.length)
                count = -(-(end - begin) // BLOCK_BYTES)
                whole = digest.combine(DigestKind.XXH3_128, end - begin, parts[number : number + count])
                number += count
                self.digests[index].append(whole)
                chunks.append((index, begin, end, whole))
        found: set[tuple[int, int]] = set()
        known = self._host.find({whole for *_, whole in chunks}) if self._host.find is not None else {}

        def fill(chunk: tuple[int, int, int, bytes]) -> None:
            index, begin, end, whole = chunk
            if not self._stop.is_set() and known[whole](memoryview(targets[index][begin:end].numpy())):
                found.add((index, begin))

        # Only what is found is shared out: threads that run Python keep the trainer's waiting for the interpreter's lock.
        processors().share_out(fill, [chunk for chunk in chunks if chunk[3] in known], threads_max=BESIDE_TRAINING)
        wanted: list[list[tuple[int, int]]] = [[] for _ in self._regions]
        for index, begin, end, _ in chunks:
            ranges = wanted[index]
            if (index, begin) in found:
                self.skipped_bytes += end - begin
            elif ranges and ranges[-1][1] == begin:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((begin, end))
        return wanted


def fence_all() -> None:
    """Call `Transfer.fence` on every transfer of this process that reads tensors in place."""
    for transfer in list(_open):
        transfer.fence()


_open: weakref.WeakSet[Transfer] = weakref.WeakSet()
_hooks: list[Any] = []
_lock = threading.Lock()


def _hook_optimizers() -> None:
    """Have every torch optimizer call `fence_all` before its step, from the first lazy save on."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: PLC0415 - slow to import, seldom needed

    with _lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(lambda *_: fence_all()))


def _is_small(region: MemoryRegion) -> bool:
    return all(tensor.numel() * tensor.element_size() < SMALL_BYTES for _, tensor in region.parts)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, in memory of its own only where its elements do not lie side by side."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def _version(tensor: torch.Tensor) -> int | None:
    with contextlib.suppress(RuntimeError):  # made in inference mode: it has none
        return int(tensor._version)
    return None
