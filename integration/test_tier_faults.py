"""Full disks, failing tiers, damaged bytes, unusable state directories: saved data still reaches the object tier."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import describing
import fsspec
import outages
import pytest
import s3server
from leftovers import flushers

import tierfs
from tierfs.store import verify
from tierfs.testing import TcpFault, TcpFaultProxy

HERE = Path(__file__).parent
MIB = 1 << 20
PATIENCE_S = 120

pytestmark = pytest.mark.filterwarnings("default")


# -- shared by the tests -----------------------------------------------------------------------------------------------


class Trainer:
    """A process that runs the given steps; see `tier_trainer`."""

    def __init__(self, url, options, *steps, shm=None, prefix=(), environment=None):
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        for name in ("TIERFS_RAM", "TIERFS_NVME"):
            self.environment.pop(name, None)
        self.environment |= environment or {}
        if shm is not None:
            self.environment["TIERFS_SHM_DIR"] = str(shm)
        argv = [*prefix, sys.executable, str(HERE / "tier_trainer.py"), url, json.dumps(options), *steps]
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment
        )

    def end(self, timeout_s=PATIENCE_S):
        """Return its findings step by step, its log, and its exit code."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            self.process.kill()
            out, err = self.process.communicate()
            pytest.fail(f"a trainer hangs after {out}\n{err[-5000:]}")
        said = {found["step"]: found for found in map(json.loads, out.splitlines())}
        return Ended(said, err, self.process.returncode)


class Ended:
    def __init__(self, said, log, code):
        self.said, self.log, self.code = said, log, code

    def sound(self):
        """Assert that every step went well, and return self."""
        failed = [found for found in self.said.values() if "error" in found]
        assert not failed, f"{failed}\n{self.log[-5000:]}"
        return self

    def __repr__(self):
        return f"{self.code}: {list(self.said.values())}\n{self.log[-3000:]}"

    def __getitem__(self, step):
        (found,) = [found for name, found in self.said.items() if name.startswith(step)]
        return found


def train(url, options, *steps, **more):
    return Trainer(url, options, *steps, **more).end()


