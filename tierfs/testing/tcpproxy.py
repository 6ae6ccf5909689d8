"""A TCP proxy that injures the connections between a client and an HTTP server, as it is told.

It passes bytes on as they are. It reads just enough of HTTP/1.1 to know where each request begins and ends and where a
body starts, so that a fault strikes a request of a connection that lives on in a pool. It can end the clients' TLS for a server
that has none; other TLS is passed on unread.

The wire is real, so time is, too: there is no clock to hand over.
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

__all__ = ["TcpFaultProxy"]

_CONNECTIONS_MAX = 256  # beyond it they wait in the backlog, of the same length
_SERVER_TIMEOUT_S = 10.0  # to connect, and to answer a duplicate
_STOP_TIMEOUT_S = 30.0
_TICK_S = 0.02  # how often a limited bandwidth lets something pass


class TcpFaultProxy:
    """Listens on 127.0.0.1 from its making until `close`, and hands every connection on, with the faults it is told.

    Each request is struck by at most one fault: the first planned one that is due, else, with ``probability``, one of
    ``random``. A planned fault is spent on the request that it was chosen for, even where the response turns out too
    short to be struck: `fired` holds what has really happened. Clients that send a request before they have the last
    one's response (pipelining) are passed on too, but what strikes which response is then undefined.

    One thread serves at most 256 connections. Where the server cannot be reached, the client's connection is reset.

    Args:
        target_host: Where the server is.
        target_port: Its port.
        plan: Faults to begin with; each strikes once.
        random: Faults to draw from, again and again; their ``after`` is not used.
        probability: That such a fault strikes, per request.
        seed: Decides whether and which random faults strike which request, counted in the order of arrival, and bytes
            and bits that are not given. Required with ``random``; shown by ``repr``.
        tls: With which clients are answered, who speak TLS then, as the server does not; ``None`` for none of its own.

    Attributes:
        port: Where it listens; the same for as long as it lives.
        latency_s: Seconds by which the first byte of each request and of each response is late; what follows comes on
            its heels. May be changed at any time, as the next two.
        bandwidth: Bytes per second, for each connection and direction; ``None`` for no limit.
        probability: As above; 0 ends the random faults.
        fired: The faults that struck: fault, the request's method and path, and where or with which outcome.

    Raises:
        InvalidInputError: ``random`` without a seed.
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
            raise InvalidInputError("random faults need a seed, to happen again")
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
        # Bound but deaf: it keeps the port ours while connections are refused, when a client's own end might get it.
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
        """Drop every connection and stop listening. Afterwards no thread and no descriptor is left."""
        if self._loop.is_closed():
            return
        self._run(self._hang_up())
        self._run(self._loop.shutdown_default_executor())  # has a thread where it looked the server's name up
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        self._loop.close()
        self._held.close()

    @property
    def refuse(self) -> bool:
        """Whether connections are refused. Setting it drops those that there are; unset, the port is the same."""
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
        """Forget the planned faults that have not struck yet. The random ones go on: see ``probability``."""
        self._armed.clear()

    @property
    def pending(self) -> int:
        """How many planned faults have not been chosen for a request yet."""
        return len(self._armed)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_TIMEOUT_S)

    async def _listen(self) -> None:
        self._listener = _bound(self.port)
        self._listener.listen(_CONNECTIONS_MAX)
        self._listener.setblocking(False)  # noqa: FBT003 - the name says it
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        # Not asyncio's own `sock_accept`: cancelled at the wrong moment, it loses what it has accepted.
        if self._listener is None:
            return
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has gone
        task = self._loop.create_task(_ProxiedConnection(self).serve(accepted))
        self._connections.add(task)
        task.add_done_callback(functools.partial(self._forget, accepted))
        if len(self._connections) >= _CONNECTIONS_MAX:
            self._loop.remove_reader(self._listener)

    def _forget(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        accepted.close()  # one that was cancelled before it began had nobody to do so
        self._connections.discard(task)
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    async def _hang_up(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        while self._connections:
            # More than once: before Python 3.12, `asyncio.wait_for` may lose the one that comes as its work is done.
            for task in self._connections:
                task.cancel()
            await asyncio.wait(self._connections, timeout=0.1)

    def _begin(self, method: str, path: str, request: _Message) -> _Exchange:
        """Choose what strikes this request. Every planned fault that might strike it has seen it pass."""
        about = (method, path, request.head_bytes, request.total_bytes)
        self._requests += 1
        # Its own generator: what it draws does not depend on what other connections draw meanwhile.
        random = Random(f"{self.seed}/{self._requests}")
        planned = self._armed.take(lambda fault: fault.matches(*about))
        if planned is None and random.random() < self.probability:
            possible = [fault for fault in self._random if fault.matches(*about)]
            planned = random.choice(possible) if possible else None
        return _Exchange(method, path, request, planned, random)


@dataclass(slots=True)
class _Message:
    """One request or response, as far as it has been passed on."""

    head_bytes: int = 0
    total_bytes: int | None = None
    passed_bytes: int = 0
    strike_at: int | None = None

    def find(self, planned: PlannedTcpFault, piece_bytes: int, random: Random) -> int | None:
        """Where in the piece that comes next the fault strikes; ``None`` if not in this one."""
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
    """A request, its response, and what strikes them."""

    method: str = ""
    path: str = ""
    request: _Message = field(default_factory=_Message)
    planned: PlannedTcpFault | None = None
    random: Random = field(default_factory=Random)
    copy: bytearray = field(default_factory=bytearray)  # of the request, where it is to be duplicated
    whole: bool = False  # the request has been passed on to its end

    def plans(self, fault: TcpFault) -> bool:
        return self.planned is not None and self.planned.fault is fault


class _ConnectionOverError(Exception):
    """The connection is over, by a fault or because the server closed it."""

    def __init__(self, fault: TcpFault | None = None) -> None:
        super().__init__(fault)
        self.fault = fault


class _ProxiedConnection:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: TcpFaultProxy) -> None:
        self._proxy = proxy
        self._exchange = _Exchange()

    async def serve(self, accepted: socket.socket) -> None:
        """Until it ends, by itself or by a fault. Closes what was accepted."""
        async with contextlib.AsyncExitStack() as open_ends:
            try:
                reader, self._to_client = await _connected(accepted, self._proxy._tls)
            except OSError:
                return  # a client that does not trust us, for one
            self._from_client = MessageReader(reader)
            open_ends.push_async_callback(_hang_up, self._to_client)
            try:
                self._from_server, self._to_server = await self._connect()
            except (OSError, asyncio.TimeoutError):
                _reset(self._to_client)
                return
            open_ends.push_async_callback(_hang_up, self._to_server)
            # `drain` waits until the kernel has it all, or TLS does, whose transport never wakes up at a limit of 0.
            self._to_server.transport.set_write_buffer_limits(0)
            self._to_client.transport.set_write_buffer_limits(0 if self._proxy._tls is None else 1, 0)
            pumps = [asyncio.ensure_future(self._pass_requests()), asyncio.ensure_future(self._pass_responses())]
            fault: TcpFault | None = None
            try:
                await asyncio.gather(*pumps)
            except _ConnectionOverError as ended:
                fault = ended.fault
            except OSError:
                fault = TcpFault.RESET  # what one side did is passed on to the other
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
        """Until the client has no more."""
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
            self._exchange.whole = True  # before the response can be here: nothing since the last byte has waited
        self._to_server.write_eof()

    async def _pass_responses(self) -> None:
        """Until the server has no more; a response is what comes from one request's beginning to the next one's."""
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
        """Pass on what is interim, and see what the head tells."""
        source = self._from_server
        if not exchange.method:
            return _Message()
        while INTERIM.match(head := await source.until(BLANK_LINE)):
            await asyncio.sleep(self._proxy.latency_s)
            await self._write(self._to_client, head)
        if exchange.plans(TcpFault.DUPLICATED) and exchange.whole:
            await self._duplicate(exchange)
        source.put_back(head)  # its body's beginning shares its piece
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
        """Pass on what comes next of a message, with what strikes it there."""
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
        """Have the server carry the request out a second time."""
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
    # With the protocol named, asyncio sets TCP_NODELAY on what is accepted; without, small answers take 40 ms.
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
    """A connection that somebody made to us, as `asyncio.open_connection` has those that we make."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=tls)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Have the end that is closed next seen as a reset, not as a regular end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _swallow(_: bytes) -> None:
    pass


async def _answer(source: MessageReader, method: str) -> str:
    """Read one response to its end; its status, or ``"none"``."""
    while INTERIM.match(head := await source.until(BLANK_LINE)):
        pass
    status = STATUS_LINE.match(head)
    if status is None:
        return "none"
    await source.take(response_body_bytes(method, head), _swallow)
    return status[1].decode()
