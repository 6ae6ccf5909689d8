"""An S3 server on this machine, ministack, for tests; each bucket is new."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

CREDENTIALS = {"key": "any", "secret": "any"}


def require() -> None:
    """Skip the test, or its module, where there is no server to be had."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -r integration/requirements.txt")
    if shutil.which("ministack", path=os.path.dirname(sys.executable)) is None:
        pytest.skip("ministack is not installed: pip install -r integration/requirements.txt", allow_module_level=True)


@contextlib.contextmanager
def running() -> Iterator[int]:
    """A server; gives its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "PERSIST_STATE": "0"}
    program = os.path.join(os.path.dirname(sys.executable), "ministack")
    server = subprocess.Popen([program], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        began = time.monotonic()
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None, "the server ended at once"
            assert time.monotonic() - began < 60, "the server does not answer"
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def options(port: int) -> dict[str, object]:
    """For s3fs."""
    return {**CREDENTIALS, "endpoint_url": f"http://127.0.0.1:{port}"}


def new_bucket(port: int) -> str:
    """Make a bucket, and give its name."""
    import fsspec

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", **options(port)).mkdir(name)
    return name
