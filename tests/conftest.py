"""No test touches what this host keeps for its user."""

import os
import tempfile

import pytest


@pytest.fixture(autouse=True, scope="session")
def state_of_its_own():
    """Processes that tests start inherit it too."""
    with tempfile.TemporaryDirectory(prefix="tierfs-state-") as directory:
        os.environ["TIERFS_STATE_DIR"] = directory
        os.environ.pop("TIERFS_CONFIG", None)
        os.environ.pop("TIERFS_CREATE", None)
        yield
        del os.environ["TIERFS_STATE_DIR"]
