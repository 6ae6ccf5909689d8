"""Read the items of a plan from shard files, and put them into the destination's tensors.

Bytes whose order in the destination's memory is the stored order are read directly into it, or loaded through a GPU
that verifies them. The others go through buffers, at most `BUFFERS_MAX` at once. If two names share their memory, one
is read after the other, as torch does. Concurrent reads would each verify bytes that the other one wrote. Tied weights
have two names for one tensor.
"""

from __future__ import annotations

import contextlib
import io
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierfs.buffers import KEPT_MAX, buffers
from tierfs.dcp.columns import BytesPlace, SavedItem
from tierfs.dcp.load.coverage import READ_BYTES_MAX, BoxExtent, extents_of
from tierfs.dcp.load.gpu_chunks import GpuChunks, Uploads
from tierfs.dcp.load.shards import FileRange, ShardFiles
from tierfs.dcp.planner import object_loader
from tierfs.dcp.tensorbytes import has_shared_elements, is_quantized, lacks_quantizer, narrowed, plain_bytes
from tierfs.dcp.torch_format.streams import check_checksums
from tierfs.device.accelerator import GPU_FAILURES, accelerator_of
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import InvalidInputError

WAVE_BYTES_MAX = 1 << 30
"""Bytes requested before any of them is passed on. This limits the destinations that a planner provides at once."""
GPU_WAVE_BYTES_MAX = 4 << 30
"""The same for tensors on a GPU: at the end of a wave, its link is idle for as long as 16 chunks take."""
SLACK_BYTES = 128 << 20
"""How many more bytes a wave may have, so that it ends where a chunk ends."""
BUFFERS_MAX = KEPT_MAX
"""The number of 16 MiB buffers that `buffers` keeps, so that only the first load allocates memory."""
DENSE_BYTES_MAX = 1 << 62
ALIGN = 16
"""The size of the largest element, in bytes.

Tensors in a file may be unaligned, and some processors cannot read such elements.
"""


