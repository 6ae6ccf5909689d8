"""Read the metadata of torch's own writers, `FileSystemWriter` and `FsspecWriter`: a pickle.

Reading runs nothing that the pickle names. Every global of it is replaced by a stand-in that only keeps a state. The
stand-ins are made for one pickle. So a pickle can neither call nor change a class or function of torch. The stand-ins
are converted to torch's objects afterwards, and checked like any other input.

Tuples may be nested deeply, or contain one tuple many times. C code hashes them recursively. So every key is checked
before it is hashed.

Python's unpickler in C allocates as much memory as a number in the pickle says. So the unpickler in Python is used,
with only the opcodes that torch's metadata needs. It is several times slower, but its memory is bounded by the pickle's
length.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
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

from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.document import INTEGER_MAX, is_file_name
from tierfs.dcp.load.coverage import Bound
from tierfs.dcp.metadata import PATH_PARTS_MAX
from tierfs.dcp.tensorbytes import DTYPES, LAYOUTS
from tierfs.errors import CorruptionError, InvalidInputError, TierfsError

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_ENCODING = (_METADATA, "_MEM_FORMAT_ENCODING")
_FORMAT_NUMBERS = {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2}
_MEMORY_FORMATS = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}
_OPCODES = (
    pickle.PROTO + pickle.FRAME + pickle.STOP + pickle.MARK + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE
    + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT
    + pickle.BINUNICODE + pickle.SHORT_BINUNICODE + pickle.BINUNICODE8
    + pickle.EMPTY_DICT + pickle.EMPTY_LIST + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2
    + pickle.TUPLE3 + pickle.APPEND + pickle.APPENDS + pickle.SETITEM + pickle.SETITEMS
    + pickle.BINGET + pickle.LONG_BINGET + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE
    + pickle.GLOBAL + pickle.STACK_GLOBAL + pickle.REDUCE + pickle.NEWOBJ + pickle.BUILD
)  # fmt: skip
_KEY_PARTS_MAX = 64
_ARGUMENTS_MAX = 4096
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class TorchObject:
    """A stand-in for an instance of one of torch's classes.

    Attributes:
        kind: The class's name.
        state: The state to restore it from. The arguments of its class are dropped.
    """

    __slots__ = ("state",)
    kind = ""

    def __new__(cls, *_arguments: Any) -> TorchObject:
        """Make a stand-in without a state."""
        made = object.__new__(cls)
        made.state = {}
        return made

    def __init__(self, *_arguments: Any) -> None:
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """Return a member of the state, if the state is a mapping."""
        return self.state.get(name, default) if isinstance(self.state, Mapping) else default


def _checked(codes: bytes, check: Callable[[list[Any]], None]) -> dict[int, Callable[..., None]]:
    """Return opcode handlers that check the values on the stack first."""

    def checked(does: Callable[..., None]) -> Callable[..., None]:
        def load(unpickler: Any) -> None:
            check(unpickler.stack)
            does(unpickler)

        return load

    return {code: checked(pickle._Unpickler.dispatch[code]) for code in codes}


class _Unpickler(pickle._Unpickler):
    dispatch = {  # noqa: RUF012 - as the base class has it
        **{code: pickle._Unpickler.dispatch[code] for code in _OPCODES},
        **_checked(pickle.SETITEM, lambda stack: _check_keys(stack[-2:-1])),
        **_checked(pickle.SETITEMS, lambda stack: _check_keys(stack[::2])),
        **_checked(pickle.REDUCE + pickle.NEWOBJ, lambda stack: _check_arguments(stack[-1])),
    }

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._paths_left = len(data)
        self._known: dict[tuple[str, str], Any] = {
            (module, name): type(name, (TorchObject,), {"__slots__": (), "kind": name}) for module, name in _RECORDS
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a global that torch's metadata uses."""
        known = self._known.get((module, name)) or self._stand_in(module, name)
        if known is None:
            raise self._refused(f"{module}.{name}")
        self._known[module, name] = known
        return known

    def _refused(self, what: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self._where}: this checkpoint's metadata is a pickle that needs {what}, which torch's own checkpoints "
            "do not need: nothing was run; if you trust its source, load it with torch's reader",
            path=self._where,
        )

    def _stand_in(self, module: str, name: str) -> Callable[..., Any] | Any | None:
        """Make a new stand-in each time, so that a pickle that changes one changes nothing else."""

        def path(*parts: Any) -> str:
            texts = [part for part in parts if isinstance(part, str)]
            self._paths_left -= sum(len(text) + 1 for text in texts)
            if self._paths_left < 0:
                raise ValueError("its paths are longer than the pickle")
            return str(PurePosixPath(*texts))

        def member(kind: Any, key: Any) -> int:
            if kind is not self._known.get(_ENCODING) or not isinstance(key, str) or key not in _FORMAT_NUMBERS:
                raise self._refused(f"{module}.{name}")
            return _FORMAT_NUMBERS[key]

        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch", "Size"):
            # A list would be copied at each use.
            return lambda sizes: sizes if type(sizes) is tuple else None
        if (module, name) == ("torch.serialization", "_get_layout"):
            known = {f"torch.{layout}" for layout in LAYOUTS}
            return lambda text: text if isinstance(text, str) and text in known else None
        if (module, name) == _ENCODING:
            return lambda number: number
        if module in ("builtins", "__builtin__") and name == "getattr":
            return member  # Python 3.11.0 to 3.11.3 pickle members of enumerations this way; there is one here
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return path
        return None


