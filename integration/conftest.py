"""State directories and limits of all integration tests. No test touches the state of this host's user."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from drawing import SEED, SHARE, drawn
from leftovers import end_flushers
from servers import ministack

sys.path.append(str(Path(__file__).parent.parent / "tests"))
if "support" not in sys.modules:  # a plugin may come from there
    pytest.register_assert_rewrite("support")  # a failed assert there says its values, too
from support import repeating

from tierfs.testing import TcpFaultProxy

# Workers and their children find compiled files instead of compiling each file again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Test files that take minutes, the longest first, so that two processes that share the files end at the same time.
LONG = (
    "test_tier_kills",
    "test_dcp_kills",
    "test_benchmarks",
    "test_ray",
    "test_soak",
    "test_store_pairs",
    "test_tier_load",
    "test_cloud_faults",
    "test_huggingface",
    "test_lightning",
    "test_page_hard",
    "test_broken_answers",
    "test_clouds",
    "test_tier_faults",
    "test_dcp_meshes",
    "test_dcp_processes",
    "test_dcp_s3",
    "test_peer_stateful",
    "test_peer_frames",
    "test_peer_networks",
)


# These files draw a share of their cases themselves. Each case of test_benchmarks is another benchmark.
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
"""Seconds since the epoch after which no test begins. `.ci/run` has 40 minutes for everything."""


def pytest_runtest_setup(item):
    if time.time() > UNTIL_S:
        pytest.skip("the time for these tests is over (TIERFS_TESTS_UNTIL)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    repeating.add_command(item, report)
    return report


def pytest_configure():
    # A shell that starts the tests in the background makes them ignore SIGINT, which some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As in tests/conftest.py: the threads of torch wait for each other with busy processors.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="module")
def state_of_its_own():
    """Give each module its own state directory, which processes of its tests inherit.

    Files that the tests of a module leave unflushed do not affect other modules.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tierfs-state-") as directory,
        tempfile.TemporaryDirectory(prefix="tierfs-test-", dir="/dev/shm") as shared,
    ):
        os.environ["TIERFS_STATE_DIR"], os.environ["TIERFS_SHM_DIR"] = directory, shared
        for name in ("TIERFS_CONFIG", "TIERFS_CREATE", "TIERFS_RAM", "TIERFS_NVME"):
            os.environ.pop(name, None)
        yield
        # A flusher that a test left behind would retry forever if its server is gone.
        end_flushers(directory)
        for name in ("TIERFS_STATE_DIR", "TIERFS_SHM_DIR"):
            os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def environment_is_restored():
    """Frameworks set variables of their jobs, such as MASTER_PORT, in this process and leave them there."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before.items() - os.environ.items())


@pytest.fixture(scope="session")
def s3_and_proxy():
    """One for all tests that name S3 in the environment: a process keeps its connections to the first endpoint."""
    ministack.require()
    with ministack.running() as server, TcpFaultProxy("127.0.0.1", server.port) as proxy:
        yield server, proxy


@pytest.fixture
def s3_of_environment(s3_and_proxy, tmp_path, monkeypatch):
    """S3 behind a fault proxy for this process and those that it starts."""
    server, proxy = s3_and_proxy
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret"])
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "bare"))
    yield server, proxy
    proxy.recover()
