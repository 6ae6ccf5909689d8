"""Write a rank's items to its shard file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from tierfs.dcp.save.commit import commit_shard
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.dcp.save.gpu_tensors import begin_tensors, snapshots_of
from tierfs.dcp.save.placed import Placed
from tierfs.dcp.save.plan import described, unique
from tierfs.dcp.save.saves import Save
from tierfs.dcp.save.shard_file import FileState, ShardFile, staged_in
from tierfs.dcp.save.streaming import StreamPart, object_part, say_waves, stream, tensor_part
from tierfs.dcp.tensorbytes import refuse_unusual
from tierfs.errors import CapacityError
from tierfs.store import Store

Stored: TypeAlias = tuple[int, list[int], list[int]]
"""A file's length, and the offset and length of each item in it; all in bytes."""


def write_shard(store: Store, path: str, items: Sequence[tuple[WriteItem, Any]], gpu: GpuStaging, save: Save) -> Stored:
    """Store a rank's items as one safetensors file, from the memory where they were staged, or by copying them.

    Args:
        store: The store to write to.
        path: Relative to the store; drawn at random.
        items: With their data.
        gpu: Moves tensors from a GPU, and remembers where the items lie in the device tier.
        save: The save.

    Raises:
        StoreError, CapacityError, ConflictError, TimeoutError: The file could not be stored.
        InvalidInputError: A tensor has no elements to store.
    """
    try:
        file, placed = _place(store, items, gpu)
    except CapacityError as error:
        say_waves(store, error)
        items = _without_room(store, items)
        length, begins = stream(store, path, [_part(*item) for item in items])
        return length, begins, [_length(data) for _, data in items]
    items_placed = zip(items, placed, strict=True)
    snapshots = snapshots_of(
        file.transfers,
        ((item.index, data, where) for (item, data), where in items_placed if item.type is not WriteItemType.BYTE_IO),
    )
    length, offsets = commit_shard(file, path, placed)
    gpu.keep(save, snapshots)
    return length, [offsets[id(where)] for where in placed], [where.length for where in placed]


def _place(store: Store, items: Sequence[tuple[WriteItem, Any]], gpu: GpuStaging) -> tuple[ShardFile, list[Placed]]:
    """Find the staged items, copy the others, and return the file and the place of each item."""
    placed: list[Placed | None] = [None] * len(items)
    tensors: list[tuple[int, torch.Tensor]] = []
    objects: list[tuple[int, memoryview]] = []
    file: ShardFile | None = None
    for number, (item, data) in enumerate(items):
        if item.type is WriteItemType.BYTE_IO:
            objects.append((number, data.getbuffer()))
            continue
        refuse_unusual(data, item.index.fqn)
        found = staged_in(data)
        if found is not None:
            found[0].check_is_held()
            if found[0].state is FileState.PRIVATE:
                raise CapacityError(
                    "there was no room to stage the state, and the save does not wait for room again", tier="ram"
                )
        if found is not None and found[0].store is store and file in {None, found[0]}:
            file, placed[number] = found
            file.save = None  # the save has begun, whichever way its state came here
        else:
            if found is not None:
                found[0].check_arrived()
            tensors.append((number, data))
    is_new, file = file is None, file or ShardFile(store, gpu)
    try:
        named = [(items[number][0].index.fqn, tensor) for number, tensor in tensors]
        for (number, _), where in zip(tensors, _copied(file, named), strict=True):
            placed[number] = where
        blobs = file.add_objects([(items[number][0].index.fqn, data) for number, data in objects])
        for (number, _), where in zip(objects, blobs, strict=True):
            placed[number] = where
    except BaseException:
        if is_new:
            file.abort()  # its memory is needed to write in waves
        raise
    return file, [where for where in placed if where is not None]


def _copied(file: ShardFile, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[Placed]:
    """Copy tensors into a file, and return their places."""
    views = begin_tensors(file, tensors, at_once=True).result()
    file.wait_filled()
    return [
        file.find(view)
        or Placed(unique(name, file.names), *described(tensor.dtype, tensor.shape, 0), run=None, at=0, length=0)
        for view, (name, tensor) in zip(views, tensors, strict=True)
    ]


def _without_room(store: Store, items: Sequence[tuple[WriteItem, Any]]) -> Sequence[tuple[WriteItem, Any]]:
    """Return items to be read in waves. The file in which they were staged is released to make room.

    Raises:
        StoreError: The staged state was saved or discarded before.
        TierfsError: See `ShardFile.wait_filled`.
    """
    tensors = {number: data for number, (item, data) in enumerate(items) if item.type is not WriteItemType.BYTE_IO}
    file: ShardFile | None = None
    for found in filter(None, map(staged_in, tensors.values())):
        found[0].check_is_held()
        found[0].check_arrived()
        if file is None and found[0].store is store and found[0].state is FileState.OPEN:
            file = found[0]
    if file is None:
        return items
    held = [number for number, data in tensors.items() if file.holds(data)]
    copies = dict(zip(held, file.private_copies([tensors[number] for number in held]), strict=True))
    file.abort()
    return [(item, copies.get(number, data)) for number, (item, data) in enumerate(items)]


def _part(item: WriteItem, data: Any) -> StreamPart:
    if item.type is WriteItemType.BYTE_IO:
        return object_part(item.index.fqn, data.getbuffer())
    return tensor_part(item.index.fqn, data)


def _length(data: Any) -> int:
    return len(data.getbuffer()) if isinstance(data, io.BytesIO) else int(data.numel() * data.element_size())
