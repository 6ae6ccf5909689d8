"""S3 by moto, another implementation of the protocol. It accepts content with a wrong checksum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from servers.server import REQUIREMENTS, Server, free_ports, process, require_package, require_program, s3


def require() -> None:
    require_package("s3fs")
    require_program("moto_server", REQUIREMENTS)


@contextlib.contextmanager
def running() -> Iterator[Server]:
    [port] = free_ports(1)
    with process(["moto_server", "-H", "127.0.0.1", "-p", str(port)], port):
        yield s3(port)
