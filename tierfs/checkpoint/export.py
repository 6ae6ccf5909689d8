"""Export a checkpoint: to a safetensors file, a nested state for ``torch.save``, or a DCP directory as torch writes it.

A checkpoint that cannot be exported is refused before the first byte is written. Tensors are copied in pieces of
`BATCH_BYTES`, or one tensor at a time if ``torch.save`` wrote it. The nested state holds all tensors in memory.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from tierfs.codec.layout.safetensors import HEADER_BYTES_MAX, HeaderEntry
from tierfs.dcp.checkpoint import Checkpoint
from tierfs.dcp.load.boxes import BATCH_BYTES, Box, BoxReader, boxes_of
from tierfs.dcp.planner import unpickle_safely
from tierfs.dcp.save.plan import header
from tierfs.dcp.tensorbytes import bytes_of, in_safetensors
from tierfs.errors import InvalidInputError, TierfsError
from tierfs.format.checkpoint import ROOT

DATA_FILE = "__0_0.distcp"
_NOTE = {"format": "pt"}
_NAMES_MAX = 5


def safetensors_pieces(
    checkpoint: Checkpoint, *, skip_objects: bool = False, progress: Callable[[int], object] | None = None
) -> Iterator[memoryview]:
    """Return the pieces of one safetensors file with every tensor as a whole, in the order of the file.

    A piece is valid until the next one is requested. Values that are not tensors are refused, or with ``skip_objects``
    left out. ``progress`` gets the bytes of each piece.

    Raises:
        InvalidInputError: The format cannot hold a value of the checkpoint. No tensor was read yet.
        CorruptionError: Stored bytes are wrong or missing.
        TierfsError: The checkpoint could not be read.
    """
    tensors = checkpoint.tensors
    odd = {
        fqn: item.properties.dtype
        for fqn, item in tensors.items()
        if in_safetensors(item.properties.dtype, item.size) is None
    }
    if odd:
        listed = _listed([f"{fqn!r} ({str(dtype).removeprefix('torch.')})" for fqn, dtype in odd.items()])
        raise InvalidInputError(f"the safetensors format has no dtype for {listed}: export to dcp or torch")
    if "__metadata__" in tensors:
        raise InvalidInputError("the safetensors format allows no tensor named '__metadata__': export to dcp or torch")
    if checkpoint.objects and not skip_objects:
        raise InvalidInputError(
            "the safetensors format holds only tensors, but this checkpoint also has "
            f"{_listed(list(map(repr, checkpoint.objects)))}: omit such values with --skip-objects, "
            "or export to dcp or torch"
        )
    checkpoint.check_whole()
    # The widest elements come first, so that each tensor is aligned to its element size.
    names = sorted(tensors, key=lambda fqn: (-tensors[fqn].properties.dtype.itemsize, fqn))
    head = header(_entries(tensors, names), _NOTE)
    if len(head) > HEADER_BYTES_MAX:
        raise InvalidInputError(f"{len(names)} tensors are too many for a safetensors file: export to dcp or torch")
    return _with_head(head, checkpoint, names, progress)


def _with_head(
    head: bytes, checkpoint: Checkpoint, names: list[str], progress: Callable[[int], object] | None
) -> Iterator[memoryview]:
    yield memoryview(head)
    for _, tensor in BoxReader(checkpoint).each(_boxes(checkpoint, names), progress):
        if tensor.numel():
            yield bytes_of(tensor)


def _entries(tensors: Mapping[str, Any], names: list[str]) -> Iterator[HeaderEntry]:
    at = 0
    for fqn in names:
        dtype, size = tensors[fqn].properties.dtype, tensors[fqn].size
        length = math.prod(size) * dtype.itemsize
        described = in_safetensors(dtype, size)
        assert described is not None, "the caller rejects such tensors"
        yield HeaderEntry(fqn, *described, at, length)
        at += length


def state_of(
    checkpoint: Checkpoint, *, skip_objects: bool = False, progress: Callable[[int], object] | None = None
) -> dict[object, Any]:
    """Load the whole state into memory, nested as it was saved.

    Values that are not tensors are loaded with ``weights_only=True``, or with ``skip_objects`` left out.

    Raises:
        InvalidInputError: The pickle of an object needs code that is not allowed, and was not run. Or two values have
            contradictory paths. No tensor was read yet.
        CorruptionError: Stored bytes are wrong or missing.
        TierfsError: The checkpoint could not be read.
    """
    checkpoint.check_whole()
    reader = BoxReader(checkpoint)
    values: dict[str, Any] = {}
    for fqn in [] if skip_objects else checkpoint.objects:
        values[fqn] = unpickle_safely(
            repr(fqn),
            io.BytesIO(reader.object(fqn)),
            allow=(),  # a reader of the export with ``weights_only=True`` allows no more
            hint="omit values that are not tensors with --skip-objects, or export to dcp",
            map_location="cpu",
        )
    tensors = checkpoint.tensors
    paths = checkpoint.metadata.planner_data
    nested(dict.fromkeys([*values, *tensors]), paths)  # refuses paths that contradict each other
    whole = (Box(fqn, item.properties.dtype, (0,) * len(item.size), tuple(item.size)) for fqn, item in tensors.items())
    values |= {box.fqn: tensor for box, tensor in reader.each(whole, progress)}
    return nested(values, paths)


def write_dcp(
    checkpoint: Checkpoint,
    directory: str,
    *,
    skip_objects: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a directory for torch's ``FileSystemReader``: ``torch.save`` archives of tensor pieces, pickled metadata.

    Both files are synced to the disk. The directory is local and empty.

    Raises:
        CorruptionError: Stored bytes are wrong or missing. The files written so far stay in the directory.
        TierfsError, OSError: The checkpoint could not be read, or the directory could not be written.
    """
    checkpoint.check_whole()
    objects = [] if skip_objects else list(checkpoint.objects)
    items: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    with open(os.path.join(directory, DATA_FILE), "wb") as stream:
        reader = BoxReader(checkpoint)
        for fqn in objects:
            items[fqn] = checkpoint.metadata.state_dict_metadata[fqn]
            places[MetadataIndex(fqn)] = _stored(stream, partial(stream.write, reader.object(fqn)))
        for fqn, item in checkpoint.tensors.items():
            items[fqn] = TensorStorageMetadata(item.properties, item.size, [])
        for box, tensor in reader.each(_boxes(checkpoint, checkpoint.tensors), progress):
            offsets = torch.Size(box.offsets)
            number = len(items[box.fqn].chunks)
            items[box.fqn].chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
            place = _stored(stream, partial(write_state, tensor, stream))
            places[MetadataIndex(box.fqn, offsets, number)] = place
        _flush(stream)
    paths = checkpoint.metadata.planner_data
    metadata = replace(
        checkpoint.metadata,
        state_dict_metadata=items,
        storage_data=places,
        storage_meta=StorageMeta(),
        planner_data=None if paths is None else {fqn: path for fqn, path in paths.items() if fqn in items},
    )
    with open(os.path.join(directory, ROOT), "wb") as stream:
        pickle.dump(metadata, stream)
        _flush(stream)


