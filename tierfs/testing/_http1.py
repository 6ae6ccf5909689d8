"""Just enough of HTTP/1.1 for `TcpFaultProxy`: find where heads and bodies end (RFC 9112, sections 6 and 7)."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable

PIECE_BYTES = 64 << 10
HEAD_BYTES_MAX = 64 << 10  # a longer head is not treated as HTTP
CHUNKED = -1
TO_THE_END = sys.maxsize

BLANK_LINE = b"\r\n\r\n"
REQUEST_LINE = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]\r\n")
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
INTERIM = re.compile(rb"HTTP/1\.[01] 1(?!01)\d\d\b")  # "100 Continue"; another response follows

_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r\n]*\bchunked[ \t]*\r\n", re.IGNORECASE)
_CHUNK_LINE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")

Sink = Callable[[bytes], Awaitable[None]]


class MessageReader:
    """Reads a stream, and takes back bytes that were read too far."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._ahead = b""

    def put_back(self, piece: bytes) -> None:
        self._ahead = piece + self._ahead

    async def read(self, limit: int = PIECE_BYTES) -> bytes:
        """Return the bytes that have arrived, at most ``limit``; empty at the end of the stream."""
        if not self._ahead:
            return await self._reader.read(limit)
        piece, self._ahead = self._ahead[:limit], self._ahead[limit:]
        return piece

    async def until(self, end: bytes) -> bytes:
        """Read up to and including ``end``. If the stream or the limit on heads ends first, return bytes without it."""
        taken = b""
        while end not in taken and len(taken) < HEAD_BYTES_MAX and (more := await self.read()):
            taken += more
        before, found, rest = taken.partition(end)
        self.put_back(rest)
        return before + found

    async def take(self, body_bytes: int, sink: Sink) -> None:
        """Pass a body of this many bytes, `CHUNKED` or `TO_THE_END` to ``sink``, piece by piece."""
        if body_bytes == CHUNKED:
            await self._take_chunks(sink)
            return
        while body_bytes and (piece := await self.read(min(body_bytes, PIECE_BYTES))):
            body_bytes -= len(piece)
            await sink(piece)

    async def _take_chunks(self, sink: Sink) -> None:
        while (chunk := _CHUNK_LINE.fullmatch(line := await self.until(b"\r\n"))) and (size := int(chunk[1], 16)):
            # Pass the chunk's line with its first bytes, so that a byte drawn from the first piece is rarely framing.
            piece = await self.read(min(size + 2, PIECE_BYTES))
            await sink(line + piece)
            await self.take(size + 2 - len(piece), sink)
        await sink(line)
        while chunk and line.endswith(b"\r\n") and line != b"\r\n":
            line = await self.until(b"\r\n")
            await sink(line)


def request_body_bytes(head: bytes) -> int:
    """Return the length of a request's body, or `CHUNKED`."""
    told = _told(head)
    return 0 if told is None else told


def response_body_bytes(method: str, head: bytes) -> int:
    """Return the length of the body of a response to ``method``, `CHUNKED` or `TO_THE_END`."""
    status = STATUS_LINE.match(head)
    if method == "HEAD" or (status and status[1] in {b"204", b"304"}):
        return 0
    told = _told(head)
    return TO_THE_END if told is None else told


def _told(head: bytes) -> int | None:
    if _CHUNKED.search(head):
        return CHUNKED
    length = _CONTENT_LENGTH.search(head)
    return int(length[1]) if length else None
