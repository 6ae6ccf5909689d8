"""Read boxes of tensors, and objects, of one checkpoint.

This is for callers that have no state to load into, or no room for all of it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tierfs.dcp.checkpoint import Checkpoint
from tierfs.dcp.columns import BytesPlace, SavedItem
from tierfs.dcp.load.shards import FileRange, ShardFiles
from tierfs.dcp.tensorbytes import narrowed
from tierfs.dcp.torch_format.data import STREAM_BUFFER_BYTES, read_items
from tierfs.dcp.torch_format.metadata import StockPlace
from tierfs.dcp.torch_format.streams import ReadStream, check_checksums
from tierfs.errors import CorruptionError

BATCH_BYTES = 64 << 20
_QUANTIZED = ("torch.qint", "torch.quint")


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor.

    Offsets and sizes are in elements.
    """

    fqn: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """In bytes."""
        return math.prod(self.sizes) * int(self.dtype.itemsize)


def boxes_of(checkpoint: Checkpoint, fqn: str, *, bytes_max: int = BATCH_BYTES) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``bytes_max``, in the order of its bytes and without gaps.

    A file of ``torch.save`` can only be read as a whole, so its tensor is one box.
    """
    item = checkpoint.metadata.state_dict_metadata[fqn]
    dtype, shape = item.properties.dtype, tuple(item.size)
    if any(isinstance(shard.place, StockPlace) for shard in checkpoint.shards(fqn)):
        yield Box(fqn, dtype, (0,) * len(shape), shape)
        return
    for offsets, sizes in _cut(shape, dtype.itemsize, bytes_max):
        yield Box(fqn, dtype, offsets, sizes)


def in_batches(boxes: Iterable[Box], *, bytes_max: int = BATCH_BYTES) -> Iterator[list[Box]]:
    """Yield boxes in order, in batches of at most ``bytes_max`` bytes. A larger box is a batch of its own."""
    batch: list[Box] = []
    total = 0
    for box in boxes:
        if batch and total + box.length > bytes_max:
            yield batch
            batch, total = [], 0
        batch.append(box)
        total += box.length
    if batch:
        yield batch


class BoxReader:
    """Reads parts of one checkpoint. Each of its files is looked up once. For one thread at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = ShardFiles(
            checkpoint.store, checkpoint.directory, checkpoint.note.files if checkpoint.note else {}
        )
        self._names = set(checkpoint.files())
        self._checked: set[BytesPlace] = set()
        self._targets: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}  # of the present `read`

    def read(self, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """Read boxes into tensors of their own, concurrently.

        The boxes are all different, and of tensors whose shards make up the whole tensor: see `Checkpoint.check_whole`.

        Raises:
            CorruptionError: Stored bytes are wrong or missing.
            TierfsError: The read failed.
        """
        if any(box.length for box in boxes):
            # Nothing is allocated until all files are known to exist with the lengths that the metadata says.
            self._files.open(self._names)
        wanted: list[tuple[Any, SavedItem]] = []
        for box in boxes:
            wanted += self._wanted(box)
            self._targets[box.fqn, box.offsets] = _tensor_for(box)
        for item, saved in wanted:
            self._check(saved.place, item.storage_index.fqn)
        read_items(self._files, wanted, self)
        targets, self._targets = self._targets, {}
        return [targets[box.fqn, box.offsets] for box in boxes]

    def each(
        self, boxes: Iterable[Box], progress: Callable[[int], object] | None = None
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield boxes in order, each with its elements, and pass the bytes of each to ``progress``. Raises as `read`."""
        for batch in in_batches(boxes):
            for box, tensor in zip(batch, self.read(batch), strict=True):
                yield box, tensor
                if progress is not None:
                    progress(box.length)

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        """Return the target of a read item. With `commit_tensor`, this is torch's `LoadPlanner` for `read_items`."""
        target = self._targets[item.dest_index.fqn, tuple(item.dest_index.offset)]
        return narrowed(target, item.dest_offsets, item.lengths)

    def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
        """Do nothing."""

    def load_bytes(self, item: Any, value: io.BytesIO) -> None:
        raise AssertionError("objects are read by `object`")

    def object(self, fqn: str) -> bytes:
        """Return the bytes of an object, as they were stored.

        Raises:
            CorruptionError: The bytes are wrong or missing.
            TierfsError: The read failed.
        """
        place = self._checkpoint.object(fqn)
        self._check(place, fqn)
        content = bytearray(place.length)
        self._files.read([FileRange(place.file, place.at, memoryview(content), repr(fqn))])
        return bytes(content)

    def _check(self, place: BytesPlace, fqn: str) -> None:
        """Check a place against its file's length and, for files without digests, the checksums in the archive.

        So the bytes of an archive are read twice.
        """
        if self._files.reader(place.file).length < place.at + place.length:
            raise CorruptionError(
                f"{fqn!r}: shard file {self._files.where(place.file)} is too short for it", path=place.file
            )
        if self._checkpoint.note is None and place not in self._checked:
            file = ReadStream(self._files.reader(place.file), place.at, place.length)
            check_checksums(self._files, place, fqn, io.BufferedReader(file, STREAM_BUFFER_BYTES))
            self._checked.add(place)

    def _wanted(self, box: Box) -> list[tuple[Any, SavedItem]]:
        described = self._checkpoint.metadata.state_dict_metadata[box.fqn]
        shards = {shard.offsets: shard for shard in self._checkpoint.shards(box.fqn)}
        for shard in shards.values():
            length = math.prod(shard.sizes) * box.dtype.itemsize
            if length and self._files.reader(shard.place.file).length < length:
                raise CorruptionError(
                    f"{box.fqn!r}: shard file {self._files.where(shard.place.file)} is too short for {length} bytes",
                    path=shard.place.file,
                )
        whole = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))]
        items = create_read_items_for_chunk_list(box.fqn, described, whole) if box.length else []
        return [(item, shards[tuple(item.storage_index.offset)]) for item in items]


def _tensor_for(box: Box) -> torch.Tensor:
    """Allocate a tensor for a box. Raises `CorruptionError` if no such tensor can exist."""
    if str(box.dtype).startswith(_QUANTIZED):
        raise CorruptionError(
            f"{box.fqn!r}: {box.dtype} is quantized, and checkpoints do not hold its scale and zero point"
        )
    try:
        raw = torch.empty(box.length, dtype=torch.uint8, device="cpu")
        empty = torch.empty(0 if box.length else box.sizes, dtype=box.dtype, device="cpu")
        return raw.view(box.dtype).view(box.sizes) if box.length else empty
    except RuntimeError as error:
        raise CorruptionError(
            f"{box.fqn!r}: no tensor can have {list(box.sizes)} elements of {box.dtype}: {error}"
        ) from error


def _cut(shape: tuple[int, ...], itemsize: int, bytes_max: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of boxes, in order. The bytes of each box are contiguous in a row-major array."""
    if not shape or math.prod(shape) * itemsize <= bytes_max:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:]) * itemsize
    if row <= bytes_max:
        count = bytes_max // row
        for start in range(0, shape[0], count):
            yield (start, *(0,) * (len(shape) - 1)), (min(count, shape[0] - start), *shape[1:])
        return
    for start in range(shape[0]):
        for offsets, sizes in _cut(shape[1:], itemsize, bytes_max):
            yield (start, *offsets), (1, *sizes)
