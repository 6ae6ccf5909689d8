"""Safetensors files as bytes: read their table without trusting it, and find each tensor.

Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tierfs.checked_json import parse_object
from tierfs.codec.layout import BYTES, HEAD_BYTES_MAX, Element, Item, Read, Steps
from tierfs.errors import CorruptionError, FormatError

HEADER_BYTES_MAX = 100_000_000
"""The largest header that the safetensors library reads."""
METADATA_NAME = "__metadata__"
"""The header's key for metadata, which therefore is not a tensor's name."""
ELEMENTS: Mapping[str, Element] = {
    **{name: Element(size, size, "float") for name, size in {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.items()},
    **{f"F8_{name}": Element(1, 1, "float") for name in ("E5M2", "E4M3", "E8M0", "E4M3FN", "E4M3FNUZ", "E5M2FNUZ")},
    **{f"{sign}{8 * size}": Element(size, size, "integer") for sign in "IU" for size in (1, 2, 4, 8)},
    "BOOL": Element(1, 1, "integer"),
    "C64": Element(8, 4, "float"),
}
"""The format's dtypes with elements of whole bytes."""
_LENGTH_BYTES = 8
_DIMENSIONS_MAX = 64
_INTEGER_MAX = (1 << 63) - 1


class HeaderEntry(NamedTuple):
    """A tensor or object in the header.

    Attributes:
        name: Unique in the file.
        dtype: The format's name for it.
        shape: Rows first.
        at: Offset in bytes. In a header it counts from the header's end; before a header exists, from the start of its
            run.
        length: In bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    length: int


def read_table(
    read_into: Callable[[int, memoryview], None], length: int, where: str
) -> tuple[dict[str, HeaderEntry], int]:
    """Read the header of a safetensors file.

    Args:
        read_into: Fills a buffer from an offset of the file on.
        length: Bytes of the file.
        where: The file's name in errors.

    Returns:
        Every tensor by name, with its offset in the data; and the offset of the data in the file.

    Raises:
        CorruptionError: The file is not a safetensors file, or its table is false.
    """
    head = bytearray(_LENGTH_BYTES)
    if length >= _LENGTH_BYTES:
        read_into(0, memoryview(head))
    size = int.from_bytes(head, "little")
    if not 0 < size <= min(HEADER_BYTES_MAX, length - _LENGTH_BYTES):
        raise _wrong(where, "it does not begin with the length of a table of tensors")
    text = bytearray(size)
    read_into(_LENGTH_BYTES, memoryview(text))
    begin = _LENGTH_BYTES + size
    entries = _parse(text, where)
    end = sum(entry.length for entry in entries.values())
    if end != length - begin:
        raise _wrong(where, f"its tensors end at {end}, and its data at {length - begin}")
    return entries, begin


def follow_safetensors(start: bytes) -> Steps:
    """Yield the steps to read a file that begins with these 9 bytes."""
    size = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if not 1 < size <= HEAD_BYTES_MAX or start[_LENGTH_BYTES:] != b"{":
        return
    text = start[_LENGTH_BYTES:] + (yield Read(size - 1))
    try:
        entries = _parse(text, "")
    except CorruptionError:
        return
    for entry in sorted(entries.values(), key=lambda entry: entry.at):
        if entry.length:
            yield Item(entry.name, entry.length, ELEMENTS.get(entry.dtype, BYTES))
    yield None


def _parse(text: bytes | bytearray, where: str) -> dict[str, HeaderEntry]:
    """Return a header's tensors by name. Check that they follow each other from offset 0 on."""
    try:
        table = parse_object(text, "its table of tensors", unique=True)
    except FormatError as error:
        raise _wrong(where, str(error)) from error
    table.pop(METADATA_NAME, None)
    entries = {name: _entry(name, item, where) for name, item in table.items()}
    at = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.at, entry.length)):
        if entry.at != at:
            raise _wrong(where, f"{entry.name!r} begins at {entry.at}, but the tensor before it ends at {at}")
        at = entry.at + entry.length
    return entries


def _entry(name: str, item: Any, where: str) -> HeaderEntry:
    try:
        dtype, shape, (start, end) = item["dtype"], item["shape"], item["data_offsets"]
        sizes = [*shape, start, end]
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(where, f"the entry of {name!r} is invalid: {item!r:.100}") from error
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or not all(type(size) is int and 0 <= size <= _INTEGER_MAX for size in sizes)
    ):
        raise _wrong(where, f"the entry of {name!r} is invalid: {item!r:.100}")
    if len(shape) > _DIMENSIONS_MAX or start > end:
        raise _wrong(where, f"the entry of {name!r} is invalid: {item!r:.100}")
    known = ELEMENTS.get(dtype)
    if known is not None and math.prod(shape) * known.size != end - start:
        raise _wrong(where, f"{name!r}: {end - start} bytes do not make {shape} elements of {dtype}")
    return HeaderEntry(name, dtype, tuple(shape), start, end - start)


def _wrong(where: str, what: str) -> CorruptionError:
    return CorruptionError(f"{where}: not a safetensors file: {what}", path=where)
