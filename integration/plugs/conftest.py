"""Fixtures of the tests of plugs."""

import pytest

import tierfs


@pytest.fixture
def url(tmp_path):
    """The URL of a run in a new store."""
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store/run"
