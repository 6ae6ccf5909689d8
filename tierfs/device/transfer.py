"""Copy the tensors of one save from the GPU into host memory.

A transfer has two parts. `capture` queues, on the current stream, the copies that make the tensors safe to change, or
notes which tensors must not change yet. `run` moves the bytes to the host, on a thread of the caller. The three modes
differ only in the tensors that are captured:

- ``device``: all tensors, in a generation of the device tier. Training continues at once.
- ``lazy``: small tensors, in scratch memory. Large ones are read in place; `fence` orders the optimizer after that.
- ``ram``: small tensors too, which saves a copy operation for each. The trainer then waits for `run`.

Lazy mode is the scheme of DataStates-LLM (Maurya et al., HPDC 2024): tensors do not change between two optimizer steps.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from tierfs import digest
from tierfs.device.accelerator import GPU_FAILURES, Accelerator, MemoryRegion, as_bytes
from tierfs.device.drain import Drain
from tierfs.device.kernel_launch import DIGEST_BYTES, cut_blocks
from tierfs.device.tier import ALIGN_BYTES, DeviceTier, Generation, Spot
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, DigestKind
from tierfs.errors import InvalidInputError, StoreError
from tierfs.gc_pause import detached

SMALL_BYTES = 1 << 20
"""If all tensors of a region are shorter, they are gathered on the device and cross the link as one."""
FillChunks: TypeAlias = Callable[[Sequence[tuple[bytes, torch.Tensor]]], Sequence[bool]]
"""Fills host memory with chunks that the host has, by their digests. Returns for each whether it did."""
BESIDE_TRAINING = 4
"""Most threads that copy or hash concurrently during training. More of them keep the trainer's thread from the GIL."""


class CaptureMode(enum.Enum):
    """How a transfer makes tensors safe to change. The module's docstring describes the modes."""

    DEVICE = "device"
    LAZY = "lazy"
    RAM = "ram"


