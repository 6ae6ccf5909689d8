"""Find the tensors of a file by the file's own table: the steps to read it, from front to back.

A reader is a generator. It yields its next request, and is sent the bytes if it requested any. So the same reader
serves an existing file (`tierfs.codec.layout.elements`) and one that is being written (`tierfs.store.write.sink`).
``None`` is the last step: no tensor is in the rest of the file, which may be empty. A reader that ends before it does
not understand the bytes that it was sent.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeAlias

HEAD_BYTES_MAX = 4 << 20
"""Largest table that is held in memory and parsed. It is enough for tens of thousands of tensors."""


class Element(NamedTuple):
    """The elements of a tensor in a file.

    Attributes:
        size: Bytes of one element in the file.
        width: Bytes of the numbers in it; half of ``size`` if it is complex.
        kind: "float", "integer" or "bytes".
    """

    size: int
    width: int
    kind: str


BYTES = Element(1, 1, "bytes")


class Read(NamedTuple):
    """Requests the next ``length`` bytes; with a ``mark``, those up to and including it, at most ``length``."""

    length: int
    mark: bytes = b""


class Item(NamedTuple):
    """States that the next ``length`` bytes are the tensor ``name``, and requests none of them."""

    name: str
    length: int
    element: Element


Steps: TypeAlias = Generator[Read | Item | None, bytes, None]
