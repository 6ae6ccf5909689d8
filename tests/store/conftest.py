"""Fixtures for hosts with local tiers."""

import os
import sys

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.tiered import MIB, Gate, Host

from tierfs.digest import DigestKind
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.store.create import create_store


@pytest.fixture
def root():
    """A path in fsspec's memory filesystem, emptied after each test: the files that these tests save take gigabytes."""
    root = f"/tiered-{os.urandom(8).hex()}"
    yield root
    for path in [path for path in list(MemoryFileSystem.store) if path.startswith(f"{root}/")]:
        del MemoryFileSystem.store[path]


@pytest.fixture
def objects(root):
    return MemoryObjects(root)


@pytest.fixture
def descriptor(objects):
    return create_store(objects, "memory://store", digest=DigestKind.XXH3_128, random_bytes=os.urandom(16))[0]


@pytest.fixture
def make_host(tmp_path, root, descriptor):
    hosts = []

    def make(name="here", **options):
        host = Host(tmp_path, Gate(root), descriptor, name, **options)
        hosts.append(host)
        return host

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierfs.flusher.state.RETRY_S_MAX", 0.1)  # the object tier is often down for a moment
        yield make
        for host in hosts:
            host.objects.down = False
            host.close()


@pytest.fixture
def indirect(monkeypatch):
    """Every table of chunks is stored in chunks of its own."""
    monkeypatch.setattr(sys.modules["tierfs.store.write.staging"], "DIRECT_ROW_BYTES_MAX", 0)


@pytest.fixture
def host(make_host):
    return make_host()


@pytest.fixture(params=["both", "ram", "nvme"])
def any_host(make_host, request):
    return make_host(ram=0 if request.param == "nvme" else 128 * MIB, nvme=0 if request.param == "ram" else 128 * MIB)
