"""No store is left open: what it goes on with in the background would be counted as what another test left behind."""

import importlib
import uuid

import fsspec
import pytest

import tierfs
from support import forked_flusher
from tierfs.session import tiers as localtiers
from tierfs.session.open import open_store
from tierfs.session.url import parse_url

opened = importlib.import_module("tierfs.session.open")


@pytest.fixture(autouse=True)
def all_stores_are_closed(stores_are_closed):
    yield
    close_all_stores()


def close_all_stores():
    while opened._stores:
        _, store = opened._stores.popitem()
        if store.tiers is not None:
            store.tiers.close()


@pytest.fixture(autouse=True)
def flushers_are_forked(monkeypatch):
    """They are processes as ever. Those that other processes start are begun as ever, too."""
    monkeypatch.setattr(localtiers, "spawn", forked_flusher.spawn)


@pytest.fixture(autouse=True)
def plans_are_forgotten():
    """DCP keeps plans on its planners' class, for whoever saves next in this process."""
    yield
    planner = pytest.importorskip("torch.distributed.checkpoint.planner").SavePlanner
    for name in vars(planner):
        if name.startswith("_cached_"):
            getattr(planner, name).clear()


@pytest.fixture
def url():
    """Of a store in memory."""
    url = f"memory://{uuid.uuid4().hex}"
    tierfs.init(url)
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


@pytest.fixture
def store(url):
    return open_store(parse_url(url))[0]


@pytest.fixture
def without_checksums():
    """Has ``torch.save`` leave the checksums out."""
    serialization = pytest.importorskip("torch").serialization
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    yield
    serialization.set_crc32_options(before)
