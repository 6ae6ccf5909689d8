"""Servers on this machine that stand in for the clouds. docs/how-to/test-servers.md lists what each does not check.

Each module has two functions. `require` skips if the server is unavailable. `running` is a context manager that
starts an empty server on a free port of 127.0.0.1 and yields a `servers.server.Server`.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servers.server import Server

# Without this, gcsfs asks each endpoint over gRPC for the kind of its buckets, and waits a minute for an answer. It
# reads the variable at import.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


@contextlib.contextmanager
def running(name: str) -> Iterator["Server"]:
    """Run the server of the module with this name. Skip if the server is unavailable."""
    module = importlib.import_module(f"servers.{name}")
    module.require()
    with module.running() as server:
        yield server
