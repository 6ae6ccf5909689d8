"""Write a shard file that does not fit into the ram tier: from front to back, so that it passes through in waves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tierfs.codec.layout.safetensors import METADATA_NAME, HeaderEntry
from tierfs.dcp.save.plan import described, header, unique
from tierfs.dcp.tensorbytes import bytes_of
from tierfs.errors import CapacityError
from tierfs.store import Store, Writer
from tierfs.store.commit import part_of


@dataclass(frozen=True, slots=True)
class StreamPart:
    """A tensor or object to write.

    Attributes:
        name: Its name; made unique in the file.
        dtype: The safetensors name of the dtype.
        shape: Rows first.
        length: In bytes.
        read: Returns the bytes. Called when the part is written, so that at most one tensor is copied at a time.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    length: int
    read: Callable[[], memoryview]


def tensor_part(name: str, tensor: torch.Tensor) -> StreamPart:
    """Return the part for a dense tensor on any device."""
    length = tensor.numel() * tensor.element_size()
    return StreamPart(name, *described(tensor.dtype, tensor.shape, length), length, lambda: bytes_of(tensor))


def object_part(name: str, data: memoryview) -> StreamPart:
    """Return the part for a serialised object."""
    return StreamPart(name, "U8", (len(data),), len(data), lambda: data)


def stream(store: Store, path: str, parts: Sequence[StreamPart]) -> tuple[int, list[int]]:
    """Write a shard file.

    Args:
        store: The store to write to.
        path: Relative to the store; drawn at random.
        parts: In the order of the file.

    Returns:
        The file's length, and the offset of each part, both in bytes.

    Raises:
        StoreError, CapacityError, ReadOnlyError, ConflictError, TimeoutError: As `Writer` does.
    """
    entries, names, at = [], {METADATA_NAME}, 0
    for part in parts:
        entries.append(HeaderEntry(unique(part.name, names), part.dtype, part.shape, at, part.length))
        at += part.length
    head = header(entries)
    writer = Writer(store, path, metadata=part_of(store), is_new=True)
    try:
        writer.write(head)
        for part in parts:
            if part.length:
                writer.write(part.read())
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    return len(head) + at, [len(head) + entry.at for entry in entries]


def say_waves(store: Store, error: CapacityError) -> None:
    """Note that a part goes through the ram tier in waves, and why. Without local tiers nothing is noted."""
    if store.tiers is not None:
        store.tiers.counters.fall_back(
            "waves", "a checkpoint's part does not fit into the ram tier and is stored in several waves: %s", str(error)
        )
