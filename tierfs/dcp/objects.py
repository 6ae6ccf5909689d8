"""Objects as ``torch.save`` pickles them: the globals that loading needs, and an unpickler for more containers.

torch's unpickler for ``weights_only=True`` fills only lists and dicts, and reads no integers above 255 bytes.
So it cannot load a `collections.deque` or a `collections.defaultdict`, even if the class is allowed.
`Unpickler` can. It follows the same rules: it looks up, calls and restores nothing that is not allowed.
``torch.load`` takes this module as its ``pickle_module``.
"""

from __future__ import annotations

import io
import logging
import pickle
import pickletools
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch._weights_only_unpickler import _blocklisted_modules, _get_allowed_globals, _get_user_allowed_globals

from tierfs.codec.layout import torch_zip
from tierfs.errors import InvalidInputError

ALLOWED: tuple[Any, ...] = (
    bytes,
    io.BytesIO,
    (Ellipsis, "builtins.Ellipsis"),
    (NotImplemented, "builtins.NotImplemented"),
)
"""Allowed besides the globals that torch allows. An empty `bytes` is pickled as a call of its class."""
CHECKED_BYTES_MAX = 16 << 20
"""A longer object is not checked when it is saved: the check would take as long as the save."""
REMEMBERED_BYTES_MAX = 4096
REMEMBERED_MAX = 1024
PROTOCOL = 2  # torch.save's own
_OPCODES = (
    pickle.PROTO + pickle.STOP + pickle.MARK + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE
    + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.LONG4 + pickle.BINFLOAT + pickle.BINUNICODE
    + pickle.EMPTY_DICT + pickle.EMPTY_LIST + pickle.EMPTY_SET + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1
    + pickle.TUPLE2 + pickle.TUPLE3 + pickle.BINGET + pickle.LONG_BINGET + pickle.BINPUT + pickle.LONG_BINPUT
    + pickle.BINPERSID + pickle.GLOBAL
)  # fmt: skip
_BASE: Any = pickle._Unpickler.dispatch
_GETATTR = "builtins.getattr"
_RUNNERS = frozenset({*_blocklisted_modules, "ctypes", "importlib", "pickle", "pty", "runpy", "shutil", "subprocess"})
_RUNNERS_BUILT_IN = frozenset(
    f"builtins.{name}" for name in ("__import__", "compile", "eval", "exec", "getattr", "open")
)
_WITH_SLOTS = 2  # a state of two parts is the attributes and the slots
_MAY_NEED = re.compile(rb"\n[^\n]{1,256}\n")
"""Matches every pickle that looks up a global: the names of module and global each end in a newline."""
_OF_ATTRIBUTES = {"BINUNICODE", "TUPLE2", "REDUCE", "BINPUT", "LONG_BINPUT"}
_HEADER = 30
_logger = logging.getLogger("tierfs.dcp")
_warned: set[str] = set()


