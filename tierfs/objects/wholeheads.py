"""Answers whose head broke off are refused, where Python's HTTP client takes them for whole.

`http.client` takes the end of a connection for the end of a head: what was cut out of "Content-Length: 300" may be read as a length of
3, and a listing that never came as one of nothing. A head ends with an empty line (RFC 9112, section 2.1).
"""

from __future__ import annotations

import http.client
from typing import Any

__all__ = ["refuse_broken_heads"]

_ENDS = (b"\r\n", b"\n")


class _Lines:
    """A connection's lines, the last of which is remembered."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self.last = b""

    def readline(self, limit: int = -1) -> bytes:
        self.last = self._lines.readline(limit)
        return self.last


class _Response(http.client.HTTPResponse):
    def begin(self) -> None:
        whole: Any = self.fp
        lines: Any = _Lines(whole)
        self.fp = lines
        try:
            super().begin()
        finally:
            self.fp = whole
        if lines.last not in _ENDS:
            raise http.client.RemoteDisconnected("the answer broke off within its head")


def refuse_broken_heads(client: Any) -> None:
    """Have a botocore client take an answer whose head broke off for a lost connection.

    Args:
        client: One that has made no request yet.
    """
    pools: dict[str, Any] = client._endpoint.http_session._pool_classes_by_scheme
    for scheme, pool in pools.items():
        connection = type(pool.ConnectionCls.__name__, (pool.ConnectionCls,), {"response_class": _Response})
        pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})
