"""How a file is read that has a table of its own: front to back, one step after the other, by whoever has its bytes.

A reader is a generator. It yields what it wants next, and is sent the bytes, if it wanted any. So the same reader serves
a file that is there (`tierfs.codec.layout.elements`) and one that is being written (`tierfs.store.write.cuts`). `Rest` is the last thing
that it yields; if it ends before that, it does not understand what it was sent.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeAlias

__all__ = ["BYTES", "HEAD_BYTES_MAX", "Element", "Item", "Read", "ReadTo", "Rest", "Steps"]

HEAD_BYTES_MAX = 4 << 20
"""Size of a table that is held in memory and parsed. It is enough for tens of thousands of tensors."""


class Element(NamedTuple):
    """The elements of a tensor in a file.

    Attributes:
        size: Bytes of one element in the file.
        width: Bytes of the numbers in it: half of that for a complex one.
        kind: "float", "integer" or "bytes".
    """

    size: int
    width: int
    kind: str


BYTES = Element(1, 1, "bytes")


class Read(NamedTuple):
    """The next ``length`` bytes are wanted."""

    length: int


class ReadTo(NamedTuple):
    """The next bytes are wanted, up to and with ``mark``, which comes within ``length`` of them."""

    mark: bytes
    length: int


class Item(NamedTuple):
    """The next ``length`` bytes are the tensor ``name``. They are not wanted."""

    name: str
    length: int
    element: Element


class Rest(NamedTuple):
    """All that follows, if anything does, is no tensor's."""


Steps: TypeAlias = Generator[Read | ReadTo | Item | Rest, bytes, None]
