"""Fixtures of the tests of the training manager."""

import pytest
from support.dcp_stores import all_stores_are_closed, plans_are_forgotten  # noqa: F401

import tierfs

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def root(tmp_path):
    """The URL of a run in a new store."""
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store/run"
