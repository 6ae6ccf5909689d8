"""Values that are no tensors, as ``torch.save`` pickles them: what loading one needs, and a loader for containers that torch's lacks.

torch's unpickler for ``weights_only=True`` fills lists and dicts alone, and reads no integers above 255 bytes. So a `collections.deque` or a
`collections.defaultdict` cannot be loaded with it even where it is allowed. `Unpickler` follows the same rules (nothing but what is allowed
is looked up, called, or restored), for those as well. The module is given to ``torch.load`` as its ``pickle_module``.
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
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch._weights_only_unpickler import _blocklisted_modules, _get_allowed_globals, _get_user_allowed_globals

from tierfs.errors import InvalidInputError

__all__ = ["ALLOWED", "Unpickler", "aliases", "check_object", "globals_in", "with_parts"]

ALLOWED: tuple[Any, ...] = (
    bytes,
    io.BytesIO,
    (Ellipsis, "builtins.Ellipsis"),
    (NotImplemented, "builtins.NotImplemented"),
)
"""Allowed besides what torch allows. An empty `bytes` is pickled as a call of its class."""
CHECKED_BYTES_MAX = 16 << 20
"""A longer object is not looked at when it is saved: that would take as long as to save it."""
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
_PLAIN = (list, dict, set, OrderedDict, Counter)
_MAY_NEED = re.compile(rb"\n[^\n]{1,256}\n")
"""Found in each pickle that looks up a global: the names of module and global end in a newline each."""
_OF_ATTRIBUTES = {"BINUNICODE", "TUPLE2", "REDUCE", "BINPUT", "LONG_BINPUT"}
_HEADER = 30
_logger = logging.getLogger("tierfs.dcp")
_warned: set[str] = set()


def _checked(codes: bytes, check: Callable[[Any], None]) -> dict[int, Callable[..., None]]:
    """Opcodes, each done once what it takes from the stack was looked at."""

    def checked(does: Callable[..., None]) -> Callable[..., None]:
        def load(unpickler: Any) -> None:
            check(unpickler)
            does(unpickler)

        return load

    return {code: checked(pickle._Unpickler.dispatch[code]) for code in codes}


def _check_is_called(unpickler: Any) -> None:
    unpickler.check_allowed(unpickler.stack[-2])


def _check_is_restored(unpickler: Any) -> None:
    kind = type(unpickler.stack[-2])
    if kind not in (OrderedDict, torch.nn.Parameter):
        unpickler.check_allowed(kind)


def _check_one_is_put(unpickler: Any) -> None:
    _check_is_filled(unpickler, unpickler.stack[-2])


def _check_pair_is_put(unpickler: Any) -> None:
    _check_is_filled(unpickler, unpickler.stack[-3])


def _check_many_are_put(unpickler: Any) -> None:
    _check_is_filled(unpickler, unpickler.metastack[-1][-1])


def _check_is_filled(unpickler: Any, container: Any) -> None:
    if type(container) not in _PLAIN:
        unpickler.check_allowed(type(container))


class Unpickler(pickle._Unpickler):
    """Loads what is made with nothing but what torch allows, and what is on its list of safe globals.

    Written in Python: the one in C takes as much memory as a number in the pickle says.
    """

    dispatch = {  # noqa: RUF012 - as the base class has it
        **{code: pickle._Unpickler.dispatch[code] for code in _OPCODES},
        **_checked(pickle.REDUCE + pickle.NEWOBJ, _check_is_called),
        **_checked(pickle.BUILD, _check_is_restored),
        **_checked(pickle.APPEND, _check_one_is_put),
        **_checked(pickle.SETITEM, _check_pair_is_put),
        **_checked(pickle.APPENDS + pickle.SETITEMS, _check_many_are_put),
    }

    def __init__(self, file: Any, *, encoding: str = "utf-8") -> None:
        super().__init__(file, encoding=encoding)
        self._allowed = {**_get_user_allowed_globals(), **_get_allowed_globals()}
        self._ids = {id(value) for value in self._allowed.values()}

    def find_class(self, module: str, name: str) -> Any:
        """What a global stands for, if it is allowed."""
        full = _full_name(module, name)
        if full.partition(".")[0] in _blocklisted_modules:
            raise pickle.UnpicklingError(f"Trying to load unsupported GLOBAL {full} whose module is blocked.")
        if full not in self._allowed:
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {full} was not an allowed global by default.")
        return self._allowed[full]

    def check_allowed(self, value: Any) -> None:
        """See that a class or function is one that may be used.

        Raises:
            UnpicklingError: It is not.
        """
        if id(value) not in self._ids:
            raise pickle.UnpicklingError(f"Can only use what was allowed via `add_safe_globals` but got {value!r:.200}")


def load(file: Any, **options: Any) -> Any:
    """As `pickle.load`; part of what ``torch.load`` wants of a ``pickle_module``."""
    return Unpickler(file, **options).load()


def globals_in(data: bytes) -> dict[str, str]:
    """The globals of what ``torch.save`` wrote that are not allowed, each with its module. Nothing is loaded.

    Raises:
        ValueError: It is no such archive, or damaged.
    """
    start, pickled = _pickle_in(memoryview(data))
    allowed = _allowed_by_default()
    return {name: module for _, module, name in _operations(bytes(pickled[start:])) if name and name not in allowed}


def check_object(fqn: str, data: memoryview) -> None:
    """See that an object which is about to be saved can be loaded; and say once of each kind what loading it needs.

    Args:
        fqn: Its name.
        data: What ``torch.save`` made of it. Anything else, which a planner of somebody's own may make, is not looked at.

    Raises:
        InvalidInputError: It could not be loaded, whatever were allowed.
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
    fresh = [name for name in needed if name not in _warned]
    if fresh:
        _warned.update(fresh)
        _logger.warning(
            "%r is made with %s, which a checkpoint may not bring in by itself: to load it, import %s, and pass "
            "planner=TierLoadPlanner(allow=[%s])",
            fqn, ", ".join(needed), ", ".join(dict.fromkeys(needed.values())), ", ".join(needed),
        )  # fmt: skip


