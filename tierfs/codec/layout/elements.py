"""Where which elements lie in a file, by the file's own table: safetensors, ``torch.save``. Nothing in it is run or believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tierfs.codec.layout.safetensors import follow_safetensors
from tierfs.codec.layout.steps import BYTES, Item, Read, ReadTo, Rest, Steps
from tierfs.codec.layout.torch_zip import LOCAL, follow_torchzip

__all__ = ["Span", "follow", "spans"]

_START_BYTES = 9  # a safetensors file's length of its header, and the first character of that
_PIECE_BYTES = 1 << 16


class Span(NamedTuple):
    """Bytes of a file that hold elements of one kind.

    Attributes:
        start: Offset of the first byte.
        stop: Behind the last one.
        width: Bytes of an element: 1, 2, 4 or 8; 1 also where it is not known, or no number.
        name: The tensor's, unique in the file; for a storage of ``torch.save`` its record's, as ``data/3``. Empty for what
            is no tensor: headers, padding.
        kind: "float", "integer" or "bytes".
    """

    start: int
    stop: int
    width: int
    name: str
    kind: str


def follow() -> Steps:
    """Read a file of any known format."""
    start = yield Read(_START_BYTES)
    yield from (follow_torchzip if start.startswith(LOCAL) else follow_safetensors)(start)


def spans(read: Callable[[int, memoryview], None], length: int) -> list[Span]:
    """The elements of a file.

    Args:
        read: Fills a buffer from an offset of the file on. If the file's kind is known, its tables are read, about 100
            bytes for each record of ``torch.save``; of any other, a few bytes.
        length: The file's, in bytes.

    Returns:
        In order, without gaps, covering the file exactly. Nothing for a file that nobody knows, that is damaged or lies.

    Raises:
        Exception: Raised by ``read``.
    """
    steps = follow()
    found: list[Span] = []
    at = 0
    try:
        request = next(steps)
        while not isinstance(request, Rest):
            if isinstance(request, Item):
                if request.length > length - at:
                    return []
                _fill_up(found, at)
                if request.length:
                    name, size, element = request
                    found.append(Span(at, at + size, element.width, name, element.kind))
                at += request.length
                request = steps.send(b"")
                continue
            wanted = _read(read, at, length, request)
            if wanted is None:
                return []
            at += len(wanted)
            request = steps.send(wanted)
    except StopIteration:
        return []
    _fill_up(found, length)
    return found


def _fill_up(found: list[Span], to: int) -> None:
    """Cover what lies between the last tensor and ``to``."""
    at = found[-1].stop if found else 0
    if at < to:
        found.append(Span(at, to, BYTES.width, "", BYTES.kind))


def _read(read: Callable[[int, memoryview], None], at: int, length: int, request: Read | ReadTo) -> bytes | None:
    """The requested element; ``None`` if it is not there."""
    most = min(request.length, length - at)
    if isinstance(request, Read):
        if request.length > most:
            return None
        data = bytearray(most)
        read(at, memoryview(data))
        return bytes(data)
    data = bytearray()
    while len(data) < most:
        piece = bytearray(min(_PIECE_BYTES, most - len(data)))
        read(at + len(data), memoryview(piece))
        searched = max(0, len(data) - len(request.mark) + 1)
        data += piece
        end = data.find(request.mark, searched)
        if end >= 0:
            return bytes(data[: end + len(request.mark)])
    return None
