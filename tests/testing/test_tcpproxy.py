"""The proxy damages connections as planned, and otherwise passes every byte."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.opened import descriptors
from support.waiting import HANG_S, until

from tierfs.errors import InvalidInputError
from tierfs.testing import PlannedTcpFault, TcpFault, TcpFaultProxy

BODY = bytes(range(256)) * 40


class _Handler(BaseHTTPRequestHandler):
    """Stores PUT bodies, counts the requests it carries out, and supports PUT with If-None-Match."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_):
        pass

    def _body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while length := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(length))
            assert self.rfile.readline() == b"\r\n"
        while self.rfile.readline().strip():
            pass
        return b"".join(pieces)

    def _answer(self, status, content=b""):
        self.send_response(status)
        if self.path.endswith("?chunked"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content))
        else:
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else content)

    def do_PUT(self):
        content = self._body()
        self.server.carried_out.append((self.command, self.path))
        if self.headers.get("If-None-Match") and self.path in self.server.stored:
            self._answer(412, b"there is one")
        else:
            self.server.stored[self.path] = content
            self._answer(200)

    def do_GET(self):
        self._body()
        self.server.carried_out.append((self.command, self.path))
        content = self.server.stored.get(self.path.partition("?")[0])
        self._answer(404 if content is None else 200, content or b"")

    do_HEAD = do_GET


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stored: dict[str, bytes] = {}
        self.carried_out: list[tuple[str, str]] = []
        self.accepted = 0

    def get_request(self):
        self.accepted += 1
        return super().get_request()

    def handle_error(self, *_):
        pass  # the proxy breaks connections on purpose


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def proxy(server: _Server) -> Iterator[TcpFaultProxy]:
    with TcpFaultProxy("127.0.0.1", server.server_port, seed=3) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: TcpFaultProxy) -> Iterator[http.client.HTTPConnection]:
    with _client_of(proxy) as client:
        yield client


