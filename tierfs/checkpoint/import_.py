"""From what others wrote to a checkpoint: a DCP directory, a safetensors file, a file of ``torch.save``.

Nothing of a pickle is run. Objects of a DCP directory go across as the bytes they are, tensors of a local file from its
mapping.
"""

from __future__ import annotations

import io
import math
import mmap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from tierfs.codec.layout.safetensors import read_table
from tierfs.dcp.checkpoint import Checkpoint
from tierfs.dcp.load.boxes import Box, BoxReader, in_batches
from tierfs.dcp.planner import unpickle_safely
from tierfs.dcp.tensorbytes import in_torch, tensor_in
from tierfs.dcp.torch_format.checksums import problem_of
from tierfs.dcp.writer import TierWriter
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, TierfsError

__all__ = ["import_checkpoint", "import_file"]

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
_TABLE_AT = 8


def import_checkpoint(
    source: Checkpoint, url: str, *, overwrite: bool, progress: Callable[[int], object] | None = None
) -> None:
    """Save what a checkpoint holds as one of tierfs's own, with the same names, paths and bytes.

    All of it is held in memory.

    Args:
        source: The file or directory to import.
        url: The directory to save to, as for `TierWriter`.
        overwrite: Whether a checkpoint that is there may be replaced.
        progress: Called with bytes of tensors as they are read.

    Raises:
        AlreadyExistsError: There is a checkpoint, and it may not be replaced.
        CorruptionError: Stored bytes are wrong or missing.
        TierfsError: It failed; what was there before is there still.
    """
    source.check_whole()
    reader = BoxReader(source)
    state: dict[str, Any] = {fqn: _Raw(reader.object(fqn)) for fqn in source.objects}
    boxes = [
        Box(fqn, item.properties.dtype, (0,) * len(item.size), tuple(item.size)) for fqn, item in source.tensors.items()
    ]
    for batch in in_batches(boxes):
        for box, tensor in zip(batch, reader.read(batch), strict=True):
            state[box.fqn] = tensor
            if progress is not None:
                progress(box.length)
    _save(state, url, _AsItWas(source.metadata), overwrite=overwrite)


def import_file(source: str | bytes, url: str, *, where: str, overwrite: bool) -> None:
    """Save what a safetensors file, or a file of ``torch.save``, holds as a checkpoint.

    Args:
        source: The path of a local file, or a file's content.
        url: The directory to save to, as for `TierWriter`.
        where: How to name the file in errors.
        overwrite: Whether a checkpoint that is there may be replaced.

    Raises:
        AlreadyExistsError: There is a checkpoint, and it may not be replaced.
        InvalidInputError: It is neither, or is made with something that ``weights_only=True`` does not allow, which was not
            run.
        CorruptionError, FormatError: It is damaged, or has a dtype that this tierfs does not know.
        TierfsError, OSError: It failed; what was there before is there still.
    """
    data = _mapped(source) if isinstance(source, str) else bytearray(source)
    head = bytes(data[: _TABLE_AT + 1])
    if head[_TABLE_AT:] == b"{":
        _save(_tensors_in(data, where), url, DefaultSavePlanner(flatten_state_dict=False), overwrite=overwrite)
        return
    if not head.startswith((_ZIP, _PICKLE)):
        raise InvalidInputError(f"{where} is neither a safetensors file nor one that torch.save wrote", path=where)
    # Old files of torch.save are no archives, and cannot be mapped.
    is_archive = head.startswith(_ZIP)
    with open(source, "rb") if isinstance(source, str) else io.BytesIO(source) as file:
        problem = problem_of(file)
    if problem is not None:
        raise CorruptionError(f"{where} is damaged: {problem}", path=where)
    stream = source if isinstance(source, str) else io.BytesIO(source)
    state = unpickle_safely(where, stream, map_location="cpu", mmap=is_archive and isinstance(source, str))
    if not isinstance(state, Mapping):
        raise InvalidInputError(
            f"{where} holds no state dict, but a {type(state).__name__}: put it into a dict", path=where
        )
    _save(dict(state), url, _WithEmptyMappings(), overwrite=overwrite)


class _WithEmptyMappings(DefaultSavePlanner):  # type: ignore[misc]  # torch's classes are untyped here
    """Saves empty mappings, too, which torch passes over where it flattens a state: an optimizer that has made no step has one."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._add_empty((), state_dict)

    def _add_empty(self, path: tuple[str | int, ...], value: Any) -> bool:
        """Save the empty mappings in a value as well. Whether it is saved as one object then."""
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
            # torch, which passes by the mappings, takes a list of nothing but objects for one itself, and so when it reads this.
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
    """As torch flattens a state."""
    return ".".join(map(str, path))


class _Raw(bytes):
    """An object as it was serialised, which is how it is stored again."""

    __slots__ = ()


class _AsItWas(DefaultSavePlanner):  # type: ignore[misc]  # torch's classes are untyped here
    """Saves names and paths as another checkpoint has them, and serialised objects without looking into them."""

    def __init__(self, source: Metadata) -> None:
        super().__init__(flatten_state_dict=False)
        self._source = source

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for fqn, item in metadata.state_dict_metadata.items():
            if isinstance(item, TensorStorageMetadata):
                item.properties = self._source.state_dict_metadata[fqn].properties
        return plans, replace(metadata, planner_data=self._source.planner_data)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return io.BytesIO(object) if isinstance(object, _Raw) else super().transform_object(write_item, object)


def _save(state: dict[Any, Any], url: str, planner: Any, *, overwrite: bool) -> None:
    writer = TierWriter(url, ack="object", overwrite=overwrite)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, (TierfsError, OSError)):
            raise cause from error
        raise InvalidInputError(f"it cannot be saved as a checkpoint: {cause}") from error


def _mapped(path: str) -> Any:
    """A local file's content, mapped: changes would stay in this process."""
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
                f"{where}: {name!r} is {entry.dtype} of shape {list(entry.shape)}, and torch has no such tensor: convert it with what "
                "wrote the file",
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
                f"{where}: {name!r}: {list(entry.shape)} elements of {entry.dtype} are no tensor: {error}", path=where
            ) from error
    return tensors