class ObjectUnpickler(pickle._Unpickler):
    """Loads pickles that use only what torch allows and what is on torch's list of safe globals.

    The rules are torch's, with these differences. Containers and states are filled by the methods of their class, so an
    instance cannot bring its own. ``getattr`` finds only allowed classes inside allowed classes. A NumPy dtype is
    restored only to a state that NumPy itself would produce. It may take as much memory as torch's unpickler.

    It is based on the unpickler in Python: the one in C allocates as much memory as a number in the pickle says.
    """

    # The base class has these attributes, but its type stubs do not declare them.
    stack: Any
    metastack: Any
    pop_mark: Any
    dispatch: ClassVar[dict[int, Any]] = {code: _BASE[code] for code in _OPCODES}

    def __init__(self, file: Any, *, encoding: str = "utf-8") -> None:
        super().__init__(file, encoding=encoding)
        self._by_user: dict[str, Any] = dict(_get_user_allowed_globals())
        self._allowed: dict[str, Any] = {**self._by_user, **_get_allowed_globals(), _GETATTR: self._nested}
        self._ids = {id(value) for value in self._allowed.values()}
        self._user_ids = {id(value) for name, value in self._by_user.items() if name != _GETATTR}

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function of a global, if it is allowed."""
        full = _full_name(module, name)
        if full.partition(".")[0] in _blocklisted_modules:
            raise pickle.UnpicklingError(f"Trying to load unsupported GLOBAL {full} whose module is blocked.")
        if full not in self._allowed:
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {full} was not an allowed global by default.")
        return self._allowed[full]

    def load_binpersid(self) -> None:
        """Load a storage. Other persistent ids make torch's old format read and write files of source code."""
        pid = self.stack[-1]
        if type(pid) is not tuple or not pid or pid[0] not in ("storage", b"storage"):
            raise pickle.UnpicklingError("Only persistent_load of storage is allowed")
        _BASE[pickle.BINPERSID[0]](self)

    def load_reduce(self) -> None:
        arguments, function = self.stack[-1], self.stack[-2]
        self._check_call(function, arguments)
        _BASE[pickle.REDUCE[0]](self)

    def load_newobj(self) -> None:
        arguments, kind = self.stack[-1], self.stack[-2]
        self._check_call(kind, arguments)
        _BASE[pickle.NEWOBJ[0]](self)

    def load_build(self) -> None:
        """Restore the state of the instance on the stack."""
        state = self.stack.pop()
        made = self.stack[-1]
        kind: Any = type(made)
        if kind is OrderedDict:
            made.__dict__.update(state)
        elif kind is torch.nn.Parameter:
            kind.__setstate__(made, state)
        elif "numpy" in sys.modules and isinstance(made, sys.modules["numpy"].dtype):
            if "numpy.dtype" not in self._by_user:
                raise self._not_allowed(kind)
            kind.__setstate__(made, _checked_dtype_state(made, state))
        elif id(kind) not in self._user_ids and kind is not io.BytesIO:
            raise self._not_allowed(kind)
        elif hasattr(kind, "__setstate__"):
            kind.__setstate__(made, state)
        else:
            values, slots = state if type(state) is tuple and len(state) == _WITH_SLOTS else (state, None)
            if values:
                object.__getattribute__(made, "__dict__").update(values)
            for name, value in (slots or {}).items():
                object.__setattr__(made, name, value)

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def load_appends(self) -> None:
        values = self.pop_mark()
        self._extend(self.stack[-1], values)

    def load_setitem(self) -> None:
        value, name = self.stack.pop(), self.stack.pop()
        self._put(self.stack[-1], [name, value])

    def load_setitems(self) -> None:
        self._put(self.metastack[-1][-1], self.pop_mark())

    dispatch[pickle.BINPERSID[0]] = load_binpersid
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.APPEND[0]] = load_append
    dispatch[pickle.APPENDS[0]] = load_appends
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems

    def _extend(self, container: Any, values: list[Any]) -> None:
        kind: Any = type(container)
        if kind is not list and not (id(kind) in self._user_ids and hasattr(kind, "append")):
            raise self._not_allowed(kind)
        for value in values:
            kind.append(container, value)

    def _put(self, container: Any, pairs: list[Any]) -> None:
        kind: Any = type(container)
        is_plain = kind in (dict, OrderedDict, Counter)
        if not is_plain and not (id(kind) in self._user_ids and issubclass(kind, dict)):
            raise self._not_allowed(kind)
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            kind.__setitem__(container, name, value)

    def _check_call(self, function: Any, arguments: Any) -> None:
        if function != self._nested and id(function) not in self._ids:
            raise self._not_allowed(function)
        if function is bytes and arguments != ():  # a number would be a length to allocate
            raise pickle.UnpicklingError("bytes() with arguments is not allowed")
        if getattr(function, "__module__", "") == "numpy" and function.__name__ == "ndarray":  # could read any address
            raise pickle.UnpicklingError("an array may not be built from a buffer and strides")

    def _nested(self, outer: Any, name: Any) -> Any:
        """Return an allowed class inside an allowed class. Protocol 2 names such a class by ``getattr``."""
        full = f"{_own_name(outer)}.{name}" if isinstance(outer, type) and id(outer) in self._user_ids else ""
        if full not in self._by_user:
            raise pickle.UnpicklingError(
                f"Unsupported global: GLOBAL {full or _GETATTR} was not an allowed global by default."
            )
        return self._by_user[full]

    def _not_allowed(self, value: Any) -> pickle.UnpicklingError:
        name = _own_name(value) if isinstance(value, type) or callable(value) else _own_name(type(value))
        return pickle.UnpicklingError(f"Can only use what was allowed via `add_safe_globals` but got {name!r:.200}")