class Transfer:
    """Copies the tensors of one save to host memory. Any thread may call `fence`, `wait` and `cancel`.

    `CaptureMode.DEVICE` requires a device tier.

    Args:
        pin: Registers the host's memory with the GPU, where it is not registered yet.
        fill: ``None`` if the store uses another kind of digest.
        fall_back: Reports a fallback. Called with a name and a message.

    Attributes:
        mode: The mode in effect. It becomes ``ram`` if the device tier has no room.
        generation: Holds the snapshot in `CaptureMode.DEVICE`.
        offsets: Offset of each region in the generation.
        digests: For each region the digests of its chunks, computed before the bytes leave the device. Empty without
            CuPy, and in the other modes.
        skipped_bytes: Bytes that did not cross the link, because the host had equal chunks.
    """

    def __init__(
        self,
        mode: CaptureMode,
        accelerator: Accelerator,
        drain: Drain,
        tier: DeviceTier | None,
        *,
        pin: Callable[[], None],
        fill: FillChunks | None,
        fall_back: Callable[[str, str], None],
    ) -> None:
        self.mode = mode
        self.generation: Generation | None = None
        self.offsets: list[int] = []
        self.digests: list[list[bytes]] = []
        self.skipped_bytes = 0
        self._accelerator = accelerator
        self._drain = drain
        self._tier = tier
        self._pin, self._fill, self._fall_back = pin, fill, fall_back
        self._regions: Sequence[MemoryRegion] = ()
        self._direct: list[list[tuple[int, torch.Tensor]]] = []  # per region, the bytes of the tensors read in place
        self._sources: list[torch.Tensor | None] = []  # per region, the device memory it was gathered in
        self._kept: list[tuple[torch.Tensor, int]] = []  # tensors read in place, with their versions
        self._captured: Any = None
        self._last: Any = None
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
        """Queue copies on the current stream of the tensors that the mode captures, so that they are safe to change.

        Raises:
            InvalidInputError: The current stream is being captured into a CUDA graph.
        """
        if self._accelerator.is_capturing():
            raise InvalidInputError(
                "a state cannot be staged while a CUDA graph is captured: stage before or after the capture"
            )
        self._regions = regions
        gathered = [self.mode is CaptureMode.DEVICE or region.longest < SMALL_BYTES for region in regions]
        offsets, total = [], 0
        for region, is_gathered in zip(regions, gathered, strict=True):
            offsets.append(total)
            total += -(-region.length // ALIGN_BYTES) * ALIGN_BYTES if is_gathered else 0
        self.offsets = offsets
        memory = self._gather(
            total,
            [(at, region) for at, region, is_small in zip(offsets, regions, gathered, strict=True) if is_small],
        )
        if memory is None and self.mode is CaptureMode.DEVICE:
            self.mode = CaptureMode.RAM
            self.capture(regions)
            return
        if memory is None:
            gathered = [False] * len(regions)
        self._sources = [
            memory[at : at + region.length] if memory is not None and is_gathered else None
            for region, at, is_gathered in zip(regions, offsets, gathered, strict=True)
        ]
        direct = [() if is_gathered else region.tensors for region, is_gathered in zip(regions, gathered, strict=True)]
        with torch.no_grad():
            self._direct = [
                [(at, _flat(one)) for at, one in zip(region.offsets.tolist() if tensors else (), tensors, strict=True)]
                for region, tensors in zip(regions, direct, strict=True)
            ]
        if self.mode is CaptureMode.LAZY:
            self._kept = [
                (one, version) for tensors in direct for one in tensors if (version := _version(one)) is not None
            ]
        self._captured = self._accelerator.record(self._accelerator.current())
        if self.generation is not None:
            self.generation.taken_s = time.monotonic()
        if self.mode is CaptureMode.LAZY:
            _open.add(self)
            _hook_optimizers()
        if self.mode is CaptureMode.RAM:
            self._hurry.set()

    def _gather(self, total: int, regions: Sequence[tuple[int, MemoryRegion]]) -> torch.Tensor | None:
        """Gather tensors in new memory on the device. If the GPU fails, report a fallback and return ``None``."""
        try:
            if self.mode is CaptureMode.DEVICE:
                assert self._tier is not None
                self.generation = self._tier.take(total, self)
                memory = self.generation.memory
            else:
                memory = self._accelerator.allocate(total)
            with torch.no_grad():
                self._accelerator.gather(memory, regions)
        except GPU_FAILURES as error:
            if self.generation is not None:
                assert self._tier is not None
                self._tier.give(self.generation, drained=False)
                self.generation = None
            name = "device_tier" if self.mode is CaptureMode.DEVICE else "device_scratch"
            self._fall_back(name, f"tensors are copied to host memory while training waits: {error}")
            return None
        return memory

    def fence(self) -> None:
        """Order work that is queued on the current stream from now on behind the reads in place.

        Blocks until all copies are queued, not until they are done. The optimizer hook calls this. Only
        `CaptureMode.LAZY` needs it: in the other modes this does nothing, because the tensors may be changed after
        `capture`.
        """
        if self.mode is not CaptureMode.LAZY or self._done.is_set() or self._is_fenced:
            return
        self._hurry.set()
        with self._drain.rush():
            self._queued.wait()
        if self._last is not None:
            self._accelerator.wait(self._accelerator.current(), self._last)
        # The lock: the drain's thread may check at the same time, and training changes tensors once this returns.
        with self._checking:
            self._check_unchanged()
            self._is_fenced = True

    # -- on any thread -------------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether the transfer has ended."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the host memory holds the bytes of the tensors.

        Raises:
            StoreError: A tensor was changed while it was read in place, or the transfer was cancelled or discarded.
            TierfsError, RuntimeError: The copy failed.
        """
        self._done.wait()
        if self._error is not None:
            raise detached(self._error)

    def cancel(self) -> None:
        """Stop the transfer. Once this returns, it no longer writes to the host memory."""
        self._stop.set()
        self._hurry.set()
        self._done.wait()

    def publish(self, save_id: str, items: dict[Any, Spot]) -> None:
        """Call `DeviceTier.publish` for the snapshot of this transfer, if there is a device tier."""
        if self._tier is not None:
            self._tier.publish(self, save_id, items)

    def discard(self, error: BaseException | None = None) -> None:
        """End a captured transfer that will not run. `wait` raises ``error``, or a `StoreError` if it is ``None``."""
        self._end(error or StoreError("the staged state was discarded: stage it again"))

    def run(self, targets: Sequence[torch.Tensor]) -> None:
        """Move the bytes to the host. If the move fails, this does not raise, but `wait` does.

        Args:
            targets: For each region host memory of its length, uint8 of one dimension.

        Raises:
            BaseException: An error that is no `Exception`, such as `KeyboardInterrupt`. `wait` raises it, too.
        """
        error: BaseException | None = None
        try:
            # The trainer waits for a transfer of mode `RAM`, and for the transfers whose turn comes before.
            is_awaited = self.mode is CaptureMode.RAM
            with self._drain.rush() if is_awaited else contextlib.nullcontext(), self._drain.turn:
                self._drain.pins.sweep()
                self._pin()
                assert self._captured is not None
                self._accelerator.wait(self._drain.stream, self._captured)
                missing = self._missing(targets)
                self._drain.move(missing, self._hurry, self._stop, self._note_queued)
            if self._stop.is_set():
                error = StoreError("the staged state was discarded: stage it again")
            with self._checking:
                if not self._is_fenced:
                    self._check_unchanged()
        except BaseException as raised:  # noqa: BLE001 - raised again by `wait`
            error = raised
        self._end(error)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _note_queued(self, event: Any) -> None:
        self._last = event
        self._queued.set()

    def _end(self, error: BaseException | None) -> None:
        try:
            if error is not None and self._error is None:
                self._error = detached(error)
            if self.generation is not None:
                assert self._tier is not None
                self._tier.give(self.generation, drained=self._error is None)
        finally:  # other threads wait for it
            self._regions, self._direct, self._sources, self._kept = (), [], [], []
            # The owner of the host memory refers to this transfer. Break the reference cycle, which would keep the
            # owner and its memory alive until garbage collection.
            self._pin, self._fill = (lambda: None), None
            _open.discard(self)
            self._queued.set()
            self._done.set()

    def _check_unchanged(self) -> None:
        changed = [tensor for tensor, version in self._kept if tensor._version != version]
        if changed:
            self._error = StoreError(
                f"{len(changed)} tensors, one of shape {list(changed[0].shape)}, were changed while they were being "
                "saved, so this save is discarded: call TierWriter.fence() before code that changes them outside of "
                "an optimizer's step(), or use stage='device' or stage='ram'"
            )

    def _missing(self, targets: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the pieces that have to cross the link."""
        wanted = [[(0, region.length)] for region in self._regions]
        if self.generation is not None and self._accelerator.has_kernels and self._regions:
            wanted = self._without_known(targets)
        for direct, source, target, ranges in zip(self._direct, self._sources, targets, wanted, strict=True):
            if source is not None:
                for begin, end in ranges:
                    yield target[begin:end], source[begin:end]
            else:
                for at, tensor in direct:
                    yield target[at : at + tensor.numel()], tensor

    def _without_known(self, targets: Sequence[torch.Tensor]) -> list[list[tuple[int, int]]]:
        """Hash the snapshot on the device, fill in chunks that the host has, and return the other ranges per region."""
        generation, stream = self.generation, self._drain.stream
        assert generation is not None
        cut = [cut_blocks(source.data_ptr(), source.numel()) for source in self._sources if source is not None]
        assert len(cut) == len(self._regions), "all of a snapshot is gathered"
        generation.blocks = np.concatenate([at for at, _ in cut]), np.concatenate([length for _, length in cut])
        try:
            digests = generation.digests = self._accelerator.hash(stream, *generation.blocks)()
        except GPU_FAILURES as error:
            self._fall_back(
                "gpu_hash", f"a snapshot is copied whole, is not compared, and cannot be rolled back to: {error}"
            )
            return [[(0, region.length)] for region in self._regions]
        at = 0
        chunks: list[tuple[int, int, int, bytes]] = []  # region, begin, end, digest
        for index, region in enumerate(self._regions):
            self.digests.append([])
            for begin in range(0, region.length, CHUNK_BYTES):
                end = min(begin + CHUNK_BYTES, region.length)
                stop = at + -(-(end - begin) // BLOCK_BYTES) * DIGEST_BYTES
                whole = digest.combine(DigestKind.XXH3_128, end - begin, [digests[at:stop]])
                at = stop
                self.digests[index].append(whole)
                chunks.append((index, begin, end, whole))
        known = [(whole, targets[index][begin:end]) for index, begin, end, whole in chunks]
        filled = self._fill(known) if self._fill is not None else [False] * len(chunks)
        wanted: list[list[tuple[int, int]]] = [[] for _ in self._regions]
        for (index, begin, end, _), is_filled in zip(chunks, filled, strict=True):
            ranges = wanted[index]
            if is_filled:
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
os.register_at_fork(after_in_child=_open.clear)  # a child has no thread that moves the bytes
_hooks: list[Any] = []
_lock = threading.Lock()


def _hook_optimizers() -> None:
    """Make every torch optimizer call `fence_all` before its step. The first lazy save installs the hook."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: PLC0415 - slow to import, seldom needed

    with _lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(lambda *_: fence_all()))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor. Copy it only if it is not contiguous, or is conjugated or negated lazily."""
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _version(tensor: torch.Tensor) -> int | None:
    with contextlib.suppress(RuntimeError):  # a tensor made in inference mode has no version
        return int(tensor._version)
    return None
