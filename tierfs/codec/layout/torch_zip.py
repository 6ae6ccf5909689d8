"""Files of ``torch.save`` as bytes: find each storage and the type of its elements. The pickle is never run.

Such a file is a zip archive without compression. The pickle is its first record. The storages follow, each padded so
that its data begin at a multiple of 64 bytes. A record's size stands *behind* its data. So a storage's size is taken
from the pickle, which names each storage with its type and number of elements. It is then compared with the size behind
the data.

Format: torch/serialization.py (`_save`), torch's miniz; APPNOTE.TXT of zip, sections 4.3.7 and 4.3.9.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

from tierfs.codec.layout import BYTES, HEAD_BYTES_MAX, Element, Item, Read, Steps

LOCAL = b"PK\x03\x04"
"""The first bytes of each record, and so of the file."""
_BEHIND = b"PK\x07\x08"
_DIRECTORY = b"PK\x01\x02"
_HEADER = struct.Struct("<4s2xHH8xIIHH")  # signature; flags, method; sizes; lengths of name and extra field
_SIZE_IS_BEHIND = 8
_ENCRYPTED = 1
_PICKLE = "data.pkl"
_OTHERS_MAX = 16  # records that are neither the pickle nor a storage: a version, a byte order
_OTHER_BYTES_MAX = 1 << 16
_NAME_MAX = 256  # characters; torch writes no longer ones, and each opcode of a pickle can double a name
_OPCODES_MAX = 1_000_000  # takes a second; a file with more opcodes is cut like one of unknown format

_FLOATS = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2}
_INTEGERS = {"Long": 8, "Int": 4, "QInt32": 4, "Short": 2}
_SMALL_INTEGERS = dict.fromkeys(("Char", "Byte", "Bool", "QInt8", "QUInt8"), 1)
_STORAGES: Mapping[str, Element] = {
    **{f"torch {name}Storage": Element(size, size, "float") for name, size in _FLOATS.items()},
    **{f"torch {name}Storage": Element(size, size, "integer") for name, size in (_INTEGERS | _SMALL_INTEGERS).items()},
    "torch ComplexFloatStorage": Element(8, 4, "float"),
    "torch ComplexDoubleStorage": Element(16, 8, "float"),
    "torch QUInt4x2Storage": BYTES,
    "torch QUInt2x4Storage": BYTES,
    "torch.storage UntypedStorage": BYTES,
}
# A dtype without a storage class of its own is stored untyped, and rebuilt with the dtype.
_REBUILD = "torch._utils _rebuild_tensor_v3"
_DTYPE_ARGUMENT = 6
_DTYPES: Mapping[str, Element] = {
    **{f"torch uint{8 * size}": Element(size, size, "integer") for size in (2, 4, 8)},
    **{
        f"torch float8_{name}": Element(1, 1, "float") for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
    },
}


_Storage: TypeAlias = tuple[int, Element]
"""The bytes of a storage, and its elements."""


def follow_torchzip(start: bytes) -> Steps:
    """Yield the steps to read a file that begins with these bytes: `LOCAL` first, 30 at most."""
    name, is_empty = yield from _name(start + (yield Read(_HEADER.size - len(start))))
    if is_empty or not name.endswith(_PICKLE):
        return
    prefix = name.removesuffix(_PICKLE)
    pickle = (yield Read(HEAD_BYTES_MAX, _BEHIND))[: -len(_BEHIND)]
    storages = storages_in(pickle)
    signature = yield from _check_size(len(pickle))
    has_items = False
    records_left = len(storages) + _OTHERS_MAX
    while signature == LOCAL and records_left:
        records_left -= 1
        name, is_empty = yield from _name(signature + (yield Read(_HEADER.size - len(signature))))
        # Each storage once: a second record of its name is something else.
        storage = storages.pop(name.removeprefix(prefix), None) if name.startswith(prefix) else None
        if is_empty:
            signature = yield Read(len(LOCAL))
        elif storage is not None:
            has_items = True
            length, element = storage
            yield Item(name.removeprefix(prefix), length, element)
            if (yield Read(len(_BEHIND))) != _BEHIND:
                return
            signature = yield from _check_size(length)
        elif has_items:
            break
        else:
            record = yield Read(_OTHER_BYTES_MAX, _BEHIND)
            signature = yield from _check_size(len(record) - len(_BEHIND))
    if signature in {LOCAL, _DIRECTORY}:
        yield None


def _name(header: bytes) -> Generator[Read, bytes, tuple[str, bool]]:
    """Read up to the beginning of a record's data.

    Returns:
        The record's name, empty if torch would not write such a record; and whether neither data nor a size follow.
    """
    signature, flags, method, *sizes, name_length, extra_length = _HEADER.unpack(header)
    name = yield Read(name_length + extra_length)
    is_empty = not flags & _SIZE_IS_BEHIND
    if signature != LOCAL or method or flags & _ENCRYPTED or (is_empty and any(sizes)):
        return "", False
    return name[:name_length].decode(errors="replace"), is_empty


def _check_size(length: int) -> Generator[Read, bytes, bytes]:
    """Read a record's checksum, its size twice, and the next signature. Return that, or nothing if a size differs."""
    after = yield Read(16)
    for size in (4, 8):  # bytes of a size: 8 if the record is large, or far into the file
        end = 4 + 2 * size
        after += yield Read(end + 4 - len(after))
        sizes = [int.from_bytes(after[4 : 4 + size], "little"), int.from_bytes(after[4 + size : end], "little")]
        if sizes == [length, length] and after[end:] in {LOCAL, _DIRECTORY}:
            return after[end:]
    return b""


