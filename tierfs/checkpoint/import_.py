"""Import a DCP directory, a safetensors file or a file of ``torch.save`` as a checkpoint.

No code of a pickle is run. The objects of a DCP directory are copied as bytes, without unpickling. The tensors of a
local file are read from a memory mapping if its format allows that.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from tierfs.codec.layout import torch_zip
from tierfs.codec.layout.safetensors import read_table
from tierfs.dcp.checkpoint import Checkpoint
from tierfs.dcp.load.boxes import Box, BoxReader, boxes_of, in_batches
from tierfs.dcp.planner import unpickle_safely
from tierfs.dcp.tensorbytes import in_torch, tensor_in
from tierfs.dcp.torch_format.streams import has_raw_records, problem_of
from tierfs.dcp.writer import TierWriter
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, TierfsError

_PICKLE = b"\x80"
_TABLE_AT = 8
PART_BYTES = 1 << 30
"""Bytes of tensors that are read and held in memory before they are written."""


@dataclass(frozen=True, slots=True)
class ImportPart:
    """A part of a checkpoint to import, which becomes one shard file. It can be pickled for another process.

    Its number takes the place of the rank, and its plan is the one that torch's planner would make.
    """

    number: int
    objects: tuple[str, ...]
    boxes: tuple[Box, ...]
    plan: SavePlan


PartResult: TypeAlias = list[WriteResult]
RunParts: TypeAlias = Callable[[Sequence[ImportPart]], Iterable[PartResult]]


def import_checkpoint(
    source: Checkpoint,
    url: str,
    *,
    overwrite: bool,
    progress: Callable[[int], object] | None = None,
    run_parts: RunParts | None = None,
) -> None:
    """Save the values of a checkpoint as a checkpoint of tierfs, with the same names, paths and bytes.

    It holds one part in memory at a time: 1 GiB, or the largest tensor if ``torch.save`` wrote the source.

    Args:
        source: The checkpoint to import.
        url: The directory to save to, as for `TierWriter`.
        overwrite: Whether an existing checkpoint may be replaced.
        progress: Called with the number of bytes of each piece of a tensor that was read.
        run_parts: Imports all parts but the first, perhaps on other machines: see `import_part`. ``None`` imports them
            in this process.

    Raises:
        AlreadyExistsError: A checkpoint exists, and ``overwrite`` is false.
        CorruptionError: Stored bytes are wrong or missing.
        TierfsError: The import failed. An earlier checkpoint in the directory is unchanged.
    """
    source.check_whole()
    parts = _parts_of(source)
    plans, metadata = create_default_global_save_plan([part.plan for part in parts])
    writer = TierWriter(url, ack="object", overwrite=overwrite)
    with _as_import():
        writer.set_up_storage_writer(True, rank=0)
        plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
        parts = [replace(part, plan=plan) for part, plan in zip(parts, plans, strict=True)]
        results = [_write_part(source, writer, parts[0], progress)]
        if run_parts is not None:
            results += run_parts(parts[1:])
        else:
            results += [import_part(source, url, part, overwrite=overwrite, progress=progress) for part in parts[1:]]
        writer.finish(replace(metadata, planner_data=source.metadata.planner_data), results)


def import_part(
    source: Checkpoint, url: str, part: ImportPart, *, overwrite: bool, progress: Callable[[int], object] | None = None
) -> PartResult:
    """Import one part, in any process that can access both stores. Arguments are as for `import_checkpoint`.

    The part becomes visible when `import_checkpoint` publishes all parts.
    """
    writer = TierWriter(url, ack="object", overwrite=overwrite)
    writer.set_up_storage_writer(False, rank=part.number)
    plan = writer.prepare_local_plan(part.plan)
    return _write_part(source, writer, replace(part, plan=plan), progress)


def _parts_of(source: Checkpoint) -> list[ImportPart]:
    """Cut a checkpoint into parts, objects first. A part has at most `PART_BYTES` of tensors, or one box."""
    boxes = [box for fqn in source.tensors for box in boxes_of(source, fqn, bytes_max=PART_BYTES)]
    parts = []
    objects = tuple(source.objects)
    for number, batch in enumerate(list(in_batches(boxes, bytes_max=PART_BYTES)) or [[]]):
        items = [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO) for fqn in objects]
        items += [_write_item(source, box) for box in batch]
        parts.append(ImportPart(number, objects, tuple(batch), SavePlan(items)))
        objects = ()
    return parts


def _write_item(source: Checkpoint, box: Box) -> WriteItem:
    item = source.tensors[box.fqn]
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk=chunk, properties=item.properties, size=item.size)
    kind = WriteItemType.TENSOR if tuple(item.size) == box.sizes else WriteItemType.SHARD
    return WriteItem(MetadataIndex(box.fqn, chunk.offsets), kind, tensor_data=data)


def _write_part(
    source: Checkpoint, writer: TierWriter, part: ImportPart, progress: Callable[[int], object] | None
) -> PartResult:
    reader = BoxReader(source)
    data: dict[tuple[str, tuple[int, ...]], Any] = {(fqn, ()): io.BytesIO(reader.object(fqn)) for fqn in part.objects}
    data |= {(box.fqn, box.offsets): tensor for box, tensor in reader.each(part.boxes, progress)}
    return list(writer.write_data(part.plan, _Given(data)).value())


class _Given(DefaultSavePlanner):  # type: ignore[misc]  # torch's classes are untyped here
    """Takes the data to write from a mapping by name and offsets."""

    def __init__(self, data: Mapping[tuple[str, tuple[int, ...]], Any]) -> None:
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Any:
        index = write_item.index
        offsets = () if write_item.type == WriteItemType.BYTE_IO else tuple(index.offset or ())
        return self._data[index.fqn, offsets]


def import_file(source: str | bytes, url: str, *, where: str, overwrite: bool) -> None:
    """Save the values of a safetensors file, or of a file of ``torch.save``, as a checkpoint.

    Args:
        source: The path of a local file, or the content of a file.
        url: The directory to save to, as for `TierWriter`.
        where: The name of the file in errors.
        overwrite: Whether an existing checkpoint may be replaced.

    Raises:
        AlreadyExistsError: A checkpoint exists, and ``overwrite`` is false.
        InvalidInputError: The file has neither format, or holds no state dict. Or its pickle needs code that
            ``weights_only=True`` does not allow, and that was not run.
        CorruptionError, FormatError: The file is damaged, or has a tensor that torch cannot represent.
        TierfsError, OSError: The import failed. An earlier checkpoint in the directory is unchanged.
    """
    data = _mapped(source) if isinstance(source, str) else bytearray(source)
    head = bytes(data[: _TABLE_AT + 1])
    if head[_TABLE_AT:] == b"{":
        _save(_tensors_in(data, where), url, DefaultSavePlanner(flatten_state_dict=False), overwrite=overwrite)
        return
    if not head.startswith((torch_zip.LOCAL, _PICKLE)):
        raise InvalidInputError(f"{where} is neither a safetensors file nor one that torch.save wrote", path=where)
    with open(source, "rb") if isinstance(source, str) else io.BytesIO(source) as file:
        problem = problem_of(file)
        if problem is not None:
            raise CorruptionError(f"{where} is damaged: {problem}", path=where)
        # Old files of torch.save are not archives, and cannot be mapped.
        can_map = isinstance(source, str) and head.startswith(torch_zip.LOCAL) and has_raw_records(file)
    stream = source if isinstance(source, str) else io.BytesIO(source)
    state = unpickle_safely(where, stream, map_location="cpu", mmap=can_map)
    if not isinstance(state, Mapping):
        raise InvalidInputError(
            f"{where} holds a {type(state).__name__}, not a state dict: put it into a dict", path=where
        )
    _save(dict(state), url, _WithEmptyMappings(), overwrite=overwrite)


class _WithEmptyMappings(DefaultSavePlanner):  # type: ignore[misc]  # torch's classes are untyped here
    """Saves empty mappings, too. torch drops them when it flattens a state.

    An optimizer that has made no step has one.
    """

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._add_empty((), state_dict)

    def _add_empty(self, path: tuple[str | int, ...], value: Any) -> bool:
        """Save the empty mappings in a value, too. Return whether the value is then saved as one object."""
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self._add_empty((*path, str(key)), inner)
            if value or not path:
                return False
        elif isinstance(value, list) and self.mappings.get(_name(path)) != path:
            parts = [(*path, number) for number in range(len(value))]
            are_objects = [self._add_empty(part, inner) for part, inner in zip(parts, value, strict=True)]
            if not all(are_objects):
                return False
            # torch ignores the mappings, and saves a list of only objects as one object. It loads it the same way.
            for part in parts:
                del self.state_dict[_name(part)], self.mappings[_name(part)]
        else:
            return not isinstance(value, torch.Tensor)
        name = _name(path)
        if name in self.state_dict:
            raise InvalidInputError(f"two values of the state are called {name!r}")
        self.state_dict[name], self.mappings[name] = value, path
        return True


def _name(path: tuple[str | int, ...]) -> str:
    """Return the name that torch gives to a path when it flattens a state."""
    return ".".join(map(str, path))


def _save(state: dict[Any, Any], url: str, planner: Any, *, overwrite: bool) -> None:
    writer = TierWriter(url, ack="object", overwrite=overwrite)
    with _as_import():
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


@contextlib.contextmanager
def _as_import() -> Iterator[None]:
    """Suppress torch's warning that a save is not distributed. If the save fails, raise the reason."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, (TierfsError, OSError)):
            raise cause from error
        raise InvalidInputError(f"the state cannot be saved as a checkpoint: {cause}") from error