def unpickle(data: bytes, where: str) -> Any:
    """Return a pickle's content: `TorchObject` for torch's objects, strings for layouts and paths, tuples for sizes.

    Raises:
        InvalidInputError: The pickle names a global that torch's metadata does not use. Nothing was called.
        CorruptionError: The pickle is damaged.
    """
    try:
        return _Unpickler(data, where).load()
    except InvalidInputError:
        raise
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise CorruptionError(f"{where}: its pickle cannot be read: {error!r}", path=where) from error


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        if not _is_key(key):
            raise ValueError(f"a key is a {type(key).__name__}, which torch's metadata does not use")


def _check_arguments(arguments: Any) -> None:
    if not isinstance(arguments, tuple) or len(arguments) > _ARGUMENTS_MAX:
        raise ValueError("a call has arguments that torch's metadata does not use")


def _is_key(value: Any) -> bool:
    """Whether a value may be hashed: a key of torch's metadata, or one that a planner's own data might have."""
    return _is_plain(value) or (
        type(value) is tuple and len(value) <= _KEY_PARTS_MAX and all(_is_plain(part) for part in value)
    )


def _is_plain(value: Any) -> bool:
    if type(value) is int:
        # Larger integers could be chosen so that all have the same hash.
        return -INTEGER_MAX <= value <= INTEGER_MAX
    return value is None or type(value) in (str, bool, float) or isinstance(value, TorchObject)


class StockPlace(BytesPlace):
    """The place of the archive or safetensors file that holds one tensor, not of the tensor's bare bytes."""

    __slots__ = ()


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
        if not isinstance(root, TorchObject) or root.kind != "Metadata":
            raise ValueError("it holds no metadata")
        items = {_text(fqn): _item(item, room) for fqn, item in _mapping(root.get("state_dict_metadata")).items()}
        places: dict[Any, BytesPlace] = {}
        for index, info in _mapping(root.get("storage_data")).items():
            fqn, offset = _text(_member(index, "MetadataIndex", "fqn")), index.get("offset")
            transforms = info.get("transform_descriptors") if isinstance(info, TorchObject) else None
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
            (meta.get("checkpoint_id"), meta.get("save_id")) if isinstance(meta, TorchObject) else (None, None)
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
    if not isinstance(item, TorchObject) or item.kind not in ("TensorStorageMetadata", "BytesStorageMetadata"):
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
    if not isinstance(record, TorchObject) or record.kind != kind:
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
