"""A proxy in front of an S3 server that refuses connections, hangs, answers 503, or loses answers on request."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect"}


class FaultProxy:
    """One proxy, between `start` and `stop`.

    Attributes:
        port: The port it listens on; the same in every mode.
        mode: ``"pass"`` forwards all requests. ``"hang"`` reads requests and never answers. ``"unavailable"`` answers
            503. ``"no-puts"`` does so for requests that store something, and ``"no-chunks"`` for those that store a
            chunk. ``"lose"`` forwards the requests that ``loses`` selects, and drops the connection instead of an
            answer.
        loses: Selects requests by method and path.
        asked: Requests by method and path, whatever their outcome.
        lost: Number of lost answers.
        stored: How often each path was stored.
        fetched: How often content of each path was fetched, in whole or in part.
        fetched_bytes: Bytes of all fetches.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.port = 0
        self.mode = "pass"
        self.loses: Callable[[str, str], bool] = lambda _method, _path: False
        self.asked: Counter[tuple[str, str]] = Counter()
        self.lost = 0
        self.stored: Counter[str] = Counter()
        self.fetched: Counter[str] = Counter()
        self.fetched_bytes = 0
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def start(self) -> None:
        """Listen on a free port, or on the same port as before."""
        self._server = _Server(("127.0.0.1", self.port), self)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fault-proxy", daemon=True).start()

    def stop(self) -> None:
        """Refuse new connections and drop existing ones."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.hang_up()
            self._server = None

    def set(self, mode: str) -> None:
        """Change the mode; ``"refuse"`` is `stop`."""
        if mode == "refuse":
            self.stop()
            return
        self.mode = mode
        if self._server is None:
            self.start()

    def note(self, method: str, path: str, status: int, length: int) -> None:
        """Count a request that the server carried out."""
        with self._lock:
            if method == "PUT" and status < 300:
                self.stored[path] += 1
            if method == "GET" and status < 300:
                self.fetched[path.partition("?")[0]] += 1
                self.fetched_bytes += length

    def refuses(self, method: str, path: str) -> bool:
        puts = {"no-puts": "", "no-chunks": "/.tierfs/chunks/"}.get(self.mode)
        return self.mode == "unavailable" or (puts is not None and method == "PUT" and puts in path)

    def loses_answer(self, method: str, path: str) -> bool:
        """Return whether to lose the answer to this request, and count it."""
        with self._lock:
            loses = self.mode == "lose" and self.loses(method, path)
            self.lost += loses
            return loses


@contextlib.contextmanager
def proxy_to(server_port: int) -> Iterator[FaultProxy]:
    """Run a proxy to a server on this machine."""
    proxy = FaultProxy(server_port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.mode = "pass"
        proxy.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def hang_up(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client closed its connection


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while length := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(length))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(pieces)

    def _serve(self) -> None:
        proxy = self.server.proxy
        proxy.asked[self.command, self.path] += 1
        body = self._body()
        if proxy.mode == "hang":
            while proxy.mode == "hang" and self.connection.fileno() >= 0:
                time.sleep(0.05)
            self.close_connection = True
            return
        if proxy.refuses(self.command, self.path):
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        server = http.client.HTTPConnection("127.0.0.1", proxy.server_port, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            headers["Content-Length"] = str(len(body))
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            content = answer.read()
        finally:
            server.close()
        proxy.note(self.command, self.path, answer.status, len(content))
        if proxy.loses_answer(self.command, self.path):
            self.close_connection = True
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP | {"content-length"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 - as http.server calls them