def _checked_dtype_state(dtype: Any, state: Any) -> Any:
    """Return the state of a NumPy dtype, if NumPy has that state for the dtype in some byte order.

    ``numpy.dtype.__setstate__`` trusts sizes, offsets and flags, and accesses memory by them.

    Raises:
        UnpicklingError: NumPy has another state; a dtype with fields is one example.
    """
    order = state[1] if type(state) is tuple and len(state) > 1 else None
    if order not in ("<", ">", "=", "|") or dtype.newbyteorder(order).__reduce__()[2:] != (state,):
        raise pickle.UnpicklingError("a NumPy dtype with fields or a unit cannot be loaded: save plain arrays instead")
    return state


Unpickler = ObjectUnpickler
"""The name under which ``torch.load`` finds it in a ``pickle_module``."""


def load(file: Any, **options: Any) -> Any:
    """Load a pickle as `pickle.load` does. ``torch.load`` requires this function of a ``pickle_module``."""
    return Unpickler(file, **options).load()


def runs_code(name: str) -> bool:
    """Return whether a pickle that may call this global can run any code or program: nobody should allow it."""
    return name.partition(".")[0] in _RUNNERS or name in _RUNNERS_BUILT_IN


def globals_in(data: bytes) -> dict[str, str]:
    """Return the globals in the output of ``torch.save`` that are not allowed, each with its module. Nothing is loaded.

    Raises:
        ValueError: The data is not an archive of ``torch.save``, or is damaged.
    """
    start, pickled = _pickle_in(memoryview(data))
    allowed = _allowed_by_default()
    return {name: module for _, module, name in _operations(bytes(pickled[start:])) if name and name not in allowed}


def check_object(fqn: str, data: memoryview, *, is_strict: bool = False) -> None:
    """Check that an object can be loaded after it is saved; log once for each kind what loading it requires.

    Args:
        fqn: Its name.
        data: The object as ``torch.save`` wrote it. The form of a custom planner is not checked.
        is_strict: Whether to refuse an object for which the loading program would have to allow something first.

    Raises:
        InvalidInputError: The object could not be loaded, whatever is allowed; or ``is_strict`` refuses it.
    """
    if len(data) > CHECKED_BYTES_MAX:
        return
    try:
        start, pickled = _pickle_in(data)
    except ValueError:
        return
    if pickled[start + 1] == PROTOCOL and _MAY_NEED.search(pickled, start) is None:
        return
    content = bytes(pickled[start:])
    needed, problem = _looked_up(content) if len(content) <= REMEMBERED_BYTES_MAX else _look_up(content)
    if problem:
        raise InvalidInputError(f"{fqn!r} could not be loaded again, so it is not saved: {problem}")
    if is_strict and needed.keys() - _allowed_by_default():  # what was looked up may have been allowed since
        raise InvalidInputError(
            f"{fqn!r} is built with {', '.join(needed)}, which no restore would load. Save plain values or give it a "
            "state_dict(), or call torch.serialization.add_safe_globals([...]) in every program that saves or restores"
        )
    fresh = [name for name in needed if name not in _warned]
    if fresh:
        _warned.update(fresh)
        _logger.warning(
            "%r is built with %s, which loading does not allow by default: to load it, import %s, and pass "
            "planner=TierLoadPlanner(allow=[%s]), or call torch.serialization.add_safe_globals([%s]) first",
            fqn, ", ".join(needed), ", ".join(dict.fromkeys(needed.values())), ", ".join(needed), ", ".join(needed),
        )  # fmt: skip


