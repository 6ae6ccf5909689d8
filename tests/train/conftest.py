"""Fixtures of the tests of the training manager."""

import pytest
from support.dcp_stores import all_stores_are_closed, plans_are_forgotten  # noqa: F401

import tierfs

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def root(tmp_path):
    """The URL of a run in a new store."""
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store/run"


@pytest.fixture
def memory_root(tmp_path):
    """The URL of a run in memory: the flusher is a thread, which starts sooner than a process."""
    tierfs.init(f"memory://{tmp_path}/store")
    return f"tierfs::memory://{tmp_path}/store/run"


@pytest.fixture
def one_thread():
    """Small tensors: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
