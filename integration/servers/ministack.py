"""S3 by ministack: fast, and strict about checksums. Most tests use it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from servers.server import Server, free_ports, process, require_package, s3

_PROGRAM = Path(__file__).with_name("ministack_program.py")


def require() -> None:
    for package in ("s3fs", "ministack", "awscrt", "google_crc32c"):
        require_package(package)


@contextlib.contextmanager
def running(environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run a server with these additional environment variables."""
    [port] = free_ports(1)
    # By default it listens on every address.
    with process(
        [sys.executable, str(_PROGRAM)],
        port,
        {**(environment or {}), "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "PERSIST_STATE": "0"},
    ):
        yield s3(port)
