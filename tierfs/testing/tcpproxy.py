"""A TCP proxy that damages the connections between a client and an HTTP server on demand.

It passes bytes on unchanged. A request begins where a client sends a request line after the previous response began, so
a fault can strike a single request of a pooled connection. The proxy can end the clients' TLS for a server without TLS.
It passes all other TLS on unread.

The proxy works on real sockets in real time, so it takes no clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import re
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from tierfs.errors import InvalidInputError
from tierfs.testing.faults import ArmedFaults

Side = Literal["request", "response"]
Aim = Callable[[str, str], bool]

_PIECE_BYTES = 64 << 10
_HEAD_BYTES_MAX = 64 << 10  # a longer head is not treated as HTTP
_BLANK_LINE = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]\r\n")
_INTERIM = re.compile(rb"HTTP/1\.[01] 1(?!01)\d\d\b")  # "100 Continue"; another response follows
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r\n", re.IGNORECASE)
_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

_BACKLOG = 256
_SERVER_TIMEOUT_S = 10.0  # to connect
_STOP_TIMEOUT_S = 30.0
_TICK_S = 0.02  # interval between two writes at a limited bandwidth


class TcpFault(enum.Enum):
    """The kinds of faults. Each but `UNAVAILABLE` strikes at one byte of a request or response."""

    RESET = "reset"
    """The bytes before that byte are passed on, but a slow reader may miss some. Then both sides see a reset."""
    BLACK_HOLE = "black-hole"
    """From that byte on, nothing passes in either direction. The connection stays open until the client closes it."""
    TRUNCATED = "truncated"
    """The response ends before that byte, as if it were complete. Only for responses."""
    BIT_FLIP = "bit-flip"
    """One bit of that byte is flipped."""
    UNAVAILABLE = "unavailable"
    """The server gets nothing of the request, and the proxy answers with status 503. Only for requests."""


_SIDES: dict[TcpFault, Side] = {TcpFault.TRUNCATED: "response", TcpFault.UNAVAILABLE: "request"}


@dataclass(frozen=True, slots=True)
class PlannedTcpFault:
    """One fault, and the request that it strikes.

    A connection without HTTP counts as one request with an empty method, an empty path and no head.

    Attributes:
        fault: The kind.
        side: Strike the request or the response.
        at: Strike at this byte, counted from 0. Byte 0 of a response means that the server has carried out the request
            and the client does not learn of it. None: the seed draws the byte from the whole message if its head gives
            the length, else from the first piece that arrives.
        body_only: Count from the first byte after the head, and never strike a head. The framing of a chunked body is
            part of the body.
        after: Number of matching requests that pass before the fault strikes.
        aim: Called with method and path; strike only requests for which it returns true. It runs on the proxy's thread,
            so it must not block.

    Raises:
        InvalidInputError: ``side`` or ``at`` is invalid, or the fault cannot strike that side.
    """

    fault: TcpFault
    side: Side = "response"
    at: int | None = None
    body_only: bool = False
    after: int = 0
    aim: Aim | None = None

    def __post_init__(self) -> None:
        if self.side not in ("request", "response") or self.side != _SIDES.get(self.fault, self.side):
            raise InvalidInputError(f"{self.fault.value} cannot strike a {self.side}")
        if self.at is not None and self.at < 0:
            raise InvalidInputError(f"no such byte: {self.at}")

    def matches(self, method: str, path: str, head_bytes: int, total_bytes: int | None) -> bool:
        """Return whether the fault might strike a request. It may miss it if the response is too short.

        Args:
            method: Empty without HTTP.
            path: As the client sent it, with the query. Empty without HTTP.
            head_bytes: Length of the request's head, with the blank line.
            total_bytes: Length of the whole request; None if its head does not give it.
        """
        if self.aim is not None and not self.aim(method, path):
            return False
        first = (head_bytes if self.body_only else 0) + (self.at or 0)
        return self.side == "response" or total_bytes is None or first < total_bytes


class TcpFaultProxy:
    """Listens on 127.0.0.1 until `close`, and passes every connection on, with faults.

    At most one fault strikes a request: the first planned fault that is due. If none is due, one of ``random`` strikes
    with ``probability``. The request that a planned fault was chosen for uses it up, even if the response is too short
    to strike. `fired` holds the faults that really struck. Clients must not pipeline: a request that is sent before the
    previous response begins counts as part of the request before.

    One thread serves all connections. If the proxy cannot reach the server, it resets the client's connection.

    Args:
        plan: The first faults. Each strikes once.
        random: Faults to draw from, any number of times. Their ``after`` is ignored.
        probability: Probability per request that a random fault strikes.
        seed: Decides which random faults strike which requests, counted in the order of arrival. Also decides bytes and
            bits that a fault leaves open. Required with ``random``. ``repr`` shows it.
        tls: Ends the clients' TLS with this server-side context; the server gets plain TCP. None: no TLS of its own.

    Attributes:
        port: The port that the proxy listens on. It never changes.
        latency_s: Seconds of delay before the first byte of each request and each response. Later bytes follow at once.
            This and the next three attributes may be changed at any time.
        bandwidth: Bytes per second for each connection and direction; None for no limit.
        random: As above.
        probability: As above. 0 stops the random faults.
        fired: The faults that struck: fault, the request's method and path, and the place or outcome.
        requests: Number of requests by method and path, whatever their outcome.
        response_bytes: Bytes of all responses by method and path, heads included.

    Raises:
        InvalidInputError: ``random`` is given without a seed.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        plan: Iterable[PlannedTcpFault] = (),
        *,
        random: Sequence[PlannedTcpFault] = (),
        probability: float = 0.0,
        seed: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if random and seed is None:
            raise InvalidInputError("random faults need a seed, so that they can be reproduced")
        self.target = (target_host, target_port)
        self.latency_s = 0.0
        self.bandwidth: float | None = None
        self.random = tuple(random)
        self.probability = probability
        self.seed = seed or 0
        self._tls = tls
        self.fired: list[tuple[TcpFault, str, str, str]] = []
        self.requests: Counter[tuple[str, str]] = Counter()
        self.response_bytes: Counter[tuple[str, str]] = Counter()
        self._armed = ArmedFaults[PlannedTcpFault]()
        for planned in plan:
            self._armed.add(planned, planned.after)
        self._begun = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        # Bound but not listening. It reserves the port while connections are refused: otherwise the kernel could assign
        # the port to a client's socket.
        self._held = _bound(0)
        self.port: int = self._held.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-fault-proxy", daemon=True)
        self._thread.start()
        self._run(self._listen())

    def __repr__(self) -> str:
        return (
            f"TcpFaultProxy({self.target[0]}:{self.target[1]}, port={self.port}, seed={self.seed}, "
            f"probability={self.probability}, pending={self.pending}, fired={len(self.fired)}, "
            f"latency_s={self.latency_s}, bandwidth={self.bandwidth}, refuse={self.refuse})"
        )

    def __enter__(self) -> TcpFaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop every connection and stop listening. Afterwards, no thread and no descriptor of the proxy is left."""
        if self._loop.is_closed():
            return
        self._run(self._hang_up())
        self._run(self._loop.shutdown_default_executor())  # it has a thread if a lookup of the server's name needed one
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        self._loop.close()
        self._held.close()

    @property
    def refuse(self) -> bool:
        """Whether connections are refused. Set it to True to drop the open ones too. The port never changes."""
        return self._listener is None

    @refuse.setter
    def refuse(self, refuse: bool) -> None:
        if refuse != self.refuse:
            self._run(self._hang_up() if refuse else self._listen())

    def inject(
        self,
        fault: TcpFault,
        *,
        side: Side = "response",
        at: int | None = None,
        body_only: bool = False,
        after: int = 0,
        aim: Aim | None = None,
    ) -> None:
        """Plan one more fault. The arguments are those of `PlannedTcpFault`."""
        self._armed.add(PlannedTcpFault(fault, side, at, body_only, after, aim), after)

    def fail(self, *faults: PlannedTcpFault) -> None:
        """Let one of these faults strike each request that it might strike, until `recover`."""
        self.random, self.probability = faults, 1.0

    def recover(self) -> None:
        """Stop random faults, forget planned ones, accept connections, and drop those that a fault keeps open."""
        self.random, self.probability = (), 0.0
        self.clear()
        self.refuse = True
        self.refuse = False

    def clear(self) -> None:
        """Forget the planned faults that have not struck yet. Random faults go on: see ``probability``."""
        self._armed.clear()

    @property
    def pending(self) -> int:
        """Number of planned faults that have not been chosen for a request yet."""
        return len(self._armed)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_TIMEOUT_S)

    async def _listen(self) -> None:
        self._listener = _bound(self.port)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)  # noqa: FBT003 - the name says it
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        # Not asyncio's `sock_accept`: if it is cancelled at the wrong moment, it loses an accepted connection.
        if self._listener is None:
            return
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has closed the connection
        task = self._loop.create_task(_ProxiedConnection(self).serve(accepted))
        self._connections.add(task)
        task.add_done_callback(functools.partial(self._forget, accepted))

    def _forget(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        accepted.close()  # a task that was cancelled before it began has not closed it
        self._connections.discard(task)

    async def _hang_up(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        while self._connections:
            # Cancel repeatedly: before Python 3.12, `asyncio.wait_for` may lose a cancellation that arrives when its
            # awaitable finishes.
            for task in self._connections:
                task.cancel()
            await asyncio.wait(self._connections, timeout=0.1)

    def _begin(self, method: str, path: str, request: _Message) -> _Exchange:
        """Choose the fault that strikes this request. All other planned faults that might strike it count it."""
        about = (method, path, request.head_bytes, request.total_bytes)
        self._begun += 1
        self.requests[method, path] += 1
        # Each request has its own generator, so its draws do not depend on the draws of other connections.
        random = Random(f"{self.seed}/{self._begun}")
        planned = self._armed.take(lambda fault: fault.matches(*about))
        if planned is None and random.random() < self.probability:
            possible = [fault for fault in self.random if fault.matches(*about)]
            planned = random.choice(possible) if possible else None
        return _Exchange(method, path, request, planned, random)


@dataclass(slots=True)
class _Message:
    """One request or response, and the number of its bytes that were passed on."""

    head_bytes: int = 0
    total_bytes: int | None = None
    passed_bytes: int = 0
    strike_at: int | None = None

    @classmethod
    def begun_by(cls, piece: bytes, body_bytes: int | None = None) -> _Message:
        """Return a message that begins with these bytes: a whole head, or no HTTP.

        ``body_bytes`` is the length of its body if the head does not give one.
        """
        head, found, _ = piece.partition(_BLANK_LINE)
        if not found:
            return cls()
        length = _CONTENT_LENGTH.search(head + b"\r\n")
        body_bytes = int(length[1]) if length is not None else body_bytes
        head_bytes = len(head) + len(found)
        return cls(head_bytes, None if body_bytes is None else head_bytes + body_bytes)

    def find(self, planned: PlannedTcpFault, piece_bytes: int, random: Random) -> int | None:
        """Return the index in the next piece at which the fault strikes; None if it does not strike there."""
        if self.strike_at is None:
            first = self.head_bytes if planned.body_only else 0
            end = self.passed_bytes + piece_bytes if self.total_bytes is None else self.total_bytes
            if planned.at is not None:
                self.strike_at = first + planned.at
            elif first < end:
                self.strike_at = random.randrange(first, end)
            else:
                return None
        index = self.strike_at - self.passed_bytes
        return index if 0 <= index < piece_bytes else None


@dataclass(slots=True)
class _Exchange:
    """A request, its response, and the fault that strikes one of them."""

    method: str = ""
    path: str = ""
    request: _Message = field(default_factory=_Message)
    planned: PlannedTcpFault | None = None
    random: Random = field(default_factory=Random)
    response: _Message | None = None


class _ConnectionOverError(Exception):
    """The connection is over, by a fault or because the server closed it."""

    def __init__(self, fault: TcpFault | None = None) -> None:
        super().__init__(fault)
        self.fault = fault


class _ProxiedConnection:
    """One client's connection and the matching connection to the server."""

    def __init__(self, proxy: TcpFaultProxy) -> None:
        self._proxy = proxy
        self._exchange: _Exchange | None = None

    async def serve(self, accepted: socket.socket) -> None:
        """Serve until a side or a fault ends the connection. Close the accepted socket."""
        async with contextlib.AsyncExitStack() as open_ends:
            try:
                self._from_client, self._to_client = await _connected(accepted, self._proxy._tls)
            except OSError:
                return  # for example, the client does not trust the proxy's certificate
            open_ends.push_async_callback(_hang_up, self._to_client)
            try:
                connecting = asyncio.open_connection(*self._proxy.target)
                self._from_server, self._to_server = await asyncio.wait_for(connecting, _SERVER_TIMEOUT_S)
            except (OSError, asyncio.TimeoutError):
                _reset(self._to_client)
                return
            open_ends.push_async_callback(_hang_up, self._to_server)
            # `drain` waits until the kernel has all bytes; with TLS, until the TLS layer has them. A TLS transport with
            # a limit of 0 never wakes `drain`, so its limit is 1.
            self._to_server.transport.set_write_buffer_limits(0)
            self._to_client.transport.set_write_buffer_limits(0 if self._proxy._tls is None else 1, 0)
            pumps = [asyncio.ensure_future(self._pass_requests()), asyncio.ensure_future(self._pass_responses())]
            fault: TcpFault | None = None
            try:
                await asyncio.gather(*pumps)
            except _ConnectionOverError as ended:
                fault = ended.fault
            except OSError:
                fault = TcpFault.RESET  # one side reset its connection: reset the other side too
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
            if fault is TcpFault.RESET:
                _reset(self._to_client)
                _reset(self._to_server)
            elif fault in (TcpFault.BLACK_HOLE, TcpFault.UNAVAILABLE):
                with contextlib.suppress(OSError):
                    while await self._from_client.read(_PIECE_BYTES):
                        pass

    async def _pass_requests(self) -> None:
        """Pass requests on until the client sends no more."""
        while piece := await self._from_client.read(_PIECE_BYTES):
            exchange = self._exchange
            if exchange is None or (exchange.response is not None and piece[:1].isupper()):
                if piece[:1].isupper():  # a method; TLS begins with 0x16
                    piece = await _with_head(self._from_client, piece)
                line = _REQUEST_LINE.match(piece) if _BLANK_LINE in piece else None
                if line is not None:
                    request = _Message.begun_by(piece, None if b"\r\ntransfer-encoding:" in piece.lower() else 0)
                    exchange = self._proxy._begin(line[1].decode(), line[2].decode("latin-1"), request)
                elif exchange is None:
                    exchange = self._proxy._begin("", "", _Message())
                self._exchange = exchange
            assert exchange is not None
            await self._pass(exchange, "request", exchange.request, piece)
        self._to_server.write_eof()

    async def _pass_responses(self) -> None:
        """Pass responses on until the server sends no more. A response lasts until the next request begins."""
        while piece := await self._from_server.read(_PIECE_BYTES):
            exchange = self._exchange or _Exchange()
            if exchange.response is None and exchange.method:
                piece = await _with_head(self._from_server, piece)
                while _INTERIM.match(piece):
                    interim, found, piece = piece.partition(_BLANK_LINE)
                    await asyncio.sleep(self._proxy.latency_s)
                    await self._write(self._to_client, interim + found)
                    piece = await _with_head(self._from_server, piece)
            if exchange.response is None:
                exchange.response = _Message.begun_by(piece)
            self._proxy.response_bytes[exchange.method, exchange.path] += len(piece)
            await self._pass(exchange, "response", exchange.response, piece)
        raise _ConnectionOverError

    async def _pass(self, exchange: _Exchange, side: Side, message: _Message, piece: bytes) -> None:
        """Pass on the next piece of a message, with the fault that strikes in it."""
        if not piece:
            return
        writer = self._to_server if side == "request" else self._to_client
        if not message.passed_bytes:
            await asyncio.sleep(self._proxy.latency_s)
        planned, index = exchange.planned, None
        if planned is not None and planned.side == side:
            index = message.find(planned, len(piece), exchange.random)
        if planned is not None and planned.fault is TcpFault.UNAVAILABLE:
            self._fire(planned.fault, exchange, "answered 503")
            await self._write(self._to_client, _UNAVAILABLE)
            raise _ConnectionOverError(planned.fault)
        if planned is not None and index is not None:
            exchange.planned = None
            where = f"{side} byte {message.passed_bytes + index}"
            if planned.fault is not TcpFault.BIT_FLIP:
                await self._write(writer, piece[:index])
                self._fire(planned.fault, exchange, where)
                raise _ConnectionOverError(planned.fault)
            bit = exchange.random.randrange(8)
            self._fire(planned.fault, exchange, f"{where}, bit {bit}")
            piece = piece[:index] + bytes([piece[index] ^ 1 << bit]) + piece[index + 1 :]
        message.passed_bytes += len(piece)
        await self._write(writer, piece)

    async def _write(self, writer: asyncio.StreamWriter, piece: bytes) -> None:
        bandwidth = self._proxy.bandwidth
        step = max(1, int(bandwidth * _TICK_S)) if bandwidth else _PIECE_BYTES
        for start in range(0, len(piece), step):
            part = piece[start : start + step]
            if bandwidth:
                await asyncio.sleep(len(part) / bandwidth)
            writer.write(part)
            await writer.drain()

    def _fire(self, fault: TcpFault, exchange: _Exchange, detail: str) -> None:
        self._proxy.fired.append((fault, exchange.method, exchange.path, detail))


async def _with_head(reader: asyncio.StreamReader, piece: bytes) -> bytes:
    """Return bytes that hold the whole head of a message, unless the stream or the limit on heads ends first."""
    while _BLANK_LINE not in piece and len(piece) < _HEAD_BYTES_MAX and (more := await reader.read(_PIECE_BYTES)):
        piece += more
    return piece


def _bound(port: int) -> socket.socket:
    # asyncio sets TCP_NODELAY on accepted sockets only if the protocol is named. Without it, small answers take 40 ms.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
    except BaseException:
        bound.close()
        raise
    return bound


async def _connected(
    accepted: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of an accepted connection, as `asyncio.open_connection` does for an outgoing one."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=tls)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Make the next close of this connection send a reset instead of a regular end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
