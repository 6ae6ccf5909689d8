"""Checkpoints built by hand: shard files that are valid safetensors files, and their metadata."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.document import CheckpointNote
from tierfs.dcp.metadata import encode
from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES, bytes_of
from tierfs.store import Store, save

Box = tuple[Sequence[int], Sequence[int]]


def pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@dataclass
class Handmade:
    """A checkpoint under construction: the tensors of each file, and the metadata."""

    store: Store
    directory: str
    files: dict[str, list[tuple[str, str, list[int], bytes]]] = field(default_factory=dict)
    places: dict[Any, tuple[str, int]] = field(default_factory=dict)
    items: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def tensor(self, fqn: str, tensor: torch.Tensor, boxes: Mapping[str, Sequence[Box]] | str) -> None:
        """Save a tensor: either boxes of it by file, or all of it in one file."""
        if isinstance(boxes, str):
            boxes = {boxes: [([0] * tensor.dim(), tensor.shape)]}
        chunks = []
        for file, parts in boxes.items():
            for offsets, sizes in parts:
                part = tensor
                for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    part = part.narrow(dimension, offset, size)
                raw = bytes(bytes_of(part))
                name = SAFETENSORS_NAMES.get(tensor.dtype)
                shape = list(sizes) if name else [len(raw)]
                self._add(file, MetadataIndex(fqn, offsets), (f"{fqn}/{list(offsets)}", name or "U8", shape, raw))
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        self.items[fqn] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
        self.paths[fqn] = tuple(fqn.split("."))

    def object(self, fqn: str, content: bytes, file: str) -> None:
        self._add(file, MetadataIndex(fqn), (fqn, "U8", [len(content)], content))
        self.items[fqn] = BytesStorageMetadata()
        self.paths[fqn] = tuple(fqn.split("."))

    def _add(self, file: str, index: Any, entry: tuple[str, str, list[int], bytes]) -> None:
        entries = self.files.setdefault(file, [])
        self.places[index] = (file, len(entries))
        entries.append(entry)

    def metadata(self, starts: Mapping[str, list[int]]) -> Metadata:
        places = {
            index: BytesPlace(file, starts[file][number], len(self.files[file][number][3]))
            for index, (file, number) in self.places.items()
        }
        return Metadata(self.items, self.paths, places, StorageMeta())

    def save(self, name: str = ".metadata", **note: Any) -> None:
        starts, lengths = {}, {}
        for file, entries in self.files.items():
            head, at, table = b"", 0, {}
            for key, dtype, shape, raw in entries:
                table[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
                at += len(raw)
            text = json.dumps(table).encode()
            head = len(text).to_bytes(8, "little") + text
            content = head + b"".join(raw for *_, raw in entries)
            save(self.store, f"{self.directory}/{file}", content)
            lengths[file] = len(content)
            starts[file] = [len(head) + table[key]["data_offsets"][0] for key, *_ in entries]
        data = encode(self.metadata(starts), CheckpointNote("ab12", 1, 1_700_000_000_000_000_000, 7, lengths, **note))
        save(self.store, f"{self.directory}/{name}", data)


class BoxPlanner:
    """A load planner that loads boxes of tensors, each into its own tensor."""

    def __init__(self, wanted: Mapping[tuple[str, tuple[int, ...]], torch.Tensor]) -> None:
        self.wanted = dict(wanted)
        self.objects: dict[str, bytes] = {}
        self.committed: list[str] = []

    def plan(self, metadata: Any, objects: Sequence[str] = ()) -> LoadPlan:
        items = []
        for (fqn, offsets), tensor in self.wanted.items():
            local = [ChunkStorageMetadata(torch.Size(offsets), tensor.shape)]
            items += create_read_items_for_chunk_list(fqn, metadata.state_dict_metadata[fqn], local)
        from torch.distributed.checkpoint.planner_helpers import _create_read_item_for_byteio

        for fqn in objects:
            index = MetadataIndex(fqn)
            items.append(_create_read_item_for_byteio(index, 0, index, 0, 0))
        assert all(item.type in LoadItemType for item in items)
        return LoadPlan(items)

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        part = self.wanted[item.dest_index.fqn, tuple(item.dest_index.offset)]
        for dimension, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(dimension, offset, length)
        return part

    def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
        self.committed.append(item.dest_index.fqn)

    def load_bytes(self, item: Any, value: io.BytesIO) -> None:
        self.objects[item.dest_index.fqn] = value.getvalue()
