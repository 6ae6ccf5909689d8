"""An S3 server by its port, for tests with a proxy in front of it. The server is `servers.ministack`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from servers import ministack
from servers.server import s3

require = ministack.require


@contextlib.contextmanager
def running(environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run a server with these additional environment variables, and yield its port."""
    with ministack.running(environment) as server:
        yield server.port


def options(port: int) -> dict[str, object]:
    return s3(port).options


def new_bucket(port: int) -> str:
    return s3(port).new_root().partition("/")[0]
