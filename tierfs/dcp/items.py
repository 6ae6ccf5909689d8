"""From a plan's items to reads of shard files, and from what was read into the destination's tensors.

What lies in order in the destination's memory is read straight there. The rest goes through buffers of at most
`READ_BYTES_MAX` each, and as many of them as `BUFFERS_BYTES_MAX` allows at once.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tierfs.buffers import KEPT_MAX, buffers
from tierfs.dcp.metadatafile import Place
from tierfs.dcp.ranges import READ_BYTES_MAX, Extent, extents_of, grouped
from tierfs.dcp.shards import FileRange, ShardFiles
from tierfs.dcp.tensorbytes import writable_bytes
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import InvalidInputError

__all__ = ["ItemReader", "Saved", "put_in"]

STRAIGHT_BYTES_MIN = 1 << 20
"""A part of this length is worth a read of its own; below, what it shares blocks with is read along and copied."""
WAVE_BYTES_MAX = 1 << 30
"""Bytes asked for before any of them is handed on: bounds what a planner gives as destinations at once."""
BUFFERS_BYTES_MAX = KEPT_MAX * CHUNK_BYTES
"""What `buffers` keeps, so that no load but the first takes new memory."""
DENSE_BYTES_MAX = 1 << 62
NAMES_MAX = 3


@dataclass(frozen=True, slots=True)
class Saved:
    """A chunk of a tensor as it was saved, or an object.

    Attributes:
        place: Where its bytes are.
        dtype: Of its elements; ``None`` for an object.
        shape: Of the chunk.
    """

    place: Place
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class _Part:
    """Bytes to read for an item: an extent of its chunk, or the whole of an object."""

    fqn: str
    file: str
    at: int
    length: int
    straight: memoryview | None
    extent: Extent | None = None
    dtype: torch.dtype | None = None
    target: Any = None

    def put(self, source: memoryview) -> None:
        """Bring what was read, from the first to the last byte, to where it belongs."""
        if self.straight is not None:
            self.straight[:] = source
            return
        assert self.extent is not None
        assert self.dtype is not None
        size = self.dtype.itemsize
        raw = torch.frombuffer(source, dtype=torch.uint8)
        if raw.data_ptr() % size:
            # Tensors need not be aligned in a file, and not every processor reads elements that are not.
            raw = raw.clone()
        strides = [stride // size for stride in self.extent.strides]
        put_in(self.target, raw.view(self.dtype).as_strided(self.extent.lengths, strides))


class ItemReader:
    """Reads items of a plan, in waves. Planner calls are made on the caller's thread.

    Args:
        files: The checkpoint's.
        planner: torch's `LoadPlanner`.
    """

    def __init__(self, files: ShardFiles, planner: Any) -> None:
        self._files = files
        self._planner = planner
        self._parts: list[_Part] = []
        self._tensors: list[tuple[Any, Any, bool]] = []
        self._objects: list[tuple[Any, bytearray]] = []
        self._waiting_bytes = 0

    def read(self, items: Iterable[tuple[Any, Saved]]) -> None:
        """Read items into their destinations.

        Args:
            items: torch's `ReadItem`, and what was saved of it. Best in the order of files and offsets.

        Raises:
            CorruptionError: Stored bytes are wrong or missing.
            InvalidInputError: A destination does not fit.
            TierfsError: It failed.
        """
        for item, saved in items:
            if saved.dtype is None:
                self._add_object(item, saved.place)
            else:
                self._add_tensor(item, saved)
            if self._waiting_bytes >= WAVE_BYTES_MAX:
                self._flush()
        self._flush()

    def _add_object(self, item: Any, place: Place) -> None:
        content = bytearray(place.length)
        self._objects.append((item, content))
        fqn = item.storage_index.fqn
        self._parts.append(_Part(fqn, place.file, place.at, place.length, memoryview(content)))
        self._waiting_bytes += place.length

    def _add_tensor(self, item: Any, saved: Saved) -> None:
        fqn, place = item.storage_index.fqn, saved.place
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if len(offsets) != len(saved.shape) or any(
            offset < 0 or offset + length > whole
            for offset, length, whole in zip(offsets, lengths, saved.shape, strict=True)
        ):
            raise InvalidInputError(
                f"{fqn}: {list(lengths)} elements from {list(offsets)} on are asked for, and the chunk saved in {place.file} "
                f"is {list(saved.shape)}"
            )
        target = self._planner.resolve_tensor(item).detach()
        if tuple(target.shape) != lengths:
            raise InvalidInputError(
                f"{fqn}: the destination is {list(target.shape)}, and what goes there {list(lengths)}"
            )
        assert saved.dtype is not None
        is_same = target.dtype == saved.dtype and writable_bytes(target) is not None
        self._tensors.append((item, target, is_same))
        dense_max = DENSE_BYTES_MAX if is_same else READ_BYTES_MAX
        for extent in extents_of(saved.shape, saved.dtype.itemsize, offsets, lengths, dense_bytes_max=dense_max):
            part = _narrowed(target, extent)
            straight = writable_bytes(part) if is_same and extent.is_dense else None
            at = place.at + extent.at
            self._parts.append(_Part(fqn, place.file, at, extent.length, straight, extent, saved.dtype, part))
            self._waiting_bytes += extent.length

    def _flush(self) -> None:
        groups: list[list[_Part]] = []
        buffers_bytes = 0
        for group in grouped(
            self._parts, lambda part: (part.file, part.at, part.length), alone_from=STRAIGHT_BYTES_MIN
        ):
            if len(group) > 1 or group[0].straight is None:
                buffers_bytes += READ_BYTES_MAX
            groups.append(group)
            if buffers_bytes >= BUFFERS_BYTES_MAX:
                self._read_groups(groups)
                groups, buffers_bytes = [], 0
        self._read_groups(groups)
        for item, content in self._objects:
            self._planner.load_bytes(item, io.BytesIO(content))
        for item, tensor, is_straight in self._tensors:
            if is_straight and not tensor.is_inference():
                # Its memory was written behind autograd's back.
                torch.autograd.graph.increment_version(tensor)
            self._planner.commit_tensor(item, tensor)
        self._parts, self._tensors, self._objects, self._waiting_bytes = [], [], [], 0

    def _read_groups(self, groups: list[list[_Part]]) -> None:
        ranges: list[FileRange] = []
        buffered: list[tuple[list[_Part], memoryview]] = []
        with contextlib.ExitStack() as lent:
            for group in groups:
                first = group[0]
                if len(group) == 1 and first.straight is not None:
                    out = first.straight
                else:
                    length = max(part.at + part.length for part in group) - first.at
                    out = lent.enter_context(buffers().lend(length))
                    buffered.append((group, out))
                ranges.append(FileRange(first.file, first.at, out, _label(group)))
            self._files.read(ranges)
            for group, out in buffered:
                for part in group:
                    start = part.at - group[0].at
                    part.put(out[start : start + part.length])


def put_in(target: Any, source: Any) -> None:
    """Copy a tensor into another one of the same shape, converting the dtype.

    Args:
        target: Of any device, strides and dtype.
        source: On the CPU.
    """
    if target.dtype == source.dtype and source.dtype.itemsize == 1:
        # torch does not know how to copy some of the small ones; their bytes it does.
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    with torch.no_grad():
        target.copy_(source)


def _narrowed(target: Any, extent: Extent) -> Any:
    for dimension, (offset, length) in enumerate(zip(extent.offsets, extent.lengths, strict=True)):
        if length != target.shape[dimension]:
            target = target.narrow(dimension, offset, length)
    return target


def _label(group: list[_Part]) -> str:
    names = list(dict.fromkeys(part.fqn for part in group))
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return f"{', '.join(map(repr, names[:NAMES_MAX]))}{more}"
