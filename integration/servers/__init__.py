"""Servers on this machine that stand in for the clouds; docs/how-to/test-servers.md says what each does not check.

Each module has `require`, which skips where its server cannot be had, and `running`, a context manager that starts
one, empty and on a free port of 127.0.0.1, and gives a `servers.server.Server`.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servers.server import Server

# Else gcsfs asks each endpoint over gRPC for the kind of its buckets, and waits a minute for an answer. It reads this
# when it is imported.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


@contextlib.contextmanager
def running(name: str) -> Iterator["Server"]:
    """One by the name of its module. Skips where it cannot be had."""
    module = importlib.import_module(f"servers.{name}")
    module.require()
    with module.running() as server:
        yield server
