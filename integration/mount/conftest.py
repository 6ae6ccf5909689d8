"""Stores to mount: one in a directory of this host, one in S3 with a ram and an nvme tier in front of it."""

import tempfile

import pytest
from mounts import Host
from servers import ministack

from tierfs.session import init


@pytest.fixture
def tmpfs():
    """Return a directory on tmpfs, so that no test waits for a disk."""
    with tempfile.TemporaryDirectory(prefix="tierfs-store-", dir="/dev/shm") as directory:
        yield directory


@pytest.fixture
def hosts(tmp_path, tmpfs):
    """Return a function that makes hosts. Each is unmounted at the end, before `tmpfs` is removed."""
    made = []

    def make(url, **options):
        made.append(Host(tmp_path / f"host{len(made)}", url, **options))
        return made[-1]

    yield make
    for host in made:
        host.end()


@pytest.fixture
def local(tmpfs):
    """Return the URL of a store in `tmpfs`."""
    url = f"file://{tmpfs}/store"
    init(url)
    return url


@pytest.fixture(scope="session")
def s3():
    ministack.require()
    with ministack.running() as server:
        yield server


@pytest.fixture
def bucket(s3):
    url = f"s3://{s3.new_root()}"
    init(url, options=s3.options)
    return url, s3.options


@pytest.fixture
def mounted(hosts, local):
    return hosts(local).start()


@pytest.fixture
def mounted_s3(hosts, bucket):
    """Return the path of a mounted store in S3, with local tiers."""
    url, options = bucket
    return hosts(f"tierfs::{url}", options=options, ack="staged").start()