def _mapped(path: str) -> Any:
    """Map a local file into memory, copy-on-write: changes would stay in this process."""
    with open(path, "rb") as file:
        try:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except ValueError:  # an empty file
            return bytearray()


def _tensors_in(data: Any, where: str) -> dict[str, torch.Tensor]:
    view = memoryview(data)

    def read_into(at: int, out: memoryview) -> None:
        out[:] = view[at : at + len(out)]

    entries, begin = read_table(read_into, len(view), where)
    found = {}
    for name, entry in entries.items():
        described = in_torch(entry.dtype, entry.shape)
        if described is None:
            raise FormatError(
                f"{where}: {name!r} is {entry.dtype} of shape {list(entry.shape)}, which torch does not support: "
                "convert it with the program that wrote the file",
                path=where,
            )
        found[name] = described
    tensors = {}
    for name, (dtype, shape) in found.items():
        entry = entries[name]
        content = view[begin + entry.at :][: entry.length]
        if math.prod(shape) * dtype.itemsize != entry.length:
            raise CorruptionError(
                f"{where}: {name!r}: {entry.length} bytes do not make {list(entry.shape)} elements of {entry.dtype}",
                path=where,
            )
        try:
            tensors[name] = tensor_in(content, dtype, shape)
        except RuntimeError as error:
            raise CorruptionError(
                f"{where}: {name!r}: torch cannot make {list(entry.shape)} elements of {entry.dtype}: {error}",
                path=where,
            ) from error
    return tensors
