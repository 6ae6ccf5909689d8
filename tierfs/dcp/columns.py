"""The tensors of a checkpoint's metadata as columns, read from the document's text without an object for each chunk.

A checkpoint of 1,024 ranks and 300 tensors has 307,200 chunks, and every rank reads where all of them are. Tensors of
one shape are cut alike, so they share the objects of their chunks here. The place of a chunk is two numbers and a file.

Only a document that is written exactly as `tierfs.dcp.metadata.encode` writes it is read here, with the same checks.
Any other document, and any damaged one, is left to the general JSON reader, which names the problem.

Format: docs/reference/checkpoint-format.md, "The metadata document".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tierfs.dcp.document import DIMENSIONS_MAX, INTEGER_MAX
from tierfs.dcp.tensorbytes import DTYPES, LAYOUTS, MEMORY_FORMATS

_INTEGER = rb"(0|[1-9][0-9]{0,18})"
_NAME = re.compile(rb'"((?:[^"\\]|\\.)*)":\{"chunks":\[')
_CHUNK = re.compile(
    rb'\{"at":%b,"file":"([^"\\]*)","length":%b,"offsets":\[([0-9,]*)\],"shape":\[([0-9,]*)\]\}(?:,|\Z)'
    % (_INTEGER, _INTEGER)
)
_AFTER_CHUNKS = b'],"dtype":"'
_PROPERTIES = re.compile(
    rb'\],"dtype":"([a-z0-9_]+)","layout":"([a-z0-9_]+)","memory_format":"([a-z0-9_]+)","pin_memory":(true|false),'
    rb'"requires_grad":(true|false),"shape":\[([0-9,]*)\]\}(?:,|\Z)'
)


class BytesPlace(NamedTuple):
    """The place of the bytes of one chunk of a tensor, or of one object. Small, and quick to pickle.

    Attributes:
        file: Name of the file, in the directory of the checkpoint.
        at: Offset in the file, in bytes.
        length: In bytes.
    """

    file: str
    at: int
    length: int


@dataclass(frozen=True, slots=True)
class SavedItem:
    """A chunk of a tensor, or an object, as it was saved.

    Attributes:
        place: Where its bytes are.
        dtype: Of its elements; ``None`` for an object.
        sizes: The number of elements of each dimension of the chunk.
        offsets: Where the chunk begins in the tensor, in elements. Readers of whole chunks may leave it out.
    """

    place: BytesPlace
    dtype: torch.dtype | None = None
    sizes: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


_Cuts: TypeAlias = tuple[list[Any], npt.NDArray[np.int64], dict[tuple[int, ...], int]]
"""How tensors of one shape are cut: torch's `ChunkStorageMetadata` in order, their elements, their numbers by offsets."""


class _Column(NamedTuple):
    """The places of the chunks of one tensor."""

    cuts: _Cuts
    files: list[str]
    at: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def place(self, number: int) -> BytesPlace:
        return BytesPlace(self.files[number], int(self.at[number]), int(self.lengths[number]))


class PlaceColumns(Mapping[Any, BytesPlace]):
    """The place of each chunk of each tensor, and of each object, by torch's `MetadataIndex`."""

    def __init__(self, tensors: Mapping[str, _Column], others: Mapping[Any, BytesPlace]) -> None:
        self._tensors = tensors
        self._others = others

    def __getitem__(self, index: Any) -> BytesPlace:
        column = self._tensors.get(index.fqn)
        if column is None:
            return self._others[index]
        return column.place(column.cuts[2][index.offset])

    def __iter__(self) -> Iterator[Any]:
        for fqn, column in self._tensors.items():
            for number, chunk in enumerate(column.cuts[0]):
                yield MetadataIndex(fqn, chunk.offsets, number)
        yield from self._others

    def __len__(self) -> int:
        return sum(len(column.files) for column in self._tensors.values()) + len(self._others)


def read_tensors(text: bytes, files: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, _Column]] | None:
    """Read the members of ``tensors``.

    Args:
        text: The members as they stand in the document, without the braces around them.
        files: Length in bytes of each file of the checkpoint.

    Returns:
        torch's `TensorStorageMetadata` and the places, by FQN. ``None`` if something is written differently, or wrong.
    """
    try:
        return _TensorParser(files).read(text)
    except (KeyError, ValueError, OverflowError):
        return None


