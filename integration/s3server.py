"""An S3 server by its port, for tests with a proxy before it; `servers.ministack` is the server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from servers import ministack
from servers.server import s3

require = ministack.require


@contextlib.contextmanager
def running(environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """A server, with this in its environment besides; gives its port."""
    with ministack.running(environment) as server:
        yield server.port


def options(port: int) -> dict[str, object]:
    """For s3fs."""
    return s3(port).options


def new_bucket(port: int) -> str:
    """Make a bucket, and give its name."""
    return s3(port).new_root().partition("/")[0]