@contextlib.contextmanager
def _client_of(proxy: TcpFaultProxy, timeout_s: float = HANG_S) -> Iterator[http.client.HTTPConnection]:
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout_s)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def _raw_server(*answers: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Answer the first bytes of each connection with the next of these answers, then close it."""
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            for answer in itertools.cycle(answers):
                connection, _ = listener.accept()
                with connection:
                    received.append(connection.recv(65536))
                    connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1], received
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def _ask(client: http.client.HTTPConnection, method: str, path: str, body: object = None, **headers: str):
    client.request(method, path, body, headers)
    answer = client.getresponse()
    return answer.status, answer.read()


def _raw(proxy: TcpFaultProxy, request: bytes) -> tuple[bytes, bool]:
    """Return the bytes that arrive until the connection ends, and whether a reset ended it."""
    received = b""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=HANG_S) as connection:
        connection.sendall(request)
        try:
            while piece := connection.recv(65536):
                received += piece
        except ConnectionResetError:
            return received, True
    return received, False


def _differing_bits(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def test_without_faults_every_byte_passes_over_one_connection(server, proxy, client):
    large = os.urandom(3 << 20)
    assert _ask(client, "PUT", "/large", large) == (200, b"")
    assert server.stored["/large"] == large
    assert _ask(client, "GET", "/large") == (200, large)
    assert _ask(client, "GET", "/large?chunked") == (200, large)
    assert _ask(client, "HEAD", "/large") == (200, b"")
    assert _ask(client, "GET", "/none") == (404, b"")
    assert server.accepted == 1
    assert proxy.fired == []


def test_a_chunked_request_passes_and_the_next_is_seen(server, proxy, client):
    pieces = [os.urandom(100_000), b"x", os.urandom(7)]
    assert _ask(client, "PUT", "/chunked", iter(pieces)) == (200, b"")
    assert server.stored["/chunked"] == b"".join(pieces)
    proxy.inject(TcpFault.RESET, at=0, aim=lambda method, path: (method, path) == ("GET", "/chunked"))
    with pytest.raises(ConnectionResetError):
        _ask(client, "GET", "/chunked")


def test_a_body_is_asked_for_before_it_is_sent(server, proxy):
    head = b"PUT /a HTTP/1.1\r\nContent-Length: 10240\r\nExpect: 100-continue\r\n\r\n"
    proxy.inject(TcpFault.BIT_FLIP, at=9)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=HANG_S) as connection:
        connection.sendall(head)
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert proxy.fired == []  # 100 Continue is not the response yet
        connection.sendall(BODY)
        received = connection.recv(65536)
    assert server.stored["/a"] == BODY
    assert proxy.fired[0][3].startswith("response byte 9, ")
    assert _differing_bits(received[:12], b"HTTP/1.1 200") == 1


def test_a_lost_response_is_a_reset_before_its_first_byte(server, proxy, client):
    proxy.inject(TcpFault.RESET, at=0)
    with pytest.raises(ConnectionResetError):
        _ask(client, "PUT", "/a", BODY)
    assert server.stored["/a"] == BODY
    assert proxy.fired == [(TcpFault.RESET, "PUT", "/a", "response byte 0")]


def test_a_request_is_reset_before_the_server_has_it_all(server, proxy, client):
    proxy.inject(TcpFault.RESET, side="request", at=5000, body_only=True)
    with pytest.raises(ConnectionError):
        _ask(client, "PUT", "/a", BODY)
    client.close()
    assert _ask(client, "GET", "/a") == (404, b"")
    assert server.carried_out == [("GET", "/a")]
    assert len(proxy.fired) == 1


def test_a_truncated_response_ends_like_a_regular_one(server, proxy, client):
    server.stored["/a"] = BODY
    proxy.inject(TcpFault.TRUNCATED, at=1000, body_only=True)
    received, reset = _raw(proxy, b"GET /a HTTP/1.1\r\n\r\n")
    assert not reset
    assert received.partition(b"\r\n\r\n")[2] == BODY[:1000]
    proxy.inject(TcpFault.TRUNCATED, at=len(BODY) - 1, body_only=True)
    with pytest.raises(http.client.IncompleteRead) as caught:
        _ask(client, "GET", "/a")
    assert caught.value.partial == BODY[:-1]


def test_a_black_hole_passes_nothing_to_the_server(server, proxy):
    proxy.inject(TcpFault.BLACK_HOLE, side="request", at=0)
    with _client_of(proxy, timeout_s=0.2) as client, pytest.raises(TimeoutError):
        _ask(client, "PUT", "/a", BODY)
    with _client_of(proxy) as client:
        assert _ask(client, "PUT", "/b", BODY) == (200, b"")
    assert server.carried_out == [("PUT", "/b")]


def test_a_black_hole_opens_part_of_the_way_and_takes_everything_after(server, proxy):
    server.stored["/a"] = BODY
    before = descriptors()
    proxy.inject(TcpFault.BLACK_HOLE, at=1000, body_only=True)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=HANG_S) as connection:
        connection.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        received = b""
        while len(received.partition(b"\r\n\r\n")[2]) < 1000:
            received += connection.recv(65536)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert received.partition(b"\r\n\r\n")[2] == BODY[:1000]
        connection.sendall(b"GET /b HTTP/1.1\r\n\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert server.carried_out == [("GET", "/a")]
    until(lambda: descriptors() <= before)


def test_one_bit_of_a_response_body_flips(server, proxy, client):
    server.stored["/a"] = BODY
    for path in ("/a", "/a?chunked"):
        proxy.inject(TcpFault.BIT_FLIP, at=77, body_only=True)
        status, content = _ask(client, "GET", path)
        assert status == 200
        assert _differing_bits(content, BODY) == 1
    assert [fired[0] for fired in proxy.fired] == [TcpFault.BIT_FLIP] * 2
    assert _ask(client, "GET", "/a") == (200, BODY)


def test_a_flip_that_keeps_off_heads_never_strikes_one(server, proxy, client):
    server.stored["/a"] = b"x" * 20
    for _ in range(50):
        proxy.inject(TcpFault.BIT_FLIP, body_only=True)
        status, content = _ask(client, "GET", "/a")
        assert status == 200
        assert _differing_bits(content, b"x" * 20) == 1
    offsets = [fired[3].split(",")[0] for fired in proxy.fired]
    assert len(set(offsets)) > 10


def test_one_bit_of_a_request_body_flips(server, proxy, client):
    proxy.inject(TcpFault.BIT_FLIP, side="request", body_only=True)
    assert _ask(client, "GET", "/none") == (404, b"")  # has no body to damage
    assert _ask(client, "PUT", "/a", BODY) == (200, b"")
    assert _differing_bits(server.stored["/a"], BODY) == 1
    assert [fired[:3] for fired in proxy.fired] == [(TcpFault.BIT_FLIP, "PUT", "/a")]
    assert _ask(client, "PUT", "/a", BODY) == (200, b"")
    assert server.stored["/a"] == BODY


@pytest.mark.parametrize("body", [b"", BODY, bytes(8 << 20)], ids=len)
def test_an_unavailable_server_gets_nothing_until_it_recovers(server, proxy, client, body):
    puts = PlannedTcpFault(TcpFault.UNAVAILABLE, side="request", aim=lambda method, _: method == "PUT")
    proxy.fail(puts)
    for _ in range(3):
        assert _ask(client, "PUT", "/a", body) == (503, b"")
        assert _ask(client, "GET", "/a") == (404, b"")
    assert server.carried_out == [("GET", "/a")] * 3
    assert proxy.fired == [(TcpFault.UNAVAILABLE, "PUT", "/a", "answered 503")] * 3
    proxy.recover()
    client.close()
    assert _ask(client, "PUT", "/a", body) == (200, b"")


def test_recovery_drops_the_connections_that_a_fault_keeps_open(server, proxy):
    proxy.fail(PlannedTcpFault(TcpFault.BLACK_HOLE, side="request", at=0))
    with _client_of(proxy) as client:
        client.request("GET", "/a")
        until(lambda: proxy.fired)
        proxy.recover()
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            client.getresponse()
        client.close()
        assert _ask(client, "GET", "/a") == (404, b"")


def test_requests_and_bytes_of_responses_are_counted(server, proxy, client):
    server.stored["/a"] = BODY
    for _ in range(2):
        _ask(client, "GET", "/a")
    _ask(client, "HEAD", "/a")
    assert proxy.requests == {("GET", "/a"): 2, ("HEAD", "/a"): 1}
    assert 2 * len(BODY) < proxy.response_bytes["GET", "/a"] < 2 * len(BODY) + 1000
    assert proxy.response_bytes["HEAD", "/a"] < 1000


def test_faults_strike_requests_of_a_connection_that_is_kept(server, proxy, client):
    server.stored["/a"] = BODY
    proxy.inject(TcpFault.BIT_FLIP, body_only=True, after=2)
    whole = [_ask(client, "GET", "/a")[1] == BODY for _ in range(5)]
    assert whole == [True, True, False, True, True]
    assert server.accepted == 1
    assert proxy.pending == 0


def test_a_fault_beyond_the_end_does_not_claim_to_have_struck(server, proxy, client):
    server.stored["/a"] = BODY
    proxy.inject(TcpFault.RESET, at=len(BODY), body_only=True)
    assert _ask(client, "GET", "/a") == (200, BODY)
    assert _ask(client, "GET", "/a") == (200, BODY)
    assert proxy.fired == []
    assert proxy.pending == 0


def test_latency_is_paid_once_in_each_direction(server, proxy, client):
    server.stored["/a"] = bytes(4 << 20)  # 64 pieces
    _ask(client, "GET", "/a")
    proxy.latency_s = 0.2
    begun_s = time.monotonic()
    assert _ask(client, "GET", "/a") == (200, server.stored["/a"])
    assert 0.4 <= time.monotonic() - begun_s < 12  # a delay for each of the 64 pieces would make it 12.8


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_bandwidth_bounds_each_direction(server, proxy, client, method):
    server.stored["/a"] = bytes(40_000)
    proxy.bandwidth = 100_000
    begun_s = time.monotonic()
    assert _ask(client, method, "/a", None if method == "GET" else bytes(40_000))[0] == 200
    assert time.monotonic() - begun_s >= 0.4


def test_while_it_refuses_nobody_gets_through_and_then_the_port_is_the_same(server, proxy, client):
    port = proxy.port
    assert _ask(client, "PUT", "/a", BODY) == (200, b"")
    proxy.refuse = True
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        _ask(client, "GET", "/a")
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
    proxy.refuse = True
    proxy.refuse = False
    assert proxy.port == port
    client.close()
    assert _ask(client, "GET", "/a") == (200, BODY)


def test_a_server_that_is_not_there_is_a_reset():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with TcpFaultProxy("127.0.0.1", port) as proxy:
        with _client_of(proxy) as client, pytest.raises(ConnectionResetError):
            _ask(client, "GET", "/a")


def test_other_protocols_pass_as_one_request():
    hello = b"\x16\x03\x01" + bytes(range(250))
    with _raw_server(b"\x16\x03\x03answer") as (port, received), TcpFaultProxy("127.0.0.1", port, seed=1) as proxy:
        assert _raw(proxy, hello) == (b"\x16\x03\x03answer", False)
        assert received == [hello]
        proxy.inject(TcpFault.BIT_FLIP)
        answer, _ = _raw(proxy, hello)
        assert _differing_bits(answer, b"\x16\x03\x03answer") == 1
        assert [fired[:3] for fired in proxy.fired] == [(TcpFault.BIT_FLIP, "", "")]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"PUT /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\nabc",
        b"PUT /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5",
        b"PUT /a HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc",
        b"PUT /a HT",
    ],
)
def test_malformed_requests_pass_unchanged(request_bytes):
    received = b""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, TcpFaultProxy("127.0.0.1", listener.getsockname()[1]) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=HANG_S) as connection:
            server_end, _ = listener.accept()
            sending = threading.Thread(
                target=lambda: (connection.sendall(request_bytes), connection.shutdown(socket.SHUT_WR))
            )
            sending.start()
            with server_end:
                server_end.settimeout(HANG_S)
                while piece := server_end.recv(65536):
                    received += piece
                server_end.sendall(b"what?")
            sending.join()
            assert connection.recv(100) == b"what?"
            assert connection.recv(100) == b""
    assert received == request_bytes


RANDOM = [
    PlannedTcpFault(TcpFault.RESET),
    PlannedTcpFault(TcpFault.TRUNCATED, body_only=True),
    PlannedTcpFault(TcpFault.BIT_FLIP, side="request", body_only=True),
    PlannedTcpFault(TcpFault.UNAVAILABLE, side="request", aim=lambda method, _: method == "PUT"),
]


def test_the_same_seed_injures_the_same_requests_in_the_same_way(server):
    def run(seed: int) -> list[tuple[TcpFault, str, str, str]]:
        with TcpFaultProxy("127.0.0.1", server.server_port, random=RANDOM, probability=0.5, seed=seed) as proxy:
            for number in range(40):
                with _client_of(proxy) as client, contextlib.suppress(OSError, http.client.HTTPException):
                    _ask(client, *(("PUT", "/a", BODY) if number % 2 else ("GET", "/a")))
            assert f"seed={seed}, probability=0.5" in repr(proxy)
            return proxy.fired

    server.stored["/a"] = BODY
    first = run(5)
    assert {fault for fault, *_ in first} == {planned.fault for planned in RANDOM}
    assert run(5) == first
    assert run(6) != first


def test_random_faults_need_a_seed():
    with pytest.raises(InvalidInputError):
        TcpFaultProxy("127.0.0.1", 1, random=RANDOM, probability=0.5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"fault": TcpFault.TRUNCATED, "side": "request"},
        {"fault": TcpFault.UNAVAILABLE},
        {"fault": TcpFault.RESET, "at": -1},
    ],
)
def test_a_fault_that_could_never_strike_is_refused(arguments):
    with pytest.raises(InvalidInputError):
        PlannedTcpFault(**arguments)


def test_closing_leaves_no_thread_and_no_descriptor(server):
    server.stored["/a"] = bytes(20 << 20)

    with contextlib.ExitStack() as open_ends:
        threads = set(threading.enumerate())
        before = descriptors()
        proxy = TcpFaultProxy("localhost", server.server_port)  # a name that must be resolved
        with _client_of(proxy) as client:
            _ask(client, "GET", "/none")
        proxy.inject(TcpFault.BLACK_HOLE, side="request", at=0)
        for _ in range(3):  # one meets the black hole, two do not read their answers
            connection = open_ends.enter_context(socket.create_connection(("127.0.0.1", proxy.port), timeout=HANG_S))
            connection.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        open_ends.enter_context(socket.create_connection(("127.0.0.1", proxy.port), timeout=HANG_S))  # it sends nothing
        until(lambda: len(proxy.fired) == 1 and len(server.carried_out) == 3)
        proxy.refuse = True
        proxy.refuse = False
        proxy.close()
        proxy.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=HANG_S)
        new = [thread.name for thread in set(threading.enumerate()) - threads]
        assert not [name for name in new if "tcp-fault-proxy" in name or "asyncio" in name]
        open_ends.close()
        # The server runs in this process too, and notices the end of its connections a little later.
        until(lambda: descriptors() <= before and set(threading.enumerate()) <= threads)
