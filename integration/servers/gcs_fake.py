"""GCS by our own fake, `servers.gcs_fake_program`. It enforces preconditions, which no available emulator does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from servers.server import Server, free_ports, gcs, process, require_package


def require() -> None:
    require_package("gcsfs")
    require_package("google_crc32c")


@contextlib.contextmanager
def running() -> Iterator[Server]:
    [port] = free_ports(1)
    with process([sys.executable, str(Path(__file__).with_name("gcs_fake_program.py")), str(port)], port):
        yield gcs(port)
