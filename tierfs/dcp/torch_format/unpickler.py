"""Read the pickle that torch's own writers put into ``.metadata``, without running anything that it names.

Every global of the pickle is replaced by a stand-in that only keeps a state. The stand-ins are made for one pickle. So
a pickle can neither call nor change a class or function of torch. The stand-ins are converted to torch's objects
afterwards, and checked like any other input.

Tuples may be nested deeply, or contain one tuple many times. C code hashes them recursively. So every key is checked
before it is hashed.

Python's unpickler in C allocates as much memory as a number in the pickle says. So the unpickler in Python is used,
with only the opcodes that torch's metadata needs. It is several times slower, but its memory is bounded by the pickle's
length.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from tierfs.dcp.tensorbytes import DTYPES, LAYOUTS
from tierfs.errors import CorruptionError, InvalidInputError

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
_MEMORY_FORMATS = {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2}
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
_INTEGER_MAX = (1 << 63) - 1
"""Larger integers could be chosen so that all have the same hash."""
_ARGUMENTS_MAX = 4096
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class Record:
    """A stand-in for an instance of one of torch's classes.

    Attributes:
        kind: The class's name.
        state: The state to restore it from. The arguments of its class are dropped.
    """

    __slots__ = ("state",)
    kind = ""

    def __new__(cls, *_arguments: Any) -> Record:
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
            (module, name): type(name, (Record,), {"__slots__": (), "kind": name}) for module, name in _RECORDS
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
            if kind is not self._known.get(_ENCODING) or not isinstance(key, str) or key not in _MEMORY_FORMATS:
                raise self._refused(f"{module}.{name}")
            return _MEMORY_FORMATS[key]

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
    """Return the content of the pickle: `Record` for torch's objects, strings for layouts and paths, tuples for sizes.

    Args:
        data: The pickle.
        where: Its name in errors.

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
        return -_INTEGER_MAX <= value <= _INTEGER_MAX
    return value is None or type(value) in (str, bool, float) or isinstance(value, Record)