def storages_in(pickle: bytes) -> dict[str, _Storage]:
    """Return the storages that a pickle of ``torch.save`` refers to, by the names of their records, as far as known.

    The opcodes run on a stack that holds only strings, numbers, tuples and names of globals.
    """
    machine = _Machine()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            if number == _OPCODES_MAX:
                return {}
            machine.step(opcode, argument)
    except (ValueError, LookupError, Warning):  # damaged, or not a pickle; a warning, if warnings are errors
        return {}
    return machine.found


class _Global(str):
    """The names of a module and of an attribute of it, with a space between."""

    __slots__ = ()


_MARK = object()


class _Machine:
    def __init__(self) -> None:
        self.found: dict[str, _Storage] = {}
        self._stack: list[object] = []
        self._memo: dict[object, object] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """Follow one opcode, as far as it matters here."""
        name, stack = opcode.name, self._stack
        if name == "MARK":
            stack.append(_MARK)
        elif name in {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}:
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in {"GET", "BINGET", "LONG_BINGET"}:
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(_Global(argument))
        else:
            taken = self._take(opcode.stack_before)
            stack.extend([self._made(name, argument, taken)] * len(opcode.stack_after))

    def _take(self, wanted: list[pickletools.StackObject]) -> list[object]:
        """Pop the values that an opcode consumes."""
        count = len(wanted)
        if pickletools.markobject in wanted:
            mark = len(self._stack) - 1
            while self._stack[mark] is not _MARK:
                mark -= 1
            count = wanted.index(pickletools.markobject) + len(self._stack) - mark
        if count > len(self._stack):
            raise ValueError("an opcode takes more values than the stack holds")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def _made(self, name: str, argument: Any, taken: list[object]) -> object:
        """Return the value that an opcode pushes."""
        if not taken:
            return argument if name != "EMPTY_TUPLE" else ()
        if name == "TUPLE":
            return tuple(taken[1:])
        if name in {"TUPLE1", "TUPLE2", "TUPLE3"}:
            return tuple(taken)
        if name == "STACK_GLOBAL":
            parts = [part for part in taken if isinstance(part, str)]
            if sum(map(len, parts)) > _NAME_MAX:
                raise ValueError("the name of a global is too long")
            return _Global(" ".join(parts))
        if name == "BINPERSID":
            return self._refer(taken[0])
        if name == "REDUCE":
            self._rebuild(*taken)
        return None

    def _refer(self, what: object) -> object:
        """Note a reference to a storage. Return the name of the storage's record."""
        match what:
            case ("storage", _Global() as kind, str() as key, _, int() as count) if (
                count >= 0 and kind in _STORAGES and len(key) <= _NAME_MAX
            ):
                record = f"data/{key}"
                element = _STORAGES[kind]
                self.found.setdefault(record, (count * element.size, element))
                return record
        return None

    def _rebuild(self, function: object, arguments: object) -> None:
        """Set an untyped storage's dtype by the first tensor in it."""
        if function != _REBUILD or not isinstance(arguments, tuple) or len(arguments) <= _DTYPE_ARGUMENT:
            return
        record, dtype = arguments[0], arguments[_DTYPE_ARGUMENT]
        if isinstance(record, str) and isinstance(dtype, _Global) and dtype in _DTYPES and record in self.found:
            length, element = self.found[record]
            if element is BYTES:
                self.found[record] = (length, _DTYPES[dtype])
