"""The GPU operations that tierfs needs.

All other code in `tierfs.device` uses a GPU only through `Accelerator`. Tests put an object with the same methods in its
place: host memory, whose streams finish as late or as early as the contract allows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tierfs._fork import PerProcess
from tierfs.device.kernel_launch import copy_pieces, hash_blocks
from tierfs.errors import CapacityError, StoreError

GPU_FAILURES = CapacityError, StoreError, torch.cuda.OutOfMemoryError
"""After these, the host does the GPU's work: it has no memory left, or cannot compile the kernels."""
LARGE_BYTES = 1 << 20
"""Without CuPy, tensors of at least this size are copied on the device one by one."""


class MemoryRegion(NamedTuple):
    """A contiguous range of host memory, and the tensors that cover it without gaps.

    Attributes:
        length: In bytes.
        longest: Bytes of the longest tensor.
        tensors: Strided on the device.
        offsets: uint64: where each tensor lies in the region, in bytes.
        sizes: uint64: the bytes of each tensor.
        addresses: uint64: of each tensor's bytes on the device; 0 if they are not contiguous.
    """

    length: int
    longest: int
    tensors: Sequence[torch.Tensor]
    offsets: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    addresses: np.ndarray[Any, Any]


class Accelerator:
    """One CUDA device, by torch, and by CuPy for the kernels. Thread-safe.

    Streams and events are opaque: `current` and `new_stream` return streams, `record` returns events, and
    ``event.synchronize()`` blocks this thread until the work before the event is done. All copies are asynchronous. The
    caller keeps both tensors alive, and the source unchanged, until it has synchronized an event that was recorded
    behind the copy.

    Args:
        index: Index of the device.

    Attributes:
        name: Name of the card, for people.
        has_kernels: Whether CuPy is installed. `hash` needs it, and so do copies of many tensors in one launch.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.name = str(torch.cuda.get_device_name(index))
        self.has_kernels = _has_cupy()
        self._touched: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"Accelerator({self.device.index}, {self.name!r})"

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in this GPU's memory."""
        return bool(tensor.is_cuda and tensor.device.index == self.device.index)

    def allocate(self, length: int) -> torch.Tensor:
        """Allocate device memory by torch's allocator: uint8 of one dimension, uninitialised.

        Raises:
            CapacityError: The GPU does not have this much memory left.
        """
        try:
            return torch.empty(length, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise CapacityError(
                f"{self.name} has no {length} bytes left for the device tier ({free} of {total} bytes are free)",
                tier="device",
            ) from error

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        """Return the stream on which this thread's operations are queued."""
        return torch.cuda.current_stream(self.device)

    def record(self, stream: Any) -> Any:
        """Return an event behind all work that is queued on a stream so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Order work that is queued on ``stream`` from now on after ``event``. Does not block this thread."""
        stream.wait_event(event)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queue device-to-device copies on the current stream. Each pair of tensors has equal dtype and shape.

        With CuPy, one launch copies all contiguous tensors. Without it, large tensors are copied one by one, and all
        small ones together.
        """
        plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            if _is_plain(target) and _is_plain(source):
                plain.append((target, source))
            else:
                target.copy_(source, non_blocking=True)
        if self.has_kernels:
            copy_pieces([(to.data_ptr(), begin.data_ptr(), to.nbytes) for to, begin in plain], self.device)
            return
        small = []
        for target, source in plain:
            if target.nbytes >= LARGE_BYTES:
                target.copy_(source, non_blocking=True)
            else:
                small.append((as_bytes(target), as_bytes(source)))
        if small:
            torch._foreach_copy_([to for to, _ in small], [begin for _, begin in small])

    def gather(self, memory: torch.Tensor, regions: Sequence[tuple[int, MemoryRegion]]) -> None:
        """Queue copies on the current stream of tensors into device memory, with their elements in row-major order.

        Args:
            memory: uint8 of one dimension.
            regions: Each with its offset in the memory, in bytes. It is a multiple of each element's size.
        """
        others = [
            (begin + at, tensor)
            for begin, region in regions
            if not (self.has_kernels and region.addresses.all())
            for at, address, tensor in zip(
                region.offsets.tolist(), region.addresses.tolist(), region.tensors, strict=True
            )
            if not (self.has_kernels and address)
        ]
        if others:
            self.copy([view_of(memory, at, tensor) for at, tensor in others], [tensor.detach() for _, tensor in others])
        if self.has_kernels and regions:
            begin = memory.data_ptr()
            rows = [
                np.stack((each.offsets + np.uint64(begin + at), each.addresses, each.sizes), axis=1)
                for at, each in regions
            ]
            table = np.concatenate(rows)
            copy_pieces(table[table[:, 1] != 0], self.device)

    def fetch(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from the device to the host.

        Both tensors are uint8 of one dimension. The call may block if the target is pageable.
        """
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from the host to the device on the current stream. Both tensors have the same shape."""
        target.copy_(source, non_blocking=True)

    def host_memory(self, length: int) -> torch.Tensor:
        """Allocate page-locked host memory, uint8 of one dimension. If the driver refuses, it is pageable."""
        try:
            return torch.empty(length, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return torch.empty(length, dtype=torch.uint8)

    def touch(self, stream: Any) -> None:
        """Queue a tiny kernel.

        A copy engine runs copies of other streams between two copies of one stream only if a kernel separates the two.
        """
        with torch.cuda.stream(stream):
            if self._touched is None:
                self._touched = torch.zeros(1, device=self.device)
            self._touched.add_(1)

    def hash(self, stream: Any, addresses: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> Callable[[], bytes]:
        """Queue the hashing of blocks behind the work that is queued on a stream.

        Addresses are uint64, and lengths uint32, in bytes.

        Returns:
            A function that blocks until the digests are complete, and returns them in order, 16 bytes each.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            digests = hash_blocks(addresses, lengths, self.device)
            found = torch.empty(digests.shape, dtype=torch.uint8, pin_memory=True)
            found.copy_(digests, non_blocking=True)
            event = self.record(stream)

        def wait() -> bytes:
            event.synchronize()
            return bytes(found.numpy().tobytes())

        return wait

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Return whether host memory is page-locked for the device."""
        return bool(memory.is_pinned())

    def pin(self, memory: torch.Tensor) -> None:
        """Page-lock host memory, uint8 of one dimension, of at most 64 GiB per call.

        Raises:
            StoreError: The driver refuses.
        """
        try:
            with torch.cuda.device(self.device):
                code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        except RuntimeError as error:
            raise StoreError(f"cudaHostRegister failed: {error}", tier="device") from error
        if int(code):
            # The driver keeps the error for this thread, and the next launch raises it. Launch a kernel to clear it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            raise StoreError(f"cudaHostRegister failed with error {int(code)}", tier="device")

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`. Call it before the memory is unmapped."""
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def view_of(memory: torch.Tensor, at: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view of uint8 memory at an offset, with the dtype and shape of a tensor."""
    return memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat tensor that shares its memory.

    A tensor of one element counts as contiguous whatever its strides are, and ``view(-1)`` would keep them.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _has_cupy() -> bool:
    try:
        import cupy  # noqa: PLC0415 - slow to import, and only GPU work needs it
    except ImportError:
        return False
    return hasattr(cupy.cuda.Stream, "from_external")  # CuPy 14 or later


accelerators: list[Accelerator] = []
"""The devices that were registered."""
_cuda: dict[int, Accelerator] = {}  # the CUDA devices that were used in this process, by index
_lock = PerProcess(threading.Lock)  # held to add an accelerator


def register_accelerator(accelerator: Accelerator) -> None:
    """Let `accelerator_of` find a device that is no CUDA device from now on."""
    with _lock():
        accelerators.append(accelerator)


def accelerator_of(tensor: torch.Tensor) -> Accelerator | None:
    """Return the device on which a tensor lies. ``None`` for host memory and for unsupported devices."""
    if not tensor.is_cuda:
        for accelerator in accelerators:  # a generator takes twice as long, and this is asked for each tensor of a save
            if accelerator.owns(tensor):
                return accelerator
        return None
    index = tensor.get_device()
    found = _cuda.get(index)
    if found is None:
        with _lock():
            found = _cuda.get(index)
            if found is None:
                found = _cuda[index] = Accelerator(index)
    return found


def has_accelerator() -> bool:
    """Whether this process can use a GPU."""
    return bool(accelerators) or bool(torch.cuda.is_available())
