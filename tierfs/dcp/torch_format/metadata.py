"""Read and write the metadata of torch's own writers, `FileSystemWriter` and `FsspecWriter`: a pickle."""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.document import INTEGER_MAX, is_file_name
from tierfs.dcp.load.coverage import Bound
from tierfs.dcp.metadata import PATH_PARTS_MAX
from tierfs.dcp.tensorbytes import LAYOUTS
from tierfs.dcp.torch_format.unpickler import Record, unpickle
from tierfs.errors import CorruptionError, InvalidInputError, TierfsError

_MEMORY_FORMATS = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}


@dataclass(frozen=True, slots=True)
class StockPlace(BytesPlace):
    """The place of the archive or safetensors file that holds one tensor, not of the tensor's bare bytes."""


def encode_pickle(metadata: Metadata, places: Mapping[MetadataIndex, BytesPlace], meta: StorageMeta) -> bytes:
    """Return the content that torch's writers put into ``.metadata``."""
    stored = {index: filesystem._StorageInfo(place.file, place.at, place.length) for index, place in places.items()}
    complete = replace(metadata, storage_data=stored, storage_meta=meta)
    return pickle.dumps(complete)


def decode_pickle(data: bytes, where: str) -> Any:
    """Return torch's `Metadata` from a stock ``.metadata``: objects have a `BytesPlace`, chunks a `StockPlace`.

    Raises:
        InvalidInputError: The pickle uses more than torch's metadata needs, or its tensors were transformed.
        CorruptionError: The metadata is damaged.
    """
    root = unpickle(data, where)
    # A pickle that refers to a long list many times would expand far beyond its length. Each number, name and chunk takes
    # bytes of the pickle if torch wrote it.
    room = Bound(len(data), "it refers to the same data more often than torch would")
    try:
        if not isinstance(root, Record) or root.kind != "Metadata":
            raise ValueError("it holds no metadata")
        items = {_text(fqn): _item(item, room) for fqn, item in _mapping(root.get("state_dict_metadata")).items()}
        places: dict[Any, BytesPlace] = {}
        for index, info in _mapping(root.get("storage_data")).items():
            fqn, offset = _text(_member(index, "MetadataIndex", "fqn")), index.get("offset")
            transforms = info.get("transform_descriptors") if isinstance(info, Record) else None
            if transforms:
                raise InvalidInputError(
                    f"{where}: {fqn} was stored through {reprlib.repr(transforms)}, which tierfs cannot undo: load it "
                    "with torch's FileSystemReader or FsspecReader",
                    path=where,
                )
            kind = BytesPlace if offset is None else StockPlace
            places[MetadataIndex(fqn, None if offset is None else _sizes(offset, room))] = _place(info, kind)
        meta = root.get("storage_meta")
        checkpoint_id, save_id = (
            (meta.get("checkpoint_id"), meta.get("save_id")) if isinstance(meta, Record) else (None, None)
        )
        metadata = Metadata(
            state_dict_metadata=items,
            planner_data=_paths(root.get("planner_data"), room),
            storage_data=places,
            storage_meta=StorageMeta(*(text if isinstance(text, str) else None for text in (checkpoint_id, save_id))),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, TierfsError):
            raise
        raise CorruptionError(f"{where}: its pickle is not one that torch writes: {error}", path=where) from error
    version = root.get("version")
    metadata.version = version if isinstance(version, str) else None
    return metadata


def _item(item: Any, room: Bound) -> Any:
    if not isinstance(item, Record) or item.kind not in ("TensorStorageMetadata", "BytesStorageMetadata"):
        raise ValueError(f"{reprlib.repr(item)} describes neither a tensor nor an object")
    if item.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    size = _sizes(item.get("size"), room)
    state = _member(item, "TensorStorageMetadata", "properties").state
    dtype, layout, requires_grad, memory_format, pin_memory = state
    chunks = []
    for chunk in item.get("chunks"):
        offsets = _sizes(_member(chunk, "ChunkStorageMetadata", "offsets"), room)
        sizes = _sizes(chunk.get("sizes"), room)
        if not len(offsets) == len(sizes) == len(size) or any(
            offset + length > whole for offset, length, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"a chunk of {sizes} at {offsets} is not inside a tensor of {size}")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    if not isinstance(dtype, torch.dtype) or not isinstance(layout, str) or type(memory_format) is not int:
        raise ValueError(f"a tensor's properties are {reprlib.repr(state)}")
    properties = TensorProperties(
        dtype,
        LAYOUTS[layout.removeprefix("torch.")],
        bool(requires_grad),
        _MEMORY_FORMATS[memory_format],
        bool(pin_memory),
    )
    return TensorStorageMetadata(properties, torch.Size(size), chunks)


def _place(info: Any, kind: type[BytesPlace]) -> BytesPlace:
    file = _text(_member(info, "_StorageInfo", "relative_path"))
    at, length = _sizes((info.get("offset"), info.get("length")), Bound(3, ""))
    if not is_file_name(file):
        raise ValueError(f"{file!r} is not a valid file name in a checkpoint")
    return kind(file, at, length)


def _paths(planner_data: Any, room: Bound) -> dict[str, tuple[object, ...]] | None:
    """Return where each value is in the state. Other planner data is ignored: nothing here could use it."""
    if not isinstance(planner_data, dict):
        return None
    paths = {}
    for fqn, path in planner_data.items():
        if not isinstance(path, tuple) or len(path) > PATH_PARTS_MAX:
            return None
        room.take(1 + len(path))
        if not all(type(part) in (str, int) for part in path):
            return None
        paths[_text(fqn)] = path
    return paths


def _member(record: Any, kind: str, name: str) -> Any:
    if not isinstance(record, Record) or record.kind != kind:
        raise ValueError(f"{reprlib.repr(record)} is not a {kind}")
    return record.get(name)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{reprlib.repr(value)} is not a dict")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{reprlib.repr(value)} is not a string")
    return value


def _sizes(values: Any, room: Bound) -> tuple[int, ...]:
    if isinstance(values, tuple):
        room.take(1 + len(values))
    if not isinstance(values, tuple) or not all(type(value) is int and 0 <= value <= INTEGER_MAX for value in values):
        raise ValueError(f"{reprlib.repr(values)} is not a tuple of sizes")
    return values
