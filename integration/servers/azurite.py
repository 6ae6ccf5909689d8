"""Azure by azurite, a node program. Running this module installs it, neither by pip nor into the repository."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.server import Server, free_ports, process, require_package, require_program

VERSION = "3.35.0"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierfs-test-servers"
_HOME = _CACHE / f"azurite-{VERSION}"
_PROGRAM = _HOME / "node_modules/azurite/dist/src/blob/main.js"

# The account and key that every azurite has. Microsoft documents them.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def install() -> None:
    """Install azurite in this user's cache if it is missing. Needs npm, the network, 15 s and 190 MB.

    Raises:
        subprocess.CalledProcessError: npm failed.
    """
    if _PROGRAM.exists():
        return
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as directory:
        command = ["npm", "install", "--prefix", f"{directory}/new", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run([*command, f"azurite@{VERSION}"], check=True)
        try:
            os.rename(f"{directory}/new", _HOME)
        except OSError:
            if not _PROGRAM.exists():  # unless another process was faster
                raise


def require() -> None:
    require_package("adlfs")
    require_program("node", "Debian has it as nodejs and npm")
    if not _PROGRAM.exists():
        reason = "azurite is not installed: PYTHONPATH=integration python -m servers.azurite"
        pytest.skip(reason, allow_module_level=True)


@contextlib.contextmanager
def running() -> Iterator[Server]:
    [port] = free_ports(1)
    command = ["node", str(_PROGRAM), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    # Azurite refuses protocol versions newer than its own, and clients use newer ones.
    with process([*command, "--skipApiVersionCheck", "--silent", "--disableTelemetry"], port):
        yield Server("abfs", port, _options)


def _options(port: int) -> dict[str, object]:
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    account = f"AccountName={_ACCOUNT};AccountKey={_KEY}"
    return {"connection_string": f"DefaultEndpointsProtocol=http;{account};BlobEndpoint={endpoint};"}


if __name__ == "__main__":
    install()
