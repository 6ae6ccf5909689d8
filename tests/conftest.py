"""Fixtures for all tests: state, memory and stores that are separate from those of this host's user."""

import contextlib
import ctypes
import gc
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings

if "support" not in sys.modules:  # a plugin may come from there
    pytest.register_assert_rewrite("support")  # a failed assert there says its values, too
from support import forked_flusher, leftovers, opened, repeating, resting

from tierfs.repeated_warnings import forget_repeats
from tierfs.session import tiers
from tierfs.session.open import open_stores
from tierfs.threads import Transfers

# Files that take long, the longest first, so that all processes that share the files end at the same time.
LONG = (
    "test_replay",
    "test_staging",
    "test_writer",
    "test_pairs",
    "test_hosts",
    "test_feature_pairs",
    "test_exit",
    "test_flushing",
    "test_segments",
    "test_kills",
    "test_cli_tiers",
    "test_demo",
    "test_loading",
    "test_ui_server",
    "test_fsspec_conformance",
    "test_replay_ranks",
    "test_activations",
    "test_dcp_ranks",
    "test_endings",
    "test_fs_as_local",
    "test_mount_server",
    "test_tiers_stateful",
    "test_fs_processes",
    "test_writer_ranks",
    "test_independent_reader",
    "test_manager_ranks",
    "test_loaders",
    "test_conformance",
    "test_exchange",
    "test_mount_tree",
    "test_failed_copies",
    "test_cli_prune",
    "test_cli_gc",
)

# A small and fast file from each room, for a first look of a minute at most on two processors: `pytest -m quick`.
QUICK = (
    "checkpoint/test_retention.py",
    "cli/test_cli_look.py",
    "codec/test_codec_bytes.py",
    "codec/test_codec_choice.py",
    "dcp/load/test_ranges.py",
    "dcp/test_reader.py",
    "device/test_accelerator.py",
    "flusher/test_flush_queue.py",
    "format/test_keys.py",
    "format/test_parts.py",
    "fs/test_fs_listing.py",
    "host/nvme/test_nvme_tier.py",
    "host/slab/test_allocate.py",
    "mount/test_mounting.py",
    "objects/test_local.py",
    "peers/test_room.py",
    "store/encode/test_pipeline.py",
    "store/maintenance/test_gc_protocol.py",
    "store/read/test_verify.py",
    "store/test_bad_input.py",
    "store/test_dedup.py",
    "store/tree/test_host_records.py",
    "store/write/test_cuts.py",
    "test_docs.py",
    "test_exports.py",
    "test_import.py",
    "test_layers.py",
    "testing/test_faults.py",
    "train/test_policies.py",
    "ui/test_alarms.py",
)

# So much more private memory than after the last time is given back after a test. A worker stays below 1 GB.
KEPT_BYTES = 96 << 20

# The time of an example depends on the machine more than on the code.
settings.register_profile("tierfs", deadline=None)
settings.load_profile("tierfs")


# A worker takes nine seconds of processor time to rewrite the asserts of all files. Compiled files keep the result.
sys.dont_write_bytecode = False


# Races that a busy machine shows now and then show more often with them; see `.ci/steady`.
rests = resting.rests_of(os.environ)


def pytest_configure(config):
    repeating.draw_seed(config)
    if rests is not None:
        rests.install()
    # Each worker collects the folders from another one on, so that it finds most files compiled by the others.
    if hasattr(config, "workerinput") and config.args == ["tests"]:
        here = Path(__file__).parent
        folders = sorted({str(here / each.relative_to(here).parts[0]) for each in here.rglob("test_*.py")})
        first = int(config.workerinput["workerid"][2:]) * len(folders) // config.workerinput["workercount"]
        config.args[:] = folders[first:] + folders[:first]
    # A shell that starts the tests in the background makes them ignore interrupts, which some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The tests start hundreds of processes. Without compiled files, each process would compile tierfs again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Worker processes use the memory of a freed chunk again. To map and fault in new memory for each chunk takes a fifth
    # of all processor time. One arena: with one for each thread, a worker grows to 2.4 GB.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(64 << 20))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(512 << 20))
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    # A thread of torch that waits for the others keeps its processor busy, and more processes run than there are
    # processors: two threads take four times the processor time of one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with rests.during(item.nodeid) if rests is not None else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    repeating.add_command(item, report)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    processors = len(os.sched_getaffinity(0))  # xdist itself counts processors that this process may not use
    # The tests wait for disks, other processes and leases for half of their time: some workers more use it.
    return processors + min(processors, 4)


def is_quick(path):
    inside = path.relative_to(Path(__file__).parent)
    return any(str(each) in QUICK for each in (inside, *inside.parents))


