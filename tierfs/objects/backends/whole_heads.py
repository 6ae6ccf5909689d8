"""Answers whose head broke off are refused, where Python's HTTP client takes them for whole.

`http.client` takes the end of a connection for the end of a line and of a head: what was cut out of "Content-Length: 300" may be
read as a length of 3, and a listing that never came as one of nothing. botocore, which reads the answer to "Expect:
100-continue" itself, even waits without end for the rest of it. Heads and the sizes of chunks are lines, each of which
has an end (RFC 9112, sections 2.1 and 7.1), and these are all that is ever read by lines.
"""

from __future__ import annotations

import http.client
from typing import Any

__all__ = ["refuse_broken_heads"]


class _Lines:
    """What a connection's answers are read from."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self._file.readline(limit)
        if not line.endswith(b"\n") and len(line) != limit:
            raise http.client.RemoteDisconnected("the answer broke off within its head, or in between two chunks")
        return line


class _Socket:
    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def makefile(self, *arguments: Any, **options: Any) -> _Lines:
        return _Lines(self._socket.makefile(*arguments, **options))


class _Connection:
    """Before a connection class of urllib3."""

    sock: Any

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.sock = _Socket(self.sock)


def refuse_broken_heads(client: Any) -> None:
    """Have a botocore client take an answer whose head broke off for a lost connection.

    Args:
        client: One that has made no request yet.
    """
    pools: dict[str, Any] = client._endpoint.http_session._pool_classes_by_scheme
    for scheme, pool in pools.items():
        connection = type(pool.ConnectionCls.__name__, (_Connection, pool.ConnectionCls), {})
        pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})