@dataclass(slots=True)
class _Extent:
    """Bytes to read for an item: an extent of its chunk, or a whole object."""

    fqn: str
    file: str
    at: int
    length: int
    straight: memoryview | None
    extent: BoxExtent | None = None
    dtype: torch.dtype | None = None
    target: Any = None
    on_gpu: torch.Tensor | None = None  # the target's bytes, if the stored bytes can be copied there

    def put(self, source: memoryview, uploads: Uploads | None = None) -> None:
        """Copy the extent from a buffer to its target."""
        assert self.extent is not None
        assert self.dtype is not None
        strides = [stride // self.dtype.itemsize for stride in self.extent.strides]
        raw = torch.frombuffer(source, dtype=torch.uint8).view(self.dtype)
        put_in(self.target, raw.as_strided(self.extent.lengths, strides), uploads)


class ItemReader:
    """Reads items of a plan in waves. It calls the planner on the caller's thread."""

    def __init__(self, files: ShardFiles, planner: Any) -> None:
        self._files = files
        self._planner = planner
        self._parts: list[_Extent] = []
        self._tensors: list[tuple[Any, Any, bool]] = []
        self._objects: list[tuple[Any, BytesPlace, bytearray]] = []
        self._waiting_bytes = 0
        self._destinations = Destinations()
        self._uploads: Uploads | None = None
        self._gpu_chunks: GpuChunks | None = None
        self._gpu_verifies = files.has_copies
        self._total_bytes = 0

    def _uploads_to(self, target: torch.Tensor) -> Uploads | None:
        """Return buffers for uploads to a destination's GPU; ``None`` on the CPU, and for a second GPU in one load."""
        accelerator = accelerator_of(target)
        if accelerator is None:
            return None
        if self._uploads is None:
            self._uploads = Uploads(accelerator, self._total_bytes)
        return self._uploads if self._uploads.accelerator is accelerator else None

    def read(self, items: Sequence[tuple[Any, SavedItem]]) -> None:
        """Read items into their destinations.

        Sorted by file and offset they are read fastest.

        Raises:
            CorruptionError: Stored bytes are wrong or missing.
            InvalidInputError: A destination has the wrong shape or layout.
            TierfsError: The read failed.
        """
        self._total_bytes = sum(saved.place.length for _, saved in items)
        for item, saved in items:
            if saved.dtype is None:
                self._add_object(item, saved.place)
            else:
                self._add_tensor(item, saved)
            if self._is_enough():
                self._flush()
        self._flush()

    def _is_enough(self) -> bool:
        """Whether a wave ends here.

        It ends with a chunk, which is then not requested twice, or after `SLACK_BYTES` more.
        """
        if self._waiting_bytes < WAVE_BYTES_MAX:
            return False
        last = self._parts[-1]
        most = WAVE_BYTES_MAX if last.on_gpu is None else GPU_WAVE_BYTES_MAX
        return self._waiting_bytes >= most + SLACK_BYTES or (
            self._waiting_bytes >= most and self._files.is_cut(last.file, last.at + last.length)
        )

    def _add_object(self, item: Any, place: BytesPlace) -> None:
        fqn = item.storage_index.fqn
        # Nothing is allocated before the metadata's length is checked against the file.
        self._files.check(place.file, place.at, place.length, repr(fqn))
        content = bytearray(place.length)
        self._objects.append((item, place, content))
        self._parts.append(_Extent(fqn, place.file, place.at, place.length, memoryview(content)))
        self._waiting_bytes += place.length

    def _add_tensor(self, item: Any, saved: SavedItem) -> None:
        fqn, place = item.storage_index.fqn, saved.place
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if len(offsets) != len(saved.sizes) or any(
            offset < 0 or offset + length > whole
            for offset, length, whole in zip(offsets, lengths, saved.sizes, strict=True)
        ):
            raise InvalidInputError(
                f"{fqn}: the plan reads {list(lengths)} elements at {list(offsets)}, but the chunk saved in "
                f"{place.file} has shape {list(saved.sizes)}"
            )
        target = self._planner.resolve_tensor(item).detach()
        if tuple(target.shape) != lengths:
            raise InvalidInputError(
                f"{fqn}: the destination has shape {list(target.shape)}, but the part to load has {list(lengths)}"
            )
        if target.layout is not torch.strided:
            raise InvalidInputError(f"{fqn}: the destination's layout is {target.layout}: load into a dense tensor")
        if has_shared_elements(target):
            raise InvalidInputError(
                f"{fqn}: the destination's elements share memory, as in an expanded tensor: load into a clone of it"
            )
        if not self._destinations.add(fqn, target):
            self._flush()
            self._destinations.add(fqn, target)
        assert saved.dtype is not None
        is_on_gpu = accelerator_of(target) is not None
        whole = plain_bytes(target) if target.dtype == saved.dtype and (target.is_cpu or is_on_gpu) else None
        is_same = whole is not None
        self._tensors.append((item, target, is_same))
        is_straight = is_same and target.is_cpu and not is_on_gpu
        dense_max = DENSE_BYTES_MAX if is_straight else READ_BYTES_MAX
        for extent in extents_of(saved.sizes, saved.dtype.itemsize, offsets, lengths, dense_bytes_max=dense_max):
            part, flat = target, whole if extent.is_dense else None
            if extent.lengths != lengths:
                part = narrowed(target, extent.offsets, extent.lengths)
                flat = plain_bytes(part) if is_same and extent.is_dense else None
            straight = memoryview(flat.numpy()) if flat is not None and is_straight else None
            on_gpu = flat if is_on_gpu else None
            at = place.at + extent.at
            self._parts.append(_Extent(fqn, place.file, at, extent.length, straight, extent, saved.dtype, part, on_gpu))
            self._waiting_bytes += extent.length

    def _flush(self) -> None:
        waiting = deque(self._load_on_gpu())
        while waiting:
            self._read_some(waiting)
        if self._uploads is not None:
            self._uploads.finish()
        load = object_loader(self._planner)
        for item, place, content in self._objects:
            stream = io.BytesIO(content)
            check_checksums(self._files, place, item.storage_index.fqn, stream)
            stream.seek(0)
            load(item, stream)
        for item, tensor, is_same in self._tensors:
            if is_same and not tensor.is_inference():
                # torch did not see the write to its memory.
                torch.autograd.graph.increment_version(tensor)
            self._planner.commit_tensor(item, tensor)
        self._parts, self._tensors, self._objects, self._waiting_bytes = [], [], [], 0
        self._destinations = Destinations()

    def _load_on_gpu(self) -> list[_Extent]:
        """Load the parts of chunks that a GPU can verify. Returns the other parts."""
        loaded: list[_Extent] = []
        wanted: list[FileRange] = []
        uploads: Uploads | None = None
        for part in self._parts if self._gpu_verifies else ():
            to = None if part.on_gpu is None else self._uploads_to(part.target)
            if part.on_gpu is not None and to is not None and to.accelerator.has_kernels:
                self._files.check(part.file, part.at, part.length, repr(part.fqn))
                loaded.append(part)
                wanted.append(FileRange(part.file, part.at, part.on_gpu, repr(part.fqn)))
                uploads = to
        if uploads is None:
            return self._parts
        try:
            if self._gpu_chunks is None:
                self._gpu_chunks = GpuChunks(self._files, uploads)
            missed = self._gpu_chunks.load(wanted)
        except GPU_FAILURES as error:
            self._gpu_verifies, self._gpu_chunks = False, None
            self._files.fall_back("gpu_load", "chunks are verified on the host instead of the GPU: %s", error)
            return self._parts
        done = {id(part) for number, part in enumerate(loaded) if number not in missed}
        return [part for part in self._parts if id(part) not in done]

    def _read_some(self, waiting: deque[_Extent]) -> None:
        """Read parts and remove them from ``waiting``, as long as buffers are free."""
        ranges: list[FileRange] = []
        buffered: list[tuple[_Extent, memoryview]] = []
        uploaded: list[tuple[_Extent, memoryview]] = []
        room = pinned = memoryview(b"")
        count = 0
        with contextlib.ExitStack() as lent:
            while waiting:
                part = waiting[0]
                out = part.straight
                uploads = self._uploads_to(part.target) if out is None and part.extent is not None else None
                if out is None and uploads is not None:
                    if part.length > len(pinned):
                        fresh = uploads.lend()
                        if fresh is None:
                            break
                        pinned = fresh
                    out, pinned = pinned[: part.length], pinned[-(-part.length // ALIGN) * ALIGN :]
                    uploaded.append((part, out))
                elif out is None:
                    if part.length > len(room):
                        if count == BUFFERS_MAX:
                            break
                        room = lent.enter_context(buffers().lend(CHUNK_BYTES))
                        count += 1
                    out, room = room[: part.length], room[-(-part.length // ALIGN) * ALIGN :]
                    buffered.append((part, out))
                ranges.append(FileRange(part.file, part.at, out, repr(part.fqn)))
                waiting.popleft()
            self._files.read(ranges)
            for part, out in buffered:
                part.put(out)
            if self._uploads is not None:
                for part, out in uploaded:
                    part.put(out, self._uploads)
                self._uploads.swap()


def put_in(target: Any, source: Any, uploads: Uploads | None = None) -> None:
    """Copy a tensor into another one of the same shape, converting the dtype.

    The source is on the CPU. If it lies in lent buffers of ``uploads``, the copy to a GPU may be done later.
    """
    if target.dtype == source.dtype and source.dtype.itemsize == 1 and not is_quantized(target):
        # torch cannot copy some of the one-byte dtypes, but it can copy their bytes.
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    if uploads is not None:
        uploads.put(target, source)
        return
    if lacks_quantizer(target):
        raise InvalidInputError(
            f"the destination is a view with dtype {target.dtype}, which torch cannot copy into: load into the integer "
            "tensor behind it"
        )
    with torch.no_grad():
        target.copy_(source)


class Destinations:
    """The memory of the destinations that are read into at once, by name. No two names overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # sorted; `_stops` has the same order
        self._stops: list[int] = []
        self._spans: dict[str, tuple[int, int]] = {}

    def add(self, name: str, tensor: Any) -> bool:
        """Add a destination. Several destinations of one name are assumed not to overlap.

        Returns:
            False if the memory from its first to its last byte may overlap another name's. Then it is not added.
        """
        start = tensor.data_ptr()
        if not tensor.numel() or not start:
            return True
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (reach + 1) * tensor.itemsize
        known = self._spans.get(name)
        if known is not None:
            start, stop = min(start, known[0]), max(stop, known[1])
            if (start, stop) == known:
                return True
            self._remove(known)
        before = bisect_left(self._starts, stop)
        is_free = not before or self._stops[before - 1] <= start
        if not is_free:
            if known is None:
                return False
            start, stop = known
            before = bisect_left(self._starts, stop)
        self._starts.insert(before, start)
        self._stops.insert(before, stop)
        self._spans[name] = start, stop
        return is_free

    def _remove(self, span: tuple[int, int]) -> None:
        index = bisect_left(self._starts, span[0])
        del self._starts[index], self._stops[index]
