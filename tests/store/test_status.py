"""A store's status of its object tier: requests, the processes that sent them, and fallbacks."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from support.tiered import MIB, Host, content

import tierfs
from tierfs.cli.commands._status_prometheus import exposition
from tierfs.clock import ManualClock
from tierfs.errors import InvalidInputError, StoreError
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.objects import LimitedObjects, MeasuredObjects, MemoryObjects, PromisedObjects, RetryingObjects
from tierfs.session.settings import TierOptions, resolve
from tierfs.store import evict, load, save, status, wait
from tierfs.store.status import leave_note, read_notes
from tierfs.store.store import Store


class Endpoint(MemoryObjects):
    """Throttle the first puts, and store the next ones with a wrong last byte.

    Attributes:
        throttles: Number of puts to refuse.
        spoils: Number of puts after these to store wrong.
    """

    throttles = spoils = 0

    def put(self, key, data, **options):
        if self.throttles:
            self.throttles -= 1
            raise StoreError("slow down", transient=True, throttled=True)
        if self.spoils:
            self.spoils -= 1
            options.pop("checksum", None)  # the damage happens after the checksum was verified
            raw = bytearray(b"".join(data))
            raw[-1] ^= 1
            data = [raw]
        return super().put(key, data, **options)


def connected(endpoint):
    """Wrap an endpoint as `tierfs.objects.registry` and `as_promised` do, with writes read back."""
    measured = MeasuredObjects(RetryingObjects(LimitedObjects(endpoint), clock=ManualClock()))
    return PromisedObjects(measured, endpoint.capabilities, reads_back=True)


class ApartHost(Host):
    """A host whose flusher has its own connection to the object tier, as a flusher in another process has.

    Attributes:
        endpoint: The endpoint of the flusher's connection.
    """

    def __init__(self, tmp_path, root, descriptor):
        self.endpoint = Endpoint(root)
        super().__init__(tmp_path, connected(Endpoint(root)), descriptor)

    def plain(self):
        return Store(connected(self.endpoint), self.descriptor, url="memory://store")


@pytest.fixture
def apart(tmp_path, root, descriptor):
    host = ApartHost(tmp_path, root, descriptor)
    yield host
    host.close()


@pytest.fixture
def bare(root, descriptor):
    """An endpoint, and a store on it without local tiers."""
    endpoint = Endpoint(root)
    return endpoint, Store(connected(endpoint), descriptor, url="memory://store")


def test_requests_are_counted_by_method(bare):
    _, store = bare
    save(store, "a", content(MIB))
    load(store, "a")
    requests = status(store)["tiers"]["object"]["requests"]
    assert {name.partition("_")[0] for name in requests} == {"process"}
    assert requests["process_put"]["bytes"] > MIB
    assert requests["process_put"]["errors"] == 0
    assert requests["process_get"]["seconds"] > 0
    assert "process_delete_version" not in requests


def test_throttled_repeated_and_wrong_requests_are_counted(bare):
    endpoint, store = bare
    endpoint.throttles = 2
    save(store, "a", b"x")
    report = status(store)["tiers"]["object"]
    assert report["fallbacks"] == {"process_throttled": 2, "process_retried": 2, "process_stored_wrong": 0}
    assert report["requests"]["process_put"]["errors"] == 0  # the retries succeeded
    assert report["reads_back"]
    endpoint.spoils = 1
    save(store, "a", b"y")
    assert status(store)["tiers"]["object"]["fallbacks"]["process_stored_wrong"] == 1
    assert load(store, "a") == b"y"


def test_an_object_tier_without_wrappers_counts_nothing(objects, descriptor):
    report = status(Store(objects, descriptor, url="memory://store"))["tiers"]["object"]
    assert not report["reads_back"]
    assert report["requests"] == report["fallbacks"] == {}


def test_requests_of_the_flusher_are_counted_apart(apart):
    apart.tiers.flusher.request("status")  # starts the flusher, which has no way to the object tier yet
    report = status(apart.store)
    assert report["flusher"]["running"]
    assert not any(name.startswith("flusher_") for name in report["tiers"]["object"]["fallbacks"])
    apart.endpoint.throttles = 1
    save(apart.store, "a", content(MIB))
    wait(apart.store, "a", Level.OBJECT)
    report = status(apart.store)["tiers"]["object"]
    assert "process_head" in report["requests"]
    assert "process_put" not in report["requests"]
    assert report["requests"]["flusher_put"]["bytes"] > MIB
    assert (report["fallbacks"]["flusher_throttled"], report["fallbacks"]["process_throttled"]) == (1, 0)
    assert report["fallbacks"]["flusher_retried"] == 1


def test_evictions_of_the_flusher_are_counted(host):
    with host.held():  # or else it may reach the object tier without the nvme tier
        save(host.store, "a", content(MIB))
        wait(host.store, "a", Level.LOCAL)
    wait(host.store, "a", Level.OBJECT)
    dropped = evict(host.store, "a", "nvme")
    report = status(host.store)
    assert report["tiers"]["nvme"]["evicted_bytes"] >= dropped > 0
    assert not [name for name in report if "evicted" in name]
    evicted = re.search(r'tierfs_tier_evicted_bytes_total{.*tier="nvme"} ([0-9]+)', exposition(report))
    assert int(evicted[1]) >= dropped


def test_status_says_that_shared_memory_is_too_small(make_host, monkeypatch, tmp_path):
    monkeypatch.setenv("TIERFS_SHM_DIR", str(tmp_path / "missing"))
    assert "Shared memory is too small" in status(make_host().store)["tiers"]["ram"]["problem"]


def settings_of(tmp_path, **options):
    return resolve(
        TierOptions(state_dir=str(tmp_path / "state"), **options), "0" * 32, host_local=False, process_local=False
    )


@pytest.fixture
def disk(monkeypatch, tmp_path):
    """A function that fakes the free bytes of the disk, the size of shared memory, and the kind of filesystem."""
    usage = shutil.disk_usage(tmp_path)

    def make(*, free=1 << 40, shared=1 << 40, kind="ext4"):
        def found(path):
            return usage._replace(free=free, total=shared if str(path) == "/dev/shm" else 1 << 40)

        monkeypatch.setattr("tierfs.session.settings.shutil.disk_usage", found)
        monkeypatch.setattr("tierfs.session.settings.filesystem_of", lambda _: kind)
        monkeypatch.setattr("tierfs.session.settings.memory_limit", lambda: 64 << 30)

    return make


@pytest.mark.parametrize(
    ("options", "host", "tier", "says"),
    [
        ({"nvme": "500GiB"}, {"free": 21 << 30}, "nvme", r"nvme=500GiB does not fit .* where 21 GiB are free"),
        ({"nvme": "10%"}, {"free": 1 << 20}, "nvme", r"has only 1 MiB free"),
        ({}, {"free": 1 << 20}, "nvme", r"has only 1 MiB free"),
        ({"nvme": "1GiB"}, {"kind": "tmpfs"}, "nvme", r"a tmpfs filesystem: nothing reaches `local`"),
        ({"nvme": "1GiB"}, {"kind": "overlay"}, "nvme", r"an? overlay filesystem: nothing reaches `local`"),
        ({"ram": "500GiB"}, {}, "ram", r"ram=500GiB is more than the 64 GiB of memory"),
        (
            {"ram": "32GiB"},
            {"shared": 64 << 20},
            "ram",
            r"64 MiB of /dev/shm, and the rest goes to the state directory",
        ),
    ],
)
def test_a_budget_that_this_host_cannot_give_is_told_of(tmp_path, monkeypatch, disk, options, host, tier, says):
    monkeypatch.setenv("TIERFS_SHM_DIR", "/dev/shm")
    disk(**host)
    settings = settings_of(tmp_path, **options)
    assert list(settings.problems) == [tier]
    assert re.search(says, settings.problems[tier])
    assert bool(settings.nvme_bytes) is ("has only" not in says), "the flusher would not start with so little"


def test_budgets_that_this_host_can_give_are_no_problem(tmp_path, disk):
    disk()
    for options in ({}, {"ram": "1GiB", "nvme": "1GiB"}, {"ram": "0", "nvme": "0"}):
        assert settings_of(tmp_path, **options).problems == {}
    disk(kind="tmpfs", free=1 << 30)
    assert settings_of(tmp_path).problems == {}, "nobody asked for it"
    disk(free=1 << 20)
    with pytest.raises(InvalidInputError, match="nvme=100KiB is 102400 bytes"):
        settings_of(tmp_path, nvme="100KiB")


def test_the_budget_of_a_tier_that_is_there_stays_however_full_the_disk_is(tmp_path, disk):
    store = tmp_path / "state" / "stores" / ("0" * 32)
    NvmeTier(store, budget_bytes=1 << 20, clock=ManualClock())
    disk(free=4096)
    assert settings_of(tmp_path, nvme="500GiB").problems == {}
    assert settings_of(tmp_path).nvme_bytes == 1 << 20


def test_a_job_is_warned_once_of_a_budget_that_does_not_fit(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TIERFS_NVME", "900TiB")
    tierfs.init(f"file://{tmp_path}/store")
    for number in range(3):
        usage = shutil.disk_usage(tmp_path)._replace(free=number + 60 << 30)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        fs, root = fsspec.url_to_fs(f"tierfs::file://{tmp_path}/store", ack="staged", ram=f"{64 + number}MiB")
        fs.pipe_file(f"{root}/a", b"a" * 100_000)
        if not number:
            assert "nvme=900TiB does not fit on the disk of" in fs.status()["tiers"]["nvme"]["problem"]
    assert caplog.text.count("nvme=900TiB does not fit") == 1
    fs.wait(root, "object")


def test_status_says_why_there_are_no_local_tiers(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", "/proc/self/no")
    tierfs.init(f"file://{tmp_path}/store")
    fs, _ = fsspec.url_to_fs(f"tierfs::file://{tmp_path}/store", timeout=3)
    tiers = fs.status()["tiers"]
    assert tiers["ram"] == tiers["nvme"]
    assert tiers["ram"]["gives"] == ""
    assert "/proc/self/no" in tiers["ram"]["problem"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", "nan"),
        ("timeout", -1),
        ("ram", "much"),
        ("nvme", -1),
        ("bandwidth", -1),
        ("device", "x"),
        ("ram", b"1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(name, value):
    with pytest.raises(InvalidInputError, match=f"{name}.*not a"):
        resolve(TierOptions(**{name: value}), "0" * 32, host_local=True, process_local=False)


@pytest.mark.parametrize("timeout", [float("inf"), "inf", 1e300])
def test_a_timeout_may_be_infinite(timeout):
    found = resolve(TierOptions(timeout=timeout), "0" * 32, host_local=True, process_local=False)
    assert found.timeout_s is None


def test_saves_that_end_at_once_leave_one_note(make_host):
    store = make_host().store
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: leave_note(store, {"snapshots": number}), range(400)))
    assert not store.tiers.counters["no_device_note"]
    assert read_notes(store)["snapshots"] in range(400)