def _look_up(content: bytes) -> tuple[dict[str, str], str]:
    """What has to be allowed to load a pickle, each with its module, and why that would not do."""
    allowed = _allowed_by_default()
    needed: dict[str, str] = {}
    try:
        for code, module, name in _operations(content):
            if ord(code) not in Unpickler.dispatch:
                return (
                    {},
                    f"its pickle has an instruction that nothing loads ({code!r}): save it as what it consists of",
                )
            if not name or name in allowed:
                continue
            if name.partition(".")[0] in _blocklisted_modules:
                return (
                    {},
                    f"it is made with {name}, and torch loads nothing of that module: save it as what it consists of",
                )
            needed[name] = module
    except ValueError:  # not for us to judge: whoever made it knows how to read it
        return {}, ""
    return needed, ""


_looked_up = lru_cache(maxsize=REMEMBERED_MAX)(_look_up)


def _operations(content: bytes) -> Iterator[tuple[str, str, str]]:
    """Each opcode of a pickle, with module and full name of a global that it looks up.

    A class inside of another one is looked up as an attribute of that.
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
    """What is allowed, by the names that a pickle has for it, where these are not its own.

    Raises:
        ValueError: It is no archive of ``torch.save``.
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


def with_parts(allow: Iterable[Any]) -> list[Any]:
    """What is allowed, and the classes that NumPy has for its dtypes where `numpy.dtype` is: a pickle does not name them."""
    listed = list(allow)
    numpy = sys.modules.get("numpy")
    if numpy is not None and any(value is numpy.dtype for value in listed):
        listed += {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    return listed


def _pickle_in(data: memoryview) -> tuple[int, memoryview]:
    """Where the pickle begins in an archive of ``torch.save``, of which it is the first file.

    Raises:
        ValueError: It is no such archive.
    """
    if bytes(data[:4]) != b"PK\x03\x04" or len(data) < _HEADER:
        raise ValueError("no archive of torch.save")
    start = _HEADER + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
    if bytes(data[start : start + 1]) != pickle.PROTO:
        raise ValueError("no archive that torch.save made")
    return start, data


def _full_name(module: str, name: str) -> str:
    return _renamed(module, name)[1]


def _renamed(module: str, name: str) -> tuple[str, str]:
    """Module and full name of a global: protocol 2 has the names of Python 2."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    elif module in IMPORT_MAPPING:
        module = IMPORT_MAPPING[module]
    return module, f"{module}.{name}"


def _allowed_by_default() -> set[str]:
    own = {value[1] if isinstance(value, tuple) else _own_name(value) for value in ALLOWED}
    return own | set(_get_allowed_globals()) | set(_get_user_allowed_globals())


def _own_name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"


def _resolve(name: str) -> Any:
    """The global of a name, if its module is loaded."""
    module, _, rest = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, before = module.rpartition(".")
        rest = f"{before}.{rest}"
    try:
        return attrgetter(rest)(sys.modules[module]) if module else None
    except AttributeError:
        return None