def _look_up(content: bytes) -> tuple[dict[str, str], str]:
    """Return the globals to allow for a pickle, each with its module, and why the pickle cannot be loaded even then."""
    allowed = _allowed_by_default()
    needed: dict[str, str] = {}
    try:
        for code, module, name in _operations(content):
            if ord(code) not in Unpickler.dispatch:
                return (
                    {},
                    f"its pickle has an instruction that cannot be loaded ({code!r}): save its parts as plain values",
                )
            if not name or name in allowed:
                continue
            if name.partition(".")[0] in _blocklisted_modules:
                return ({}, f"it is built with {name}, and torch blocks that module: save its parts as plain values")
            needed[name] = module
    except ValueError:  # unknown content: the planner that made it can read it
        return {}, ""
    return needed, ""


_looked_up = lru_cache(maxsize=REMEMBERED_MAX)(_look_up)


def _operations(content: bytes) -> Iterator[tuple[str, str, str]]:
    """Yield each opcode of a pickle, with the module and full name of the global that it looks up.

    A class inside another class is looked up as an attribute of that class.
    """
    getter, outer, module = False, "", ""
    for opcode, argument, _ in pickletools.genops(content):
        name = ""
        if opcode.name == "GLOBAL":
            module, name = _renamed(*str(argument).split(" ", 1))
            getter, outer = getter or name == "builtins.getattr", "" if name == "builtins.getattr" else name
        elif getter and outer and opcode.name == "BINUNICODE":
            name = outer = f"{outer}.{argument}"
        elif opcode.name not in _OF_ATTRIBUTES:
            outer = ""
        yield opcode.code, module, name


def aliases(data: bytes, allow: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return allowed values under the names that a pickle has for them, if these differ from their own names.

    Raises:
        ValueError: The data is not an archive of ``torch.save``.
    """
    start, pickled = _pickle_in(memoryview(data))
    ids = {id(value) for value in allow}
    found: list[tuple[Any, str]] = []
    for opcode, argument, _ in pickletools.genops(bytes(pickled[start:])):
        if opcode.name == "GLOBAL":
            written = str(argument).split(" ", 1)
            value = _resolve(_full_name(*written))
            if id(value) in ids:
                found += [(value, _full_name(*written)), (value, ".".join(written))]
    return found


def _pickle_in(data: memoryview) -> tuple[int, memoryview]:
    """Return where the pickle begins in an archive of ``torch.save``, whose first file it is, and the data.

    Raises:
        ValueError: The data is not such an archive.
    """
    if bytes(data[: len(torch_zip.LOCAL)]) != torch_zip.LOCAL or len(data) < _HEADER:
        raise ValueError("not an archive of torch.save")
    start = _HEADER + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
    if bytes(data[start : start + 1]) != pickle.PROTO or len(data) <= start + 1:
        raise ValueError("the first file of the archive is not a pickle")
    return start, data


def _full_name(module: str, name: str) -> str:
    return _renamed(module, name)[1]


def _renamed(module: str, name: str) -> tuple[str, str]:
    """Return the module and full name of a global. Protocol 2 uses the names of Python 2."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    elif module in IMPORT_MAPPING:
        module = IMPORT_MAPPING[module]
    return module, f"{module}.{name}"


def _allowed_by_default() -> set[str]:
    own = {value[1] if isinstance(value, tuple) else _own_name(value) for value in ALLOWED}
    own.add(_GETATTR)  # it finds only allowed classes
    return own | set(_get_allowed_globals()) | set(_get_user_allowed_globals())


def _own_name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"


def _resolve(name: str) -> Any:
    """Return the global of a name, if its module is loaded. It looks in dictionaries alone, so it runs no code."""
    module, _, rest = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, before = module.rpartition(".")
        rest = f"{before}.{rest}"
    found: Any = sys.modules.get(module)
    for part in rest.split("."):
        if isinstance(found, ModuleType):
            names = object.__getattribute__(found, "__dict__")
        elif isinstance(found, type):
            names = type.__getattribute__(found, "__dict__")
        else:
            return None
        found = names.get(part)
    return found