class _TensorParser:
    """Parses the tensors of one document, and reuses shapes and cuts that it has parsed before."""

    def __init__(self, files: Mapping[str, int]) -> None:
        self._sizes = files
        self._names = {json.dumps(name, ensure_ascii=False)[1:-1].encode(): name for name in files}
        self._shapes: dict[bytes, Any] = {}
        self._cuts: dict[tuple[Any, ...], _Cuts] = {}

    def read(self, text: bytes) -> tuple[dict[str, Any], dict[str, _Column]]:
        items: dict[str, Any] = {}
        columns: dict[str, _Column] = {}
        at, last = 0, None
        while at < len(text):
            name = _NAME.match(text, at)
            end = text.find(_AFTER_CHUNKS, at) if name is not None else -1
            properties = _PROPERTIES.match(text, end) if end >= 0 else None
            if name is None or properties is None or name.end() > end:
                raise ValueError(_UNUSUAL)
            fqn = json.loads(b'"%b"' % name[1])
            if json.dumps(fqn, ensure_ascii=False)[1:-1].encode() != name[1] or (last is not None and last >= fqn):
                raise ValueError(_UNUSUAL)
            last = fqn
            dtype, layout, memory_format, *flags, shape = properties.groups()
            kind = DTYPES[dtype.decode()]
            whole = self._shape(shape)
            column = self._column(text[name.end() : end], whole, kind.itemsize)
            described = TensorProperties(
                dtype=kind,
                layout=LAYOUTS[layout.decode()],
                requires_grad=flags[1] == b"true",
                memory_format=MEMORY_FORMATS[memory_format.decode()],
                pin_memory=flags[0] == b"true",
            )
            items[fqn] = TensorStorageMetadata(described, whole, list(column.cuts[0]))
            columns[fqn] = column
            if (text[properties.end() - 1 : properties.end()] == b",") != (properties.end() < len(text)):
                raise ValueError(_UNUSUAL)
            at = properties.end()
        return items, columns

    def _column(self, text: bytes, whole: Any, itemsize: int) -> _Column:
        """Read the chunks of a tensor of shape ``whole``."""
        found: Sequence[tuple[bytes, ...]] = _CHUNK.findall(text)
        ats, names, lengths, offsets, shapes = zip(*found, strict=True) if found else ((),) * 5
        # Text that no chunk matched shows as missing length. Without its values a chunk has 52 bytes, and a comma
        # follows all but the last.
        size = sum(map(len, (*ats, *names, *lengths, *offsets, *shapes)))
        if size + len(found) * _CHUNK_BYTES - bool(found) != len(text):
            raise ValueError(_UNUSUAL)
        files = [self._names[name] for name in names]
        cuts = self._cut(whole, offsets, shapes)
        at, length = (np.array([*map(int, each)], np.int64) for each in (ats, lengths))
        limits = np.array([self._sizes[file] for file in files], np.int64)
        if (length != cuts[1] * itemsize).any() or (at > limits - length).any():
            raise ValueError(_UNUSUAL)
        return _Column(cuts, files, at, length)

    def _cut(self, whole: Any, offsets: tuple[bytes, ...], shapes: tuple[bytes, ...]) -> _Cuts:
        key = (whole, offsets, shapes)
        found = self._cuts.get(key)
        if found is None:
            chunks, elements = [], []
            for offset, shape in zip(map(self._shape, offsets), map(self._shape, shapes), strict=True):
                if not len(offset) == len(shape) == len(whole) or any(
                    begin + size > end for begin, size, end in zip(offset, shape, whole, strict=True)
                ):
                    raise ValueError(_UNUSUAL)
                chunks.append(ChunkStorageMetadata(offset, shape))
                elements.append(math.prod(shape))
            positions = {tuple(chunk.offsets): number for number, chunk in enumerate(chunks)}
            if len(positions) != len(chunks) or max(elements, default=0) > _ELEMENTS_MAX:
                raise ValueError(_UNUSUAL)
            found = self._cuts[key] = chunks, np.array(elements, np.int64), positions
        return found

    def _shape(self, text: bytes) -> Any:
        """Parse integers with commas between them."""
        found = self._shapes.get(text)
        if found is None:
            values = json.loads(b"[%b]" % text)
            if len(values) > DIMENSIONS_MAX or max(values, default=0) > INTEGER_MAX:
                raise ValueError(_UNUSUAL)
            found = self._shapes[text] = torch.Size(values)
        return found


_UNUSUAL = "the text is not exactly as `encode` writes it, or a value in it is wrong"
_CHUNK_BYTES = len(b'{"at":,"file":"","length":,"offsets":[],"shape":[]},')
# Multiplied by the size in bytes of any element, this is at most `INTEGER_MAX`.
_ELEMENTS_MAX = INTEGER_MAX // 64
