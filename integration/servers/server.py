"""The type of a running server, and the one way to start and stop a server's process."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import fsspec
import pytest

REQUIREMENTS = "pip install -r integration/requirements.txt"
START_S = 60
PORTS = range(20_000, 32_000)  # Linux gives connections those from 32,768 on


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        protocol: Its name in fsspec: ``s3``, ``gcs``, ``abfs``, ``webdav`` or ``sftp``.
        port: A port of 127.0.0.1.
        options_at: Returns the filesystem's options for a port: the server's, or that of a proxy in front of it.
        base: Directory for buckets, with a ``/`` at its end; empty if buckets have no directory above them.
    """

    protocol: str
    port: int
    options_at: Callable[[int], dict[str, object]]
    base: str = ""

    @property
    def options(self) -> dict[str, object]:
        """Options for s3fs, gcsfs, adlfs or the like."""
        return self.options_at(self.port)

    def new_root(self) -> str:
        """Make a bucket or container, and return the path of a directory in it."""
        bucket = f"{self.base}bucket-{uuid.uuid4().hex[:12]}"
        fsspec.filesystem(self.protocol, **self.options).mkdir(bucket)
        return f"{bucket}/root"


def s3(port: int, key: str = "any", secret: str = "any") -> Server:
    def options(port: int) -> dict[str, object]:
        return {"key": key, "secret": secret, "endpoint_url": f"http://127.0.0.1:{port}"}

    return Server("s3", port, options)


def gcs(port: int) -> Server:
    def options(port: int) -> dict[str, object]:
        return {"token": "anon", "project": "test", "endpoint_url": f"http://127.0.0.1:{port}"}

    return Server("gcs", port, options)


def require_package(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed: {REQUIREMENTS}")


def require_program(name: str, install: str) -> None:
    if find_program(name) is None:
        pytest.skip(f"{name} is not installed: {install}", allow_module_level=True)


def find_program(name: str) -> str | None:
    """Return the program's path, beside this Python or in PATH."""
    return shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that are free. The kernel gives none of them to a connection of another process."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"127.0.0.1 has no {count} free ports in {PORTS}")


@contextlib.contextmanager
def process(command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a process that listens on ``port`` from the first line of the block to the last.

    Raises:
        RuntimeError: The process ended, or did not listen for `START_S` seconds. The error has the end of its output.
    """
    program = find_program(command[0])
    assert program is not None, f"{command[0]} is not installed"
    with tempfile.TemporaryFile() as said:
        server = subprocess.Popen(
            [program, *command[1:]],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            began = time.monotonic()
            while not _listens(port):
                ended = server.poll() is not None
                if ended or time.monotonic() - began > START_S:
                    said.seek(0)
                    what = "ended at once" if ended else "does not answer"
                    raise RuntimeError(f"{command[0]} {what}: {said.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.05)
            yield
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
