"""WebDAV by wsgidav on a directory of its own: a filesystem without a tierfs backend."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

from servers.server import REQUIREMENTS, Server, free_ports, process, require_package, require_program


def require() -> None:
    require_package("webdav4")
    require_package("cheroot")
    require_program("wsgidav", REQUIREMENTS)


@contextlib.contextmanager
def running() -> Iterator[Server]:
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="webdav-") as directory:
        command = ["wsgidav", "--host=127.0.0.1", f"--port={port}", f"--root={directory}", "--auth=anonymous"]
        with process([*command, "--server=cheroot", "--no-config", "--quiet"], port):
            yield Server("webdav", port, _options)


def _options(port: int) -> dict[str, object]:
    return {"base_url": f"http://127.0.0.1:{port}"}