def _stored(stream: BinaryIO, write: Callable[[], object]) -> Any:
    at = stream.tell()
    write()
    return _StorageInfo(DATA_FILE, at, stream.tell() - at)


def write_state(state: Any, stream: BinaryIO) -> None:
    """Write a value as ``torch.save`` does.

    Raises:
        TierfsError, OSError: A write to the stream failed.
    """
    try:
        torch.save(state, stream)
    except RuntimeError as error:
        # After a failed write, torch still tries to finish its archive, and reports only that failure.
        cause = error.__context__
        if isinstance(cause, (TierfsError, OSError)):
            raise cause from None
        raise


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _boxes(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[Box]:
    return (box for fqn in names for box in boxes_of(checkpoint, fqn, bytes_max=BATCH_BYTES))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    return f"{', '.join(names[:_NAMES_MAX])}{more}"


# -- the nested state -------------------------------------------------------------------------------------------------


class _Container(dict[object, Any]):
    """A container under construction. Its type distinguishes it from mappings that are values."""


def nested(values: Mapping[str, Any], paths: Mapping[str, Sequence[object]] | None) -> dict[object, Any]:
    """Nest values as they were nested in the state.

    Args:
        values: The values by name.
        paths: The path of each value by name: strings for keys of mappings, integers for places in lists. A container
            whose keys are 0, 1, 2 and so on becomes a list, any other one a mapping. A value without a path stays at
            the top.

    Raises:
        InvalidInputError: Two values have the same path, or one lies inside another.
    """
    root = _Container()
    for name, value in values.items():
        path = tuple((paths or {}).get(name) or (name,))
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, _Container())
            if not isinstance(node, _Container):
                raise InvalidInputError(
                    f"{name!r} has the path {list(path)}, which is inside another value of the checkpoint"
                )
        if path[-1] in node:
            raise InvalidInputError(f"{name!r} has the path {list(path)}, as another value of the checkpoint does")
        node[path[-1]] = value
    return {key: _finished(value) for key, value in root.items()}


def _finished(value: Any) -> Any:
    if not isinstance(value, _Container):
        return value
    if all(type(key) is int for key in value) and set(value) == set(range(len(value))):
        return [_finished(value[place]) for place in range(len(value))]
    return {key: _finished(inner) for key, inner in value.items()}
