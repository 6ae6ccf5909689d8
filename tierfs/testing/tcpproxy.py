"""A TCP proxy that damages the connections between a client and an HTTP server on demand.

It passes bytes on unchanged. It reads just enough of HTTP/1.1 to know where each request begins and ends and where a
body begins. So a fault can strike a single request of a pooled connection. The proxy can end the clients' TLS for a
server without TLS. It passes all other TLS on unread.

The proxy works on real sockets in real time, so it takes no clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import struct
import threading
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import TracebackType

from tierfs.errors import InvalidInputError
from tierfs.testing._armed import ArmedFaults
from tierfs.testing._http1 import (
    BLANK_LINE,
    CHUNKED,
    INTERIM,
    PIECE_BYTES,
    REQUEST_LINE,
    STATUS_LINE,
    TO_THE_END,
    MessageReader,
    request_body_bytes,
    response_body_bytes,
)
from tierfs.testing.tcpfaults import DUPLICATE_BYTES_MAX, Aim, PlannedTcpFault, Side, TcpFault

_CONNECTIONS_MAX = 256  # more connections wait in the backlog, which has the same length
_SERVER_TIMEOUT_S = 10.0  # to connect, and to answer a duplicate
_STOP_TIMEOUT_S = 30.0
_TICK_S = 0.02  # interval between two writes at a limited bandwidth


class TcpFaultProxy:
    """Listens on 127.0.0.1 until `close`, and passes every connection on, with faults.

    At most one fault strikes a request: the first planned fault that is due. If none is due, one of ``random`` strikes
    with ``probability``. The request that a planned fault was chosen for uses it up, even if the response is too short
    to strike. `fired` holds the faults that really struck. The proxy also passes on pipelined requests, which a client
    sends before it has the previous response. It is then undefined which response a fault strikes.

    One thread serves at most 256 connections. If the proxy cannot reach the server, it resets the client's connection.

    Args:
        target_host: The server's host.
        target_port: The server's port.
        plan: The first faults. Each strikes once.
        random: Faults to draw from, any number of times. Their ``after`` is ignored.
        probability: Probability per request that a random fault strikes.
        seed: Decides which random faults strike which requests, counted in the order of arrival. Also decides bytes and
            bits that a fault leaves open. Required with ``random``. ``repr`` shows it.
        tls: Ends the clients' TLS with this server-side context; the server gets plain TCP. None: no TLS of its own.

    Attributes:
        port: The port that the proxy listens on. It never changes.
        latency_s: Seconds of delay before the first byte of each request and each response. Later bytes follow at once.
            This and the next two attributes may be changed at any time.
        bandwidth: Bytes per second for each connection and direction; None for no limit.
        probability: As above. 0 stops the random faults.
        fired: The faults that struck: fault, the request's method and path, and the place or outcome.

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
        self.probability = probability
        self.seed = seed or 0
        self._tls = tls
        self.fired: list[tuple[TcpFault, str, str, str]] = []
        self._random = tuple(random)
        self._armed = ArmedFaults(plan)
        self._requests = 0
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._armed.add(PlannedTcpFault(fault, side, at, body_only, after, aim))

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
        self._listener.listen(_CONNECTIONS_MAX)
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
        if len(self._connections) >= _CONNECTIONS_MAX:
            self._loop.remove_reader(self._listener)

    def _forget(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        accepted.close()  # a task that was cancelled before it began has not closed it
        self._connections.discard(task)
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

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
        self._requests += 1
        # Each request has its own generator, so its draws do not depend on the draws of other connections.
        random = Random(f"{self.seed}/{self._requests}")
        planned = self._armed.take(lambda fault: fault.matches(*about))
        if planned is None and random.random() < self.probability:
            possible = [fault for fault in self._random if fault.matches(*about)]
            planned = random.choice(possible) if possible else None
        return _Exchange(method, path, request, planned, random)


@dataclass(slots=True)
class _Message:
    """One request or response, and the number of its bytes that were passed on."""

    head_bytes: int = 0
    total_bytes: int | None = None
    passed_bytes: int = 0
    strike_at: int | None = None

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


def _message(head: bytes, body_bytes: int) -> _Message:
    known = body_bytes not in (CHUNKED, TO_THE_END)
    return _Message(len(head), len(head) + body_bytes if known else None)


@dataclass(slots=True)
class _Exchange:
    """A request, its response, and the fault that strikes one of them."""

    method: str = ""
    path: str = ""
    request: _Message = field(default_factory=_Message)
    planned: PlannedTcpFault | None = None
    random: Random = field(default_factory=Random)
    copy: bytearray = field(default_factory=bytearray)  # of the request, if it is going to be duplicated
    whole: bool = False  # whether the whole request has been passed on

    def plans(self, fault: TcpFault) -> bool:
        return self.planned is not None and self.planned.fault is fault


class _ConnectionOverError(Exception):
    """The connection is over, by a fault or because the server closed it."""

    def __init__(self, fault: TcpFault | None = None) -> None:
        super().__init__(fault)
        self.fault = fault


class _ProxiedConnection:
    """One client's connection and the matching connection to the server."""

    def __init__(self, proxy: TcpFaultProxy) -> None:
        self._proxy = proxy
        self._exchange = _Exchange()

    async def serve(self, accepted: socket.socket) -> None:
        """Serve until a side or a fault ends the connection. Close the accepted socket."""
        async with contextlib.AsyncExitStack() as open_ends:
            try:
                reader, self._to_client = await _connected(accepted, self._proxy._tls)
            except OSError:
                return  # for example, the client does not trust the proxy's certificate
            self._from_client = MessageReader(reader)
            open_ends.push_async_callback(_hang_up, self._to_client)
            try:
                self._from_server, self._to_server = await self._connect()
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
            elif fault is TcpFault.BLACK_HOLE:
                with contextlib.suppress(OSError):
                    await self._from_client.take(TO_THE_END, _swallow)

    async def _connect(self) -> tuple[MessageReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*self._proxy.target), _SERVER_TIMEOUT_S)
        return MessageReader(reader), writer

    async def _pass_requests(self) -> None:
        """Pass requests on until the client sends no more."""
        source = self._from_client
        while head := await source.read():
            if head[:1].isupper():  # a method; TLS begins with 0x16
                source.put_back(head)
                head = await source.until(BLANK_LINE)
            line = REQUEST_LINE.match(head) if head.endswith(BLANK_LINE) else None
            if line is None:
                self._exchange = self._proxy._begin("", "", _Message())
                await self._pass_request(head)
                await source.take(TO_THE_END, self._pass_request)
                break
            method, path = line[1].decode(), line[2].decode("latin-1")
            body_bytes = request_body_bytes(head)
            self._exchange = self._proxy._begin(method, path, _message(head, body_bytes))
            await self._pass_request(head)
            await source.take(body_bytes, self._pass_request)
            self._exchange.whole = True  # before the response can arrive: no other task has run since the last byte
        self._to_server.write_eof()

    async def _pass_responses(self) -> None:
        """Pass responses on until the server sends no more. A response lasts until the next request begins."""
        exchange, message = None, _Message()
        while piece := await self._from_server.read():
            if self._exchange is not exchange:
                exchange = self._exchange
                self._from_server.put_back(piece)
                message = await self._begin_response(exchange)
            else:
                await self._pass(exchange, "response", message, piece)
        raise _ConnectionOverError

    async def _begin_response(self, exchange: _Exchange) -> _Message:
        """Pass on interim responses, read the head of the final one, and duplicate the request if that is planned."""
        source = self._from_server
        if not exchange.method:
            return _Message()
        while INTERIM.match(head := await source.until(BLANK_LINE)):
            await asyncio.sleep(self._proxy.latency_s)
            await self._write(self._to_client, head)
        if exchange.plans(TcpFault.DUPLICATED) and exchange.whole:
            await self._duplicate(exchange)
        source.put_back(head)  # so that the start of the body is in the same piece
        return _message(head, response_body_bytes(exchange.method, head)) if head.endswith(BLANK_LINE) else _Message()

    async def _pass_request(self, piece: bytes) -> None:
        exchange = self._exchange
        if exchange.plans(TcpFault.DUPLICATED):
            exchange.copy += piece
            if len(exchange.copy) > DUPLICATE_BYTES_MAX:
                exchange.planned = None
                exchange.copy.clear()
        await self._pass(exchange, "request", exchange.request, piece)

    async def _pass(self, exchange: _Exchange, side: Side, message: _Message, piece: bytes) -> None:
        """Pass on the next piece of a message, with the fault that strikes in it."""
        if not piece:
            return
        writer = self._to_server if side == "request" else self._to_client
        if not message.passed_bytes:
            await asyncio.sleep(self._proxy.latency_s)
        planned = exchange.planned
        index = None
        if planned is not None and planned.side == side and planned.fault is not TcpFault.DUPLICATED:
            index = message.find(planned, len(piece), exchange.random)
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
        step = max(1, int(bandwidth * _TICK_S)) if bandwidth else PIECE_BYTES
        for start in range(0, len(piece), step):
            part = piece[start : start + step]
            if bandwidth:
                await asyncio.sleep(len(part) / bandwidth)
            writer.write(part)
            await writer.drain()

    async def _duplicate(self, exchange: _Exchange) -> None:
        """Make the server carry out the request a second time."""
        try:
            source, writer = await self._connect()
        except (OSError, asyncio.TimeoutError):
            return
        try:
            writer.write(exchange.copy)
            outcome = await asyncio.wait_for(_answer(source, exchange.method), _SERVER_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):
            outcome = "none"
        finally:
            await _hang_up(writer)
        self._fire(TcpFault.DUPLICATED, exchange, f"second answer: {outcome}")

    def _fire(self, fault: TcpFault, exchange: _Exchange, detail: str) -> None:
        self._proxy.fired.append((fault, exchange.method, exchange.path, detail))


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


async def _swallow(_: bytes) -> None:
    pass


async def _answer(source: MessageReader, method: str) -> str:
    """Read one response to its end, and return its status, or ``"none"``."""
    while INTERIM.match(head := await source.until(BLANK_LINE)):
        pass
    status = STATUS_LINE.match(head)
    if status is None:
        return "none"
    await source.take(response_body_bytes(method, head), _swallow)
    return status[1].decode()
