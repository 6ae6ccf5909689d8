"""The pickle that torch's own writers put into ``.metadata``, read without running anything that it names.

Every global of the pickle is answered with a stand-in made for this one reading, which only keeps what it is given: no
class or function of torch's is called, or could be changed, by what a pickle holds. The stand-ins are turned into torch's
objects afterwards, and checked like any other input.

Tuples may hold each other deeply, or one many times over, and are hashed in C by recursion: no key is hashed before it was
looked at.

Python's unpickler that is written in C takes as much memory as a number in the pickle says. So the one written in Python
is used, with the opcodes alone that torch's metadata needs: several times slower, bounded by the length of the pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from tierfs.dcp.torch_format.names import DTYPES, LAYOUTS
from tierfs.errors import CorruptionError, InvalidInputError

__all__ = ["Record", "unpickle"]

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
"""Larger ones could be chosen so that all hash to the same."""
_ARGUMENTS_MAX = 4096
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class Record:
    """A stand-in for an instance of one of torch's classes.

    Attributes:
        kind: The class's name.
        state: The state to restore it from. Nobody keeps the arguments of its class.
    """

    __slots__ = ("state",)
    kind = ""

    def __new__(cls, *_arguments: Any) -> Record:
        """Make one with no state yet."""
        made = object.__new__(cls)
        made.state = {}
        return made

    def __init__(self, *_arguments: Any) -> None:
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """A member, where the state is a mapping of them."""
        return self.state.get(name, default) if isinstance(self.state, Mapping) else default


def _checked(codes: bytes, check: Callable[[list[Any]], None]) -> dict[int, Callable[..., None]]:
    """Opcodes, each done once what it takes from the stack was looked at."""

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
        """A stand-in for a global that torch's metadata is made of."""
        known = self._known.get((module, name)) or self._stand_in(module, name)
        if known is None:
            raise self._refused(f"{module}.{name}")
        self._known[module, name] = known
        return known

    def _refused(self, what: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self._where}: this checkpoint's metadata is a pickle that wants {what}, which torch's own "
            "checkpoints do not need: nothing was run; load it where you trust who wrote it, with torch's reader",
            path=self._where,
        )

    def _stand_in(self, module: str, name: str) -> Callable[..., Any] | Any | None:
        """Made anew each time, so that a pickle which changes one changes nothing else."""

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
            # A list would be copied each time.
            return lambda sizes: sizes if type(sizes) is tuple else None
        if (module, name) == ("torch.serialization", "_get_layout"):
            known = {f"torch.{layout}" for layout in LAYOUTS}
            return lambda text: text if isinstance(text, str) and text in known else None
        if (module, name) == _ENCODING:
            return lambda number: number
        if module in ("builtins", "__builtin__") and name == "getattr":
            return member  # as Python 3.11.0 to 3.11.3 pickle a member of an enumeration, of which there is one here
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return path
        return None


def unpickle(data: bytes, where: str) -> Any:
    """The content of the pickle, with `Record` for torch's objects, strings for layouts and paths, tuples for sizes.

    Args:
        data: The pickle.
        where: How to name it in errors.

    Raises:
        InvalidInputError: It names a global that has no place in it. Nothing was called.
        CorruptionError: It is damaged.
    """
    try:
        return _Unpickler(data, where).load()
    except InvalidInputError:
        raise
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise CorruptionError(f"{where}: the pickle in it cannot be read: {error!r}", path=where) from error


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        if not _is_key(key):
            raise ValueError(f"a {type(key).__name__} is a key that torch's metadata does not have")


def _check_arguments(arguments: Any) -> None:
    if not isinstance(arguments, tuple) or len(arguments) > _ARGUMENTS_MAX:
        raise ValueError("something is called with what torch's metadata does not call it with")


def _is_key(value: Any) -> bool:
    """Whether it is hashed at once: what torch has as keys, and what a planner's own data might."""
    return _is_plain(value) or (
        type(value) is tuple and len(value) <= _KEY_PARTS_MAX and all(_is_plain(part) for part in value)
    )


def _is_plain(value: Any) -> bool:
    if type(value) is int:
        return -_INTEGER_MAX <= value <= _INTEGER_MAX
    return value is None or type(value) in (str, bool, float) or isinstance(value, Record)
