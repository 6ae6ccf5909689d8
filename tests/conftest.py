"""No test touches what this host keeps for its user."""

import os
import signal
import tempfile

import pytest


def pytest_configure():
    # A shell that starts the tests in the background has them ignore interrupts, which some of them send.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
        for name in ("TIERFS_STATE_DIR", "TIERFS_SHM_DIR"):
            os.environ.pop(name, None)
