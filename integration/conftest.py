"""No test touches what this host keeps for its user."""

import os
import tempfile

import pytest
from leftovers import end_flushers


@pytest.fixture(autouse=True, scope="session")
def state_of_its_own():
    """Processes that tests start inherit it too."""
    with (
        tempfile.TemporaryDirectory(prefix="tierfs-state-") as directory,
        tempfile.TemporaryDirectory(prefix="tierfs-test-", dir="/dev/shm") as shared,
    ):
        os.environ["TIERFS_STATE_DIR"], os.environ["TIERFS_SHM_DIR"] = directory, shared
        for name in ("TIERFS_CONFIG", "TIERFS_CREATE", "TIERFS_RAM", "TIERFS_NVME"):
            os.environ.pop(name, None)
        yield
        # One that a test left has work for a server that is gone, and would go on trying.
        end_flushers(directory)
        del os.environ["TIERFS_STATE_DIR"], os.environ["TIERFS_SHM_DIR"]
