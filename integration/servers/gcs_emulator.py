"""GCS by gcp-storage-emulator. It checks the hashes of objects, and ignores every precondition."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from servers.server import Server, free_ports, gcs, process, require_package

# It answers one request at a time and queues five. Further requests would wait for minutes.
PROGRAM = """
import socketserver
socketserver.TCPServer.request_queue_size = 128
from gcp_storage_emulator.__main__ import main
main()
"""


def require() -> None:
    require_package("gcsfs")
    require_package("gcp_storage_emulator")


@contextlib.contextmanager
def running() -> Iterator[Server]:
    [port] = free_ports(1)
    arguments = ["start", "--host", "127.0.0.1", "--port", str(port), "--in-memory", "--quiet"]
    with process([sys.executable, "-c", PROGRAM, *arguments], port):
        yield gcs(port)
