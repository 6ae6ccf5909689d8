"""No test touches what this host keeps for its user."""

import os
import signal
import tempfile
import time

import pytest
from drawing import SEED, SHARE, drawn
from leftovers import end_flushers

# Files that take minutes, the longest first: two processes that share the files out are done at the same time then.
LONG = (
    "test_tier_kills",
    "test_dcp_kills",
    "test_tier_load",
    "test_cloud_faults",
    "test_broken_answers",
    "test_clouds",
    "test_tier_faults",
    "test_dcp_meshes",
    "test_dcp_processes",
    "test_dcp_s3",
)


# Tests of kills draw their kills instead, and each case of the last is another benchmark.
ALL_CASES = ("test_tier_kills", "test_dcp_kills", "test_benchmarks")


def pytest_report_header():
    return f"TIERFS_TESTS_SHARE={SHARE} TIERFS_TEST_SEED={SEED}"


def pytest_collection_modifyitems(config, items):
    cases = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {
        item for name, some in cases.items() for item in (some if some[0].path.stem in ALL_CASES else drawn(some, name))
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    places = {name: place for place, name in enumerate(LONG)}
    items[:] = sorted((item for item in items if item in kept), key=lambda item: places.get(item.path.stem, len(LONG)))


UNTIL_S = float(os.environ.get("TIERFS_TESTS_UNTIL", "inf"))
"""Seconds since the epoch after which no test begins; `.ci/run` has 40 minutes for everything."""


def pytest_runtest_setup(item):
    if time.time() > UNTIL_S:
        pytest.skip("the time for these tests is over (TIERFS_TESTS_UNTIL)")


def pytest_configure():
    # A shell that starts the tests in the background has them ignore interrupts, which some of them send.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def state_of_its_own():
    """Processes that tests start inherit it too. What one module's tests leave unflushed is in no other's way."""
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
        for name in ("TIERFS_STATE_DIR", "TIERFS_SHM_DIR"):
            os.environ.pop(name, None)
