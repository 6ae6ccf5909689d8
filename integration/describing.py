"""Self-describing contents: a reader can check them, and tell their writer and order, without asking the writer.

A file is one or more records. A record is a head and bytes that follow from the head. A writer numbers its records
in increasing order.
"""

from __future__ import annotations

import random
import struct
from typing import NamedTuple

BODY_BYTES_MAX = 8 << 20
_HEAD = struct.Struct("<8s16sQQQ")
_MAGIC = b"RECORD01"
# Incompressible; each record's body is another range of it.
_NOISE = random.Random(20261120).randbytes(2 * BODY_BYTES_MAX)


class Record(NamedTuple):
    """One record.

    Attributes:
        writer: Name of the writer, at most 16 ASCII characters.
        number: Its number among the writer's records.
        length: Bytes of the whole record.
    """

    writer: str
    number: int
    length: int


def encode(writer: str, number: int, length: int) -> bytes:
    """Return a record of ``length`` bytes, which must be at least the size of its head."""
    body = max(length - _HEAD.size, 0)
    start = random.Random(f"{writer} {number}").randrange(BODY_BYTES_MAX)
    return _HEAD.pack(_MAGIC, writer.encode(), number, body, start) + _NOISE[start : start + body]


def decode(content: bytes | bytearray) -> list[Record]:
    """Return the records of a whole file.

    Raises:
        AssertionError: A byte differs from the byte that was written.
    """
    found = []
    at = 0
    while at < len(content):
        assert at + _HEAD.size <= len(content), f"cut short at {at} of {len(content)}"
        magic, writer, number, body, start = _HEAD.unpack_from(content, at)
        assert magic == _MAGIC, f"no record at {at}: {bytes(content[at : at + 16])!r}"
        name = writer.rstrip(b"\0").decode()
        assert start == random.Random(f"{name} {number}").randrange(BODY_BYTES_MAX), "a head that nobody wrote"
        begin = at + _HEAD.size
        assert begin + body <= len(content), f"record {name} {number} is cut short"
        assert content[begin : begin + body] == _NOISE[start : start + body], f"record {name} {number}: wrong bytes"
        found.append(Record(name, number, _HEAD.size + body))
        at = begin + body
    return found
