"""Fixtures for tests of `dcp`. They close every store, so that its background work does not count in another test."""

import uuid

import pytest

import tierfs
from support.opened import close_stores
from tierfs.session.open import open_store
from tierfs.session.url import parse_url


@pytest.fixture(autouse=True)
def all_stores_are_closed(stores_are_closed):
    yield
    close_stores()


@pytest.fixture(autouse=True)
def plans_are_forgotten():
    """Drop the plans that DCP caches on its planners' class, so that the next test does not see them."""
    yield
    planner = pytest.importorskip("torch.distributed.checkpoint.planner").SavePlanner
    for name in vars(planner):
        if name.startswith("_cached_"):
            getattr(planner, name).clear()


@pytest.fixture
def url():
    """The URL of a new store in memory."""
    url = f"memory://{uuid.uuid4().hex}"
    tierfs.init(url)
    return url


@pytest.fixture
def store(url):
    return open_store(parse_url(url))[0]


@pytest.fixture
def without_checksums():
    """Make ``torch.save`` omit the checksums."""
    serialization = pytest.importorskip("torch").serialization
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    yield
    serialization.set_crc32_options(before)
