"""No test touches what this host keeps for its user."""

import gc
import os
import signal
import sys
import tempfile

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings

# How long an example takes says more of the machine than of the code.
settings.register_profile("tierfs", deadline=None)
settings.load_profile("tierfs")


def pytest_configure():
    # A shell that starts the tests in the background has them ignore interrupts, which some of them send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Of the hundreds of processes that tests start, each would compile tierfs anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # The workers keep the memory that one test gives back for the next: first-touch memory is slow.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(64 << 20))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(512 << 20))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    # Most of these tests wait for much of their time: for each other's threads and processes, and for the disk.
    return 2 * len(os.sched_getaffinity(0))


def pytest_collection_finish():
    # Some tests count what the collector leaves: it need not go through all that was imported each time.
    gc.collect()
    gc.freeze()
    # Hypothesis measures each collection, in Python.
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True, scope="module")
def state_of_its_own():
    """Each module has its own, since a new store looks through all that the host keeps. Child processes inherit it."""
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
    # Each listing of a store in memory looks at all objects of all of them.
    MemoryFileSystem.store.clear()


@pytest.fixture(autouse=True)
def warnings_are_logged_in_each_test():
    yield
    repeats = sys.modules.get("tierfs.repeats")
    if repeats is not None:
        repeats.forget_repeats()


@pytest.fixture(autouse=True)
def stores_are_closed(request):
    """Before the state of those whose state is a test's own goes, and so that no test has the files of all before it open."""
    if "tmp_path" in request.fixturenames:
        request.getfixturevalue("tmp_path")
    opened = sys.modules.get("tierfs.session.open")
    earlier = set() if opened is None else {id(store) for store in opened._stores.values()}
    yield
    opened = sys.modules.get("tierfs.session.open")
    if opened is None:
        return
    for key, store in list(opened._stores.items()):
        if id(store) not in earlier:
            del opened._stores[key]
            if store.tiers is not None:
                store.tiers.close()
                open_tiers = sys.modules["tierfs.session.compose"].open_tiers
                for kept in [key for key, tiers in open_tiers.items() if tiers is store.tiers]:
                    del open_tiers[kept]
