"""Find the elements of a safetensors or ``torch.save`` file by its own table, which is neither run nor trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tierfs.codec.layout import BYTES, Item, Read, Steps
from tierfs.codec.layout.safetensors import follow_safetensors
from tierfs.codec.layout.torch_zip import LOCAL, follow_torchzip

_START_BYTES = 9  # the length of a safetensors header, and its first character
_PIECE_BYTES = 1 << 16


class Span(NamedTuple):
    """Bytes of a file that hold elements of one kind.

    Attributes:
        start: Offset of the first byte.
        stop: Offset behind the last byte.
        width: Bytes of an element: 1, 2, 4 or 8. 1 also if the bytes are unknown or not numbers.
        name: The tensor's name, unique in the file; for ``torch.save`` the record of its storage, as ``data/3``.
            Empty for headers and padding.
        kind: "float", "integer" or "bytes".
    """

    start: int
    stop: int
    width: int
    name: str
    kind: str


def follow() -> Steps:
    """Yield the steps to read a file of any known format."""
    start = yield Read(_START_BYTES)
    yield from (follow_torchzip if start.startswith(LOCAL) else follow_safetensors)(start)


def spans(read: Callable[[int, memoryview], None], length: int) -> list[Span]:
    """Return the elements of a file.

    Args:
        read: Fills a buffer from an offset of the file on. Called for the tables of a known format, about 100 bytes for
            each record of ``torch.save``; for a few bytes of any other file.
        length: Bytes of the file.

    Returns:
        In order, without gaps, covering the file exactly. Empty if the format is unknown, or the table is damaged or
        false.

    Raises:
        Exception: ``read`` raised it.
    """
    steps = follow()
    found: list[Span] = []
    at = 0
    try:
        request = next(steps)
        while request is not None:
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
    """Cover the bytes from the last tensor to ``to``."""
    at = found[-1].stop if found else 0
    if at < to:
        found.append(Span(at, to, BYTES.width, "", BYTES.kind))


def _read(read: Callable[[int, memoryview], None], at: int, length: int, request: Read) -> bytes | None:
    """Return the requested bytes; None if the file does not have them."""
    most = min(request.length, length - at)
    if not request.mark:
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