def train_in_two(tmp_path, url, options, before, meanwhile, after, **more):
    """Run ``meanwhile`` between two lists of steps of one process."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    for file in (ready, go):
        file.unlink(missing_ok=True)
    trainer = Trainer(url, options, *before, f"touch:{ready}", f"await:{go}", *after, **more)
    try:
        began = time.monotonic()
        while not ready.exists():
            assert trainer.process.poll() is None, trainer.end().log
            if time.monotonic() - began > PATIENCE_S:
                trainer.end(1)
            time.sleep(0.02)
        meanwhile()
    except BaseException:
        trainer.process.kill()
        trainer.end()
        raise
    go.touch()
    return trainer.end()


@pytest.fixture(autouse=True)
def no_tiers_of_our_own(monkeypatch):
    """Disable local tiers in this process, which only checks the object tier. The trainers have some."""
    monkeypatch.setenv("TIERFS_RAM", "0")
    monkeypatch.setenv("TIERFS_NVME", "0")


@pytest.fixture
def state(tmp_path):
    """Yield a state directory. Its flushers end with the test."""
    yield tmp_path / "state"
    for pid in flushers(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def s3():
    s3server.require()
    with s3server.running() as port:
        yield port


@pytest.fixture
def proxy(s3):
    with TcpFaultProxy("127.0.0.1", s3) as proxy:
        yield proxy


# Clients give up within seconds, not minutes, so that tierfs has to react.
IMPATIENT = {"config_kwargs": {"connect_timeout": 1, "read_timeout": 2, "retries": {"max_attempts": 0}}}


class Remote:
    """A store on S3 behind a proxy that can fail."""

    def __init__(self, proxy, s3, state):
        self.proxy = proxy
        bucket = s3server.new_bucket(s3)
        self.url = f"tierfs::s3://{bucket}/run"
        self.direct = {**s3server.options(s3)}
        self.store = tierfs.init(f"s3://{bucket}/run", options=self.direct)
        self.options = {
            "ack": "staged",
            "ram": "128MiB",
            "nvme": "128MiB",
            "state_dir": str(state),
            "timeout": 60.0,
            "s3": {**s3server.options(proxy.port), **IMPATIENT},
        }

    def plain(self):
        return fsspec.url_to_fs(self.url, ack="object", ram="0", nvme="0", s3=self.direct)

    def assert_holds(self, **numbers):
        fs, root = self.plain()
        for name, number in numbers.items():
            (record,) = describing.decode(fs.cat_file(f"{root}/{name}"))
            assert record.number == number
        assert verify(self.store).damage == []


@pytest.fixture
def remote(proxy, s3, state):
    return Remote(proxy, s3, state)


@contextlib.contextmanager
def mounted(directory, size, *, kind="tmpfs"):
    """Mount a small filesystem, in memory or ext4 in a file. Needs root."""
    directory.mkdir(exist_ok=True)
    image = directory.with_name(f"{directory.name}.img")
    what = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    if kind == "ext4":
        what = ["-t", "ext4", "-o", "loop", str(image)]
        run("truncate", "-s", size, str(image))
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", str(image))
    run("mount", *what, str(directory))
    try:
        directory.chmod(0o700)
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)
        image.unlink(missing_ok=True)


def run(*argv):
    """Run a step of mounting; skip if it is not permitted or not possible here."""
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"cannot mount a small filesystem here: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot mount a small filesystem here: {error.stderr.strip()}")


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request):
    """Return a function that mounts a small disk to fill. If loop devices are unavailable, only tmpfs is tested."""
    return functools.partial(mounted, kind=request.param)


def fill(directory, leave=0):
    with open(directory / "filler", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(MIB))
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        if leave:
            file.truncate(max(file.tell() - leave, 0))


# -- shared memory is full ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nvme", ["0", "256MiB"])
def test_where_shared_memory_is_full_slabs_in_the_state_directory_outlive_the_trainer(remote, tmp_path, nvme):
    with mounted(tmp_path / "shm", "64m") as shm:
        remote.options |= {"ram": "512MiB", "nvme": nvme}
        saves = [f"save:f{number}:{number}:{8 * MIB}" for number in range(12)]
        outages.begin(remote.proxy, "no-puts")
        ended = train(remote.url, remote.options, *saves, "status", "kill", shm=shm).sound()
        assert ended.code == -signal.SIGKILL
        assert ended.log.count("Shared memory is too small") == 1, "said, and once"
        ram = ended["status"]["status"]["tiers"]["ram"]
        assert ram["fallbacks"]["disk_segments"] >= 1
        assert ram["host_bytes"] <= 512 * MIB
        remote.proxy.recover()
        reads = [f"read:f{number}:{number}" for number in range(12)]
        train(remote.url, remote.options, *reads, "wait::object:60", shm=shm).sound()
        remote.assert_holds(**{f"f{number}": number for number in range(12)})


def test_where_shared_memory_is_full_a_trainer_that_dies_right_after_its_first_save_loses_nothing(remote, tmp_path):
    with mounted(tmp_path / "shm", "8m") as shm:
        remote.options |= {"ram": "256MiB", "nvme": "0"}
        ended = train(remote.url, remote.options, f"save:f:1:{8 * MIB}", "kill", shm=shm)
        ended.sound()
        train(remote.url, remote.options, "wait::object:60", "read:f:1", shm=shm).sound()
        remote.assert_holds(f=1)


# -- the disk is full --------------------------------------------------------------------------------------------------


def counters_of(ended):
    return ended["status"]["status"]["counters"]


def test_a_budget_that_does_not_fit_onto_its_disk_is_said_and_the_data_gets_there(remote, tmp_path, disk):
    with disk(tmp_path / "state", "48m"):
        remote.options |= {"nvme": "1GiB"}
        ended = train(
            remote.url, remote.options, "status", f"save:f:1:{8 * MIB}", f"save:g:2:{12 * MIB}", "wait::object:60"
        )
        ended.sound()
        assert "nvme=1GiB does not fit" in ended["status"]["status"]["tiers"]["nvme"]["problem"]
        remote.assert_holds(f=1, g=2)


def test_where_the_disk_is_full_data_gets_there(remote, tmp_path, disk):
    """The log has no room either: its messages wait, and the flusher goes on."""
    with disk(tmp_path / "state", "96m") as state:
        remote.options |= {"nvme": "64MiB"}
        before = [f"save:f:1:{8 * MIB}", "wait:f:object:60"]
        # These files lie in their manifests, and the manifests in batches, which need whatever room is left.
        names = [f"g{number}" for number in range(40)]
        after = [*(f"save:{name}:2:60000" for name in names), "wait::object:30", "status"]
        full = functools.partial(fill, state)
        train_in_two(tmp_path, remote.url, remote.options, before, full, after).sound()
        remote.assert_holds(f=1, **dict.fromkeys(names, 2))


# No room for the directories of the tier; room for them alone.
@pytest.mark.parametrize("left", [0, 48 << 10])
def test_where_there_is_no_room_for_a_chunk_the_data_goes_to_the_object_tier_from_memory(remote, tmp_path, disk, left):
    with disk(tmp_path / "state", "96m") as state:
        remote.options |= {"nvme": "0"}
        train(remote.url, remote.options, f"save:before:1:{MIB}", "wait::object:60").sound()
        fill(state, leave=left)
        remote.options |= {"nvme": "64MiB"}
        # The second flusher finds the unfinished work of the first.
        for name, number in (("f", 2), ("g", 3)):
            stop_flushers(tmp_path)
            ended = train(remote.url, remote.options, f"save:{name}:{number}:{8 * MIB}", "wait::object:60", "status")
            counters = counters_of(ended.sound())
            passed = ("flusher_nvme_unavailable", "flusher_nvme_passed_by", "flusher_nvme_failures")
            assert any(map(counters.get, passed)), counters
        remote.assert_holds(before=1, f=2, g=3)


def test_a_flusher_that_begins_on_a_full_disk_brings_there_what_is_pending(remote, tmp_path, disk):
    with disk(tmp_path / "state", "96m") as state:
        remote.options |= {"nvme": "64MiB"}
        train(remote.url, remote.options, f"save:before:1:{MIB}", "wait::object:60").sound()
        outages.begin(remote.proxy, "no-puts")
        train(remote.url, remote.options, f"save:f:2:{8 * MIB}", "hard-exit").sound()
        stop_flushers(tmp_path)
        fill(state)
        remote.proxy.recover()
        train(remote.url, remote.options, f"save:g:3:{8 * MIB}", "wait::object:60", "read:f:2").sound()
        remote.assert_holds(before=1, f=2, g=3)


@pytest.mark.parametrize("room", [0, 16 << 10, 32 << 10])
def test_a_state_directory_without_any_room_is_an_error_that_says_so_or_does_for_the_ram_tier(
    remote, tmp_path, disk, room
):
    with disk(tmp_path / "state", "256k") as state:
        fill(state, leave=room)
        ended = train(remote.url, remote.options, f"save:f:1:{8 * MIB}", "wait::object:20", "status")
        if "error" in ended["save:f"]:
            assert ended["save:f"]["error"] == "CapacityError", ended
            assert str(state) in ended["save:f"]["message"]
            assert "free some room" in ended["save:f"]["message"]
            # Without an explicit request for local tiers, the store is used without them.
            environment = {"TIERFS_STATE_DIR": str(state)}
            options = {"s3": remote.options["s3"]}
            ended = train(remote.url, options, f"save:f:1:{8 * MIB}", "ack:f", environment=environment).sound()
            assert ended["ack:f"]["ack"] == "object"
            assert ended.log.count("is used without local tiers") == 1
        else:
            # The tier has no room for itself, or none for the file.
            counts = counters_of(ended.sound())
            assert [counts.get(f"flusher_nvme_{why}", 0) for why in ("unavailable", "passed_by")] in ([1, 0], [0, 1])
        remote.assert_holds(f=1)


# -- the object tier fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["refuse", "unavailable", "hang"])
def test_while_the_object_tier_is_away_saves_go_on_and_get_there_when_it_is_back(remote, tmp_path, mode):
    before = [f"save:before:1:{MIB}", "wait:before:object:60"]
    after = [f"save:x/{number}:{number}:{3 * MIB}:{ack}" for number, ack in ((2, "staged"), (3, "local"))]
    after += ["wait:x:object:2", "read:x/2:2", "status", "hard-exit"]
    fail = functools.partial(outages.begin, remote.proxy, mode)
    ended = train_in_two(tmp_path, remote.url, remote.options, before, fail, after)
    for step in ("save:x/2", "save:x/3"):
        assert "error" not in ended[step], ended[step]
        assert ended[step]["took_s"] < 15, ended[step]
    assert ended["wait:x"]["error"] == "TimeoutError"
    assert "x/2" in ended["wait:x"]["message"]
    assert ended["wait:x"]["took_s"] < 6
    assert "error" not in ended["read:x/2"]
    assert ended["status"]["status"]["queue_files"] == 2
    remote.proxy.recover()
    train(remote.url, remote.options, "wait::object:90").sound()
    remote.assert_holds(**{"before": 1, "x/2": 2, "x/3": 3})
    ended = train(remote.url, remote.options, "status")
    assert ended["status"]["status"]["conflicts"] == []


def test_a_store_that_the_host_knows_is_opened_while_its_object_tier_is_away(remote):
    """A restarted trainer reads pending files and goes on."""
    outages.begin(remote.proxy, "no-puts")
    train(remote.url, remote.options, f"save:x/1:1:{3 * MIB}", "hard-exit").sound()
    outages.begin(remote.proxy, "refuse")
    steps = ["read:x/1:1", "ack:x/1", f"save:x/2:2:{3 * MIB}", f"save:x/1:3:{MIB}", "read:x/1:3", "hard-exit"]
    ended = train(remote.url, remote.options, *steps)
    remote.proxy.recover()
    ended.sound()
    train(remote.url, remote.options, "wait::object:60").sound()
    remote.assert_holds(**{"x/1": 3, "x/2": 2})


def test_answers_that_are_lost_make_no_conflict_and_nothing_twice(remote):
    for _ in range(3):
        remote.proxy.inject(TcpFault.RESET, at=0, aim=lambda method, path: method == "PUT" and "/leases/" not in path)
    steps = [f"save:x/{number}:{number}:{3 * MIB}" for number in range(3)]
    ended = train(remote.url, remote.options, *steps, "wait::object:90", "status").sound()
    assert len(remote.proxy.fired) == 3
    assert ended["status"]["status"]["conflicts"] == []
    remote.assert_holds(**{f"x/{number}": number for number in range(3)})
    twice = {
        path
        for (method, path), times in remote.proxy.requests.items()
        if times > 1 and "/chunks/" in path and method == "PUT"
    }
    # The client retries them below tierfs, with the same content.
    assert len(twice) <= 3


# -- damaged bytes -----------------------------------------------------------------------------------------------------


def shared_memory(state):
    from tierfs.host.host import Host

    return Host(state).segments


def damage_chunk(file, number, length, *, at):
    """Flip a byte of a record in a slab or a chunk file. Return whether the record was there."""
    content = describing.encode("trainer", number, length)
    raw = file.read_bytes()
    start = raw.find(content[at : at + 64])
    if start < 0:
        return False
    with open(file, "r+b") as opened:
        opened.seek(start + 7)
        opened.write(bytes((raw[start + 7] ^ 0x40,)))
    return True


def stop_flushers(directory, number=signal.SIGKILL):
    """End the flushers, and wait until the processes are gone."""
    for pid in flushers(directory):
        os.kill(pid, number)
    began = time.monotonic()
    while flushers(directory):
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.02)


def nvme_of(remote, state):
    return state / "stores" / remote.store.descriptor.uuid / "nvme"


def test_a_damaged_clean_copy_in_the_nvme_tier_is_passed_by_and_told_of(remote, state):
    size = 5 * MIB
    train(remote.url, remote.options, f"save:f:1:{size}", "wait:f:object:60", "evict:f:ram").sound()
    assert any(damage_chunk(file, 1, size, at=3 * MIB) for file in (nvme_of(remote, state) / "chunks").iterdir())
    ended = train(remote.url, remote.options, "evict:f:ram", "read:f:1", "status", "read:f:1").sound()
    counters = ended["status"]["status"]["counters"]
    assert counters["process_nvme_quarantined"] == 1
    assert "damaged copy" in ended.log


def test_a_damaged_pending_file_is_an_error_that_names_it_and_is_never_published(remote, state, tmp_path):
    size = 5 * MIB
    remote.options |= {"nvme": "0"}

    train(remote.url, remote.options, f"save:before:1:{MIB}", "wait::object:60").sound()
    outages.begin(remote.proxy, "no-puts")
    train(remote.url, remote.options, f"save:run/f:2:{size}", "hard-exit").sound()
    stop_flushers(tmp_path)  # it may have a sound copy in flight
    found = [damage_chunk(file, 2, size, at=3 * MIB) for file in shared_memory(state).glob("*.slab")]
    assert any(found)
    remote.proxy.recover()
    ended = train(
        remote.url, remote.options, "read:run/f:2", "wait:run/f:object:20", f"save:other/g:3:{MIB}",
        "wait:other/g:object:60", "status", "hard-exit",
    )  # fmt: skip
    assert ended["read:run/f"]["error"] == "CorruptionError", ended.said
    assert "run/f" in ended["read:run/f"]["message"]
    assert ended["wait:run/f"]["error"] == "CorruptionError", ended.said
    assert "run/f" in ended["wait:run/f"]["message"]
    status = ended["status"]["status"]
    assert [item["path"] for item in status["errors"]] == ["run/f"]
    fs, root = remote.plain()
    assert not fs.exists(f"{root}/run/f")
    remote.assert_holds(**{"other/g": 3})


def lose(file):
    file.unlink()


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def empty(file):
    os.truncate(file, 0)


def scribble(file):
    with open(file, "r+b") as opened:
        for page in range(0, file.stat().st_size, 4096):
            opened.seek(page + 100)
            opened.write(os.urandom(64))


@pytest.mark.parametrize("damage", [lose, cut, empty, scribble], ids=lambda damage: damage.__name__)
def test_what_was_pending_gets_there_although_the_head_of_the_nvme_tier_is_damaged(remote, state, tmp_path, damage):
    remote.options |= {"ram": "128MiB"}

    train(remote.url, remote.options, f"save:before:1:{MIB}", "wait::object:60").sound()
    outages.begin(remote.proxy, "no-puts")
    after = [f"save:x/{number}:{number}:{3 * MIB}:local" for number in range(2, 6)]
    # Another version of one of the files, and a small file.
    after += [f"save:x/2:20:{2 * MIB}:local", "save:x/small:7:1000:local", "hard-exit"]
    train(remote.url, remote.options, *after).sound()
    stop_flushers(tmp_path)
    # As after a crash of the host, memory is lost.
    for slab in shared_memory(state).glob("*.slab"):
        slab.unlink()
    damage(nvme_of(remote, state) / "head")
    remote.proxy.recover()
    reads = ["read:x/2:20", "read:x/3:3", "read:x/small:7"]
    train(remote.url, remote.options, "wait::object:90", *reads, "status").sound()
    remote.assert_holds(**{"before": 1, "x/2": 20, "x/3": 3, "x/4": 4, "x/5": 5, "x/small": 7})


def test_garbage_in_a_slab_that_a_trainer_left_keeps_nobody_from_working(remote, state):
    train(remote.url, remote.options, f"save:f:1:{MIB}", "wait::object:60", "hard-exit").sound()
    for slab in shared_memory(state).glob("*.slab"):
        with open(slab, "r+b") as file:
            # The same each time: a few in a hundred look like a damaged change, for which `wait` rightly fails.
            file.write(random.Random(1).randbytes(8192))
    train(remote.url, remote.options, "read:f:1", f"save:g:2:{MIB}", "wait::object:60", "read:g:2").sound()
    remote.assert_holds(f=1, g=2)


# -- the state directory is unusable -----------------------------------------------------------------------------------


def local_store(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store"


def open_to_others(state):
    state.mkdir(mode=0o755)
    state.chmod(0o755)


def of_somebody_else(state):
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    state.mkdir(mode=0o700)
    os.chown(state, 12345, 12345)


@pytest.mark.parametrize("spoil", [open_to_others, of_somebody_else])
def test_a_state_directory_that_is_not_ones_own_is_an_error_if_asked_for_and_else_passed_by(tmp_path, state, spoil):
    url = local_store(tmp_path)
    spoil(state)
    ended = train(url, {"state_dir": str(state), "ram": "64MiB"}, f"save:f:1:{MIB}")
    assert ended["save:f"]["error"] == "ReadOnlyError"
    assert f"chmod 700 {state}" in ended["save:f"]["message"]
    ended = train(url, {}, f"save:f:1:{MIB}", "read:f:1", "ack:f", environment={"TIERFS_STATE_DIR": str(state)})
    ended.sound()
    assert ended["ack:f"]["ack"] == "object"
    assert ended.log.count("is used without local tiers") == 1


def test_a_state_directory_that_cannot_be_written_is_an_error_if_asked_for_and_else_passed_by(tmp_path):
    url = local_store(tmp_path)
    with mounted(tmp_path / "state", "1m") as state:
        subprocess.run(["mount", "-o", "remount,ro", str(state)], check=True)
        ended = train(url, {"state_dir": str(state / "tierfs"), "ram": "64MiB"}, f"save:f:1:{MIB}")
        assert ended["save:f"]["error"] in {"ReadOnlyError", "StoreError"}
        assert str(state) in ended["save:f"]["message"]
        environment = {"TIERFS_STATE_DIR": str(state / "tierfs")}
        ended = train(url, {}, f"save:f:1:{MIB}", "read:f:1", "ack:f", environment=environment).sound()
        assert ended["ack:f"]["ack"] == "object"
        assert ended.log.count("is used without local tiers") == 1
        # A directory that exists, and belonged to this user before its disk became read-only.
        ended = train(url, {"state_dir": str(state), "ram": "64MiB"}, f"save:f:1:{MIB}")
        assert ended["save:f"]["error"] in {"ReadOnlyError", "StoreError"}
        ended = train(url, {}, f"save:f:1:{MIB}", "read:f:1", environment={"TIERFS_STATE_DIR": str(state)}).sound()


# -- clocks, ends, children, containers --------------------------------------------------------------------------------


def test_a_clock_that_runs_backwards_changes_nothing(remote):
    steps = ["patch-clock", *(f"save:x/{number % 2}:{number}:{MIB}" for number in range(1, 8))]
    train(remote.url, remote.options, *steps, "read:x/1:7", "wait::object:60", "read:x/0:6", "read:x/1:7").sound()
    remote.assert_holds(**{"x/0": 6, "x/1": 7})


def test_a_trainer_that_ends_with_pending_files_says_which_and_that_the_flusher_goes_on(remote, tmp_path):
    remote.options |= {"nvme": "0"}
    train(remote.url, remote.options, f"save:before:1:{MIB}", "wait::object:60").sound()
    outages.begin(remote.proxy, "no-puts")
    began = time.monotonic()
    ended = train(remote.url, remote.options, f"save:x/f:2:{MIB}").sound()
    assert time.monotonic() - began < 60
    assert ended.code == 0
    assert "x/f" in ended.log
    assert "the flusher continues" in ended.log
    assert len(flushers(tmp_path)) == 1
    remote.proxy.recover()
    train(remote.url, remote.options, "wait::object:90").sound()
    remote.assert_holds(**{"x/f": 2})


def test_a_trainer_whose_object_tier_ends_with_it_is_kept_until_all_is_there(tmp_path, state):
    options = {"create": True, "ack": "staged", "ram": "128MiB", "nvme": "64MiB", "state_dir": str(state)}
    began = time.monotonic()
    ended = train("tierfs::memory://run", options, *(f"save:x/{number}:{number}:{MIB}" for number in range(8))).sound()
    assert time.monotonic() - began < 60
    assert ended.code == 0
    assert "are not in" not in ended.log
    assert flushers(tmp_path) == []


def test_a_child_of_a_trainer_that_has_pending_writes_disturbs_nothing(remote, tmp_path):
    train(remote.url, remote.options, f"save:before:1:{MIB}", "wait::object:60").sound()
    outages.begin(remote.proxy, "no-puts")
    after = [
        f"save:x/f:2:{3 * MIB}",
        "fork:read:x/f:2",
        f"fork:save:x/child:3:{3 * MIB}",
        "read:x/child:3",
        "fork:hard-exit",
        f"save:x/f:4:{3 * MIB}",
        "read:x/f:4",
        "hard-exit",
    ]
    ended = train(remote.url, remote.options, *after)
    failed = [found for found in ended.said.values() if "error" in found]
    assert not failed, f"{failed}\n{ended.log}"
    remote.proxy.recover()
    train(remote.url, remote.options, "wait::object:90").sound()
    remote.assert_holds(**{"x/f": 4, "x/child": 3})


@pytest.mark.parametrize("shm", ["shared", "small"])
def test_a_trainer_in_a_container_shares_the_flusher_outside(remote, tmp_path, state, shm):
    """The container has its own process ids and mounts. It shares the state directory, and shared memory or not."""
    prefix = ["unshare", "--fork", "--pid", "--mount-proc"]
    tried = subprocess.run([*prefix, "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no namespaces can be made here: {tried.stderr.strip()}")
    remote.options |= {"nvme": "0"}
    # A trainer outside starts the flusher first, so that it is not the container's.
    train(remote.url, remote.options, f"save:outside:1:{MIB}", "wait::object:60").sound()
    (outside,) = flushers(tmp_path)
    with contextlib.ExitStack() as stack:
        own = None
        if shm == "small":
            own = stack.enter_context(mounted(tmp_path / "shm", "8m"))
        steps = [f"save:x/{number}:{number}:{8 * MIB}" for number in range(3)]
        reads = [f"read:x/{number}:{number}" for number in range(3)]
        ended = train(
            remote.url, remote.options, *steps, *reads, "read:outside:1", "status", "hard-exit", shm=own, prefix=prefix
        )
        ended.sound()
        assert ended["status"]["status"]["flusher"]["pid"] == outside
    train(remote.url, remote.options, "wait::object:60").sound()
    remote.assert_holds(**{f"x/{number}": number for number in range(3)})


def test_a_trainer_in_a_container_sees_what_is_pending_in_memory_without_a_file(remote, tmp_path):
    prefix = ["unshare", "--fork", "--pid", "--mount-proc"]
    tried = subprocess.run([*prefix, "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no namespaces can be made here: {tried.stderr.strip()}")
    remote.options |= {"nvme": "0"}
    with mounted(tmp_path / "shm", "8m") as shm:
        outages.begin(remote.proxy, "no-puts")
        go = tmp_path / "done"
        outside = Trainer(
            remote.url,
            remote.options,
            f"save:x/f:2:{8 * MIB}",
            f"touch:{tmp_path}/saved",
            f"await:{go}",
            "hard-exit",
            shm=shm,
        )
        while not (tmp_path / "saved").exists():
            assert outside.process.poll() is None
            time.sleep(0.02)
        ended = train(remote.url, remote.options, "read:x/f:2", "hard-exit", shm=shm, prefix=prefix)
        go.touch()
        outside.end().sound()
        ended.sound()
