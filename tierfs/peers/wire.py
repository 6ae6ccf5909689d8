"""The transport between two hosts: a message with an optional body, and an answer, over TLS.

A frame is a prefix of fixed size, a JSON object, and a body. A connection carries one request at a time. The bytes of a
body go from the caller's memory to the socket, and from the socket into the caller's memory.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from tierfs.digest import BLOCK_BYTES
from tierfs.errors import FormatError
from tierfs.host.rpc.protocol import decode, describe_error, error_from

VERSION = 1
HEADER_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 64 << 20
NAMES_MAX = 4096
"""Names in one message."""
IDLE_S = 60.0
"""Limit for each read and write, so that a half-open connection ends."""
_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"TFSP"
BodyReader: TypeAlias = "Callable[[Connection, dict[str, Any], int], None]"
"""Reads the body of an answer: called with the connection, the answer, and the bytes of the body."""


class Connection:
    """One connection to another host, after the handshake. Not thread-safe.

    Args:
        sock: The socket. The connection owns it.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self.idle_since: float | None = None
        """When the last request was answered, by the monotonic clock; None during a request. For the server."""
        self._ends: float | None = None  # of the request, by the monotonic clock
        sock.settimeout(IDLE_S)

    @property
    def certificate(self) -> bytes:
        """The certificate of the other side, DER, whose key it has proved to have."""
        return self._sock.getpeercert(binary_form=True) or b""

    def set_timeout(self, seconds: float, *, whole: bool = False) -> None:
        """Limit each read and write of the next request, or with ``whole`` all of the request."""
        self._sock.settimeout(seconds)
        self._ends = time.monotonic() + seconds if whole else None

    def is_closed(self) -> bool:
        """Return whether the other side has closed a connection on which no answer is awaited, as far as is known."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def send(self, message: Mapping[str, Any], pieces: Iterable[memoryview] = (), length: int = 0) -> None:
        """Send one frame, whose body is ``pieces`` of ``length`` bytes together.

        Raises:
            OSError: The other side is gone or slow.
        """
        head = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
        assert len(head) <= HEADER_BYTES_MAX, f"a header of {len(head)} bytes"
        assert length <= BODY_BYTES_MAX, f"a body of {length} bytes"
        self._sock.sendall(_PREFIX.pack(_MAGIC, len(head), length) + head)
        for piece in pieces:
            for at in range(0, len(piece), BLOCK_BYTES):
                self._sock.sendall(piece[at : at + BLOCK_BYTES])

    def receive(self) -> tuple[dict[str, Any], int] | None:
        """Wait for a frame. Return its message and the bytes of its body, or None at the end of the connection.

        The caller reads the body with `read_into` before the next call.

        Raises:
            FormatError: It is not a frame, or over a limit.
            OSError: The other side is gone or slow.
        """
        prefix = bytearray(_PREFIX.size)
        if not self._fill(memoryview(prefix), may_end=True):
            return None
        magic, head_length, length = _PREFIX.unpack(prefix)
        if magic != _MAGIC or head_length > HEADER_BYTES_MAX or length > BODY_BYTES_MAX:
            raise FormatError("a peer sent something that is not a frame of tierfs")
        head = bytearray(head_length)
        self._fill(memoryview(head))
        return decode(bytes(head)), length

    def read_into(self, out: memoryview, use: Callable[[memoryview], object] = lambda _: None) -> None:
        """Fill ``out`` with the next bytes of a body. Call ``use`` with each block once it is there."""
        for at in range(0, len(out), BLOCK_BYTES):
            piece = out[at : at + BLOCK_BYTES]
            self._fill(piece)
            use(piece)

    def ask(
        self, message: Mapping[str, Any], body: memoryview | None = None, take: BodyReader | None = None
    ) -> dict[str, Any]:
        """Send a request and return its answer. ``take`` reads the answer's body; without it there may be none.

        Raises:
            TierfsError: The other side raised it.
            FormatError: The answer is not one.
            OSError: The other side is gone or slow.
        """
        self.send(message, () if body is None else (body,), 0 if body is None else len(body))
        received = self.receive()
        if received is None:
            raise ConnectionResetError("the peer has closed the connection")
        answer, length = received
        if length and take is None:
            raise FormatError("a peer's answer has a body that was not asked for")
        outcome = answer.get("ok")
        if not isinstance(outcome, dict):
            raise error_from(answer.get("error"))
        if take is not None:
            take(self, outcome, length)
        return outcome

    def answer(
        self, outcome: Mapping[str, Any] | Exception, pieces: Iterable[memoryview] = (), length: int = 0
    ) -> None:
        """Send the answer to a request: its result, perhaps with a body, or its error."""
        if isinstance(outcome, Exception):
            self.send({"error": describe_error(outcome)})
        else:
            self.send({"ok": outcome}, pieces, length)

    def _fill(self, out: memoryview, *, may_end: bool = False) -> bool:
        """Fill ``out``. Return false if the connection ended before the first byte, where that is allowed."""
        filled = 0
        while filled < len(out):
            if self._ends is not None:
                self._sock.settimeout(max(self._ends - time.monotonic(), 0.001))  # 0 would mean not to block
            count = self._sock.recv_into(out[filled:])
            if not count:
                if may_end and not filled:
                    return False
                raise ConnectionResetError("the peer has closed the connection")
            filled += count
        return True


def dial(address: str, port: int, context: ssl.SSLContext, timeout_s: float) -> Connection:
    """Connect to a host.

    Raises:
        OSError: It does not answer, or has another certificate.
    """
    sock = socket.create_connection((address, port), timeout=timeout_s)
    try:
        _tune(sock)
        return Connection(context.wrap_socket(sock))
    except BaseException:
        sock.close()
        raise


def accept(sock: socket.socket, context: ssl.SSLContext, timeout_s: float) -> Connection:
    """Make a connection from an accepted socket. Raises `OSError` if the client has no known certificate."""
    try:
        sock.settimeout(timeout_s)
        _tune(sock)
        return Connection(context.wrap_socket(sock, server_side=True))
    except BaseException:
        sock.close()
        raise


def listen(address: str, port: int) -> socket.socket:
    """Listen at one address. Raises `OSError` if it is in use, or not this host's."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(64)
    except BaseException:
        sock.close()
        raise
    return sock


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
