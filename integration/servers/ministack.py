"""S3 by ministack: fast, and strict with checksums; the one that most tests use."""

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
    """A server, with this in its environment besides."""
    [port] = free_ports(1)
    # It listens on every address unless told otherwise.
    with process(
        [sys.executable, str(_PROGRAM)],
        port,
        {**(environment or {}), "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "PERSIST_STATE": "0"},
    ):
        yield s3(port)
