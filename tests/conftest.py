"""No test touches what this host keeps for its user."""

import gc
import os
import signal
import sys
import tempfile

import pytest
from hypothesis import settings

# How long an example takes says more of the machine than of the code.
settings.register_profile("tierfs", deadline=None)
settings.load_profile("tierfs")


def pytest_configure():
    # A shell that starts the tests in the background has them ignore interrupts, which some of them send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Of the hundreds of processes that tests start, each would compile tierfs anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    # Most of these tests wait for much of their time: for each other's threads and processes, and for the disk.
    return 2 * len(os.sched_getaffinity(0))


def pytest_collection_finish():
    # Some tests count what the collector leaves: it need not go through all that was imported each time.
    gc.collect()
    gc.freeze()


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


@pytest.fixture(autouse=True)
def warnings_are_logged_in_each_test():
    yield
    repeats = sys.modules.get("tierfs.repeats")
    if repeats is not None:
        repeats.forget_repeats()


@pytest.fixture(autouse=True)
def stores_are_closed(request):
    """Those whose state is a test's own, before that goes: whoever closed them afterwards would find it gone."""
    if "tmp_path" not in request.fixturenames:
        yield
        return
    tmp_path = request.getfixturevalue("tmp_path")
    earlier = open_stores()
    yield
    for key, store in open_stores().items():
        if earlier.get(key) is not store and store._state_dir is not None and tmp_path in store._state_dir.parents:
            del sys.modules["tierfs.session.open"]._stores[key]
            if store.tiers is not None:
                store.tiers.close()


def open_stores():
    opened = sys.modules.get("tierfs.session.open")
    return {} if opened is None else dict(opened._stores)