def pytest_ignore_collect(collection_path, config):
    # What is not asked for is not imported either: that would take a fifth of the time.
    skipped = config.option.markexpr == "quick" and collection_path.is_file() and not is_quick(collection_path)
    return True if skipped else None


def pytest_collection_modifyitems(items):
    if missing := [each for each in QUICK if not (Path(__file__).parent / each).exists()]:
        raise pytest.UsageError(f"tests/conftest.py: QUICK names {missing}, which are not there: give their new names")
    for item in items:
        if is_quick(item.path):
            item.add_marker("quick")
    places = {name: place for place, name in enumerate(LONG)}
    order = {path: (places.get(path.stem, len(LONG)), str(path)) for path in sorted({item.path for item in items})}
    if seed := os.environ.get("TIERFS_TEST_ORDER"):  # another order of the files for each run of a campaign
        draw = random.Random(seed)
        order = {path: (draw.random(), "") for path in order}
    items.sort(key=lambda item: order[item.path])


def pytest_collection_finish():
    # Some tests count the objects that the collector leaves. It need not examine everything imported each time.
    gc.collect()
    gc.freeze()
    # Hypothesis measures each collection in Python.
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True, scope="module")
def state_of_its_own():
    """A state directory for each module. Child processes inherit it. A new store scans all of it."""
    with (
        # The flusher of a host that a test abandoned may still be making files.
        tempfile.TemporaryDirectory(prefix="tierfs-state-", ignore_cleanup_errors=True) as directory,
        tempfile.TemporaryDirectory(prefix="tierfs-test-", dir=opened.SHARED, ignore_cleanup_errors=True) as shared,
    ):
        os.environ["TIERFS_STATE_DIR"], os.environ["TIERFS_SHM_DIR"] = directory, shared
        for name in ("TIERFS_CONFIG", "TIERFS_CREATE", "TIERFS_RAM", "TIERFS_NVME"):
            os.environ.pop(name, None)
        yield
        for name in ("TIERFS_STATE_DIR", "TIERFS_SHM_DIR"):
            os.environ.pop(name, None)
    # Each listing of a store in memory goes through the objects of all such stores.
    MemoryFileSystem.store.clear()
    give_back()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def flushers_are_forked():
    """Fork the flushers that this process starts. Other processes start theirs as usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "spawn", forked_flusher.spawn)
        yield


def private_bytes():
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * mmap.PAGESIZE


def give_back():
    """Free what only cycles hold, such as a fake GPU with its memory, and let the system have the pages."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    given_back_at[:] = [private_bytes()]


given_back_at = [0]


@pytest.fixture(autouse=True)
def memory_is_freed(request):
    """Delete what a test put into the memory filesystem: a module's stores come to a GiB."""
    earlier = set(MemoryFileSystem.store)
    yield
    if hasattr(request.node, "callspec"):
        for each in request.node.callspec.params.values():
            if isinstance(each, BaseException):  # pytest keeps it, and it keeps the frames that it was raised in
                each.__traceback__ = each.__context__ = None
    for key in set(MemoryFileSystem.store) - earlier:
        MemoryFileSystem.store.pop(key, None)
    if private_bytes() > given_back_at[0] + KEPT_BYTES:
        give_back()


@pytest.fixture
def with_processors(monkeypatch):
    """Return a function that lets this process run on so many processors."""
    return lambda count: monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(count)))


@pytest.fixture
def one_transfer(monkeypatch):
    """Let one thread move data to and from the object tier."""
    monkeypatch.setattr("tierfs.threads.transfers.shared", Transfers(workers=1))


@pytest.fixture(autouse=True)
def warnings_are_logged_in_each_test():
    yield
    forget_repeats()


@pytest.fixture(autouse=True)
def nothing_is_left(request, memory_is_freed, tmp_path_factory):
    """Fail a test that ends while something that it started still runs, unless it has the mark ``outlived``."""
    folder = tmp_path_factory.getbasetemp()
    before, since_s = leftovers.found(folder), leftovers.now_s()
    yield
    if request.node.get_closest_marker("outlived"):
        return
    end, pause_s = time.monotonic() + leftovers.ENDS_S, 0.005
    while (left := leftovers.left(folder, before, since_s)) and time.monotonic() < end:
        gc.collect()  # the traceback of an expected error, or a graph of autograd, may hold what a thread serves
        time.sleep(pause_s)
        pause_s = min(0.2, 2 * pause_s)
    if left:
        pytest.fail(f"the test ended, and these still run: {', '.join(map(leftovers.named, left))}")


@pytest.fixture(autouse=True)
def stores_are_closed(request, nothing_is_left):
    """Close the stores that a test opened, before its `tmp_path` goes, so that its descriptors do not stay open."""
    if "tmp_path" in request.fixturenames:
        request.getfixturevalue("tmp_path")
    earlier = {id(store) for store in open_stores.values()}
    yield
    opened.close_stores(earlier)
