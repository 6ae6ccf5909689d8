"""Operations that do not need the object tier do not wait for one that is unreachable."""

import errno
import socket
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.tiered import save_at
from support.waiting import HANG_S

import tierfs
from tierfs.cli import main
from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.errors import InvalidInputError, NotFoundError, ReadOnlyError, StoreError
from tierfs.host.pending.levels import Level
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.objects.registry import connect
from tierfs.session import compose, open_store
from tierfs.session.url import parse_url
from tierfs.store import load
from tierfs.store.create import create_store
from tierfs.store.looks import within
from tierfs.store.offline import AWAY_S, KnownStores, ask_briefly
from tierfs.threads import WORKERS, transfers


class Tiers:
    away_until_s = 0.0


class Store:
    def __init__(self):
        self.tiers, self.clock = Tiers(), ManualClock()
        self.descriptor = SimpleNamespace(endpoint=SimpleNamespace(host_local=False))


def fail():
    raise StoreError("no connection", transient=True)


def test_an_answer_in_time_is_returned_and_an_error_raised():
    assert within(5, lambda: 7) == 7
    with pytest.raises(NotFoundError):
        within(5, lambda: (_ for _ in ()).throw(NotFoundError("gone")))


def test_looks_that_hang_keep_no_chunk_from_being_moved():
    release = threading.Event()
    try:
        for _ in range(WORKERS + 1):
            with pytest.raises(StoreError, match="did not answer within") as raised:
                within(0.01, release.wait)
            assert raised.value.transient
        assert transfers().submit(lambda value: value, 1).result(HANG_S) == 1
    finally:
        release.set()


def test_a_tier_that_is_away_is_not_asked_again_for_a_while():
    store, asked = Store(), []
    with pytest.raises(StoreError, match="no connection"):
        ask_briefly(store, fail)
    with pytest.raises(StoreError, match="a moment ago"):
        ask_briefly(store, lambda: asked.append(1))
    assert not asked
    store.clock.sleep(AWAY_S)
    ask_briefly(store, lambda: asked.append(1))
    assert asked


def test_an_answer_that_is_an_error_does_not_make_it_away():
    store = Store()
    with pytest.raises(NotFoundError):
        ask_briefly(store, lambda: (_ for _ in ()).throw(NotFoundError("gone")))
    assert ask_briefly(store, lambda: 1) == 1


def test_a_store_is_known_by_its_url_until_its_note_is_damaged(tmp_path, caplog):
    descriptor, _ = create_store(MemoryObjects("/away"), "x://a", digest=DigestKind.XXH3_128, random_bytes=bytes(16))
    known = KnownStores(tmp_path / "state")
    assert known.find("x://a") is None
    known.remember("x://a", descriptor, ("a", "b"))
    assert KnownStores(tmp_path / "state").find("x://a") == (descriptor, ("a", "b"))
    assert KnownStores(tmp_path / "state", "of another account").find("x://a") is None
    assert known.find("x://b") is None
    (note,) = (tmp_path / "state" / "known").iterdir()
    note.write_text("{")
    assert known.find("x://a") is None
    assert "is unusable" in caplog.text


# -- stores that are opened or created while their object tier is unreachable ------------------------------------------


def refused():
    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def no_such_name():
    raise ConnectionError("cannot connect to host") from socket.gaierror(
        socket.EAI_AGAIN, "Temporary failure in name resolution"
    )


def unavailable():
    error = OSError("Service Unavailable")
    error.status = 503
    raise error


def hangs():
    FarFileSystem.release.wait(2)
    raise ConnectionError("given up")


def denied():
    raise PermissionError(errno.EACCES, "access denied")


class FarFileSystem(MemoryFileSystem):
    """An object tier beyond a network, which can be unreachable."""

    protocol = "far"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    problem: ClassVar = None
    asked = 0
    release = threading.Event()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("far://"))

    def _meet(self):
        type(self).asked += 1
        if self.problem is not None:
            type(self).problem()

    def cat_file(self, *args, **options):
        self._meet()
        return super().cat_file(*args, **options)

    def info(self, *args, **options):
        self._meet()
        return super().info(*args, **options)

    def ls(self, *args, **options):
        self._meet()
        return super().ls(*args, **options)

    def open(self, *args, **options):
        self._meet()
        return super().open(*args, **options)

    def pipe_file(self, *args, **options):
        self._meet()
        return super().pipe_file(*args, **options)


@pytest.fixture
def far(monkeypatch, tmp_path):
    """A URL in `FarFileSystem`. Its ``forget()`` makes this process start without any knowledge, like a new one."""
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("tierfs.session.open.LOOK_S", 0.2)
    monkeypatch.setattr("tierfs.store.offline.LOOK_S", 0.2)
    monkeypatch.setattr("tierfs.objects.wrappers.limits.RetryingObjects._wait", lambda *_: False)
    fsspec.register_implementation("far", FarFileSystem, clobber=True)
    FarFileSystem.store.clear()
    FarFileSystem.problem = None
    FarFileSystem.release.clear()
    opened = sys.modules["tierfs.session.open"]

    class Far:
        url = "far:///bucket/run"

        @staticmethod
        def is_away(problem):
            FarFileSystem.problem = problem

        @staticmethod
        def forget():
            for store in opened.open_stores.values():
                if store.tiers is not None:
                    store.tiers.close()
            opened.open_stores.clear()
            compose.open_tiers.clear()

    yield Far
    FarFileSystem.problem = None
    FarFileSystem.release.set()
    Far.forget()


AWAY = [refused, no_such_name, unavailable, hangs]


def by_init(far):
    return tierfs.init(far.url)


def by_path(far):
    return open_store(parse_url(f"{far.url}/step_1/file"))[0]


def by_path_and_create(far):
    return open_store(parse_url(f"{far.url}/file"), write=True, create=True)[0]


def by_name(far):
    return tierfs.init("tierfs://prod")


def by_command_line(far):
    assert main(["init", far.url]) == 0
    return open_store(parse_url(far.url))[0]


@pytest.mark.parametrize(
    ("made", "opened", "away"),
    [
        *[(by_init, by_init, away) for away in AWAY],
        *[(by_init, opened, refused) for opened in (by_path, by_path_and_create, by_name, by_command_line)],
        *[(made, by_init, refused) for made in (by_path_and_create, by_command_line)],
        (by_path_and_create, by_path_and_create, unavailable),
        (by_command_line, by_command_line, hangs),
    ],
)
def test_a_store_that_was_made_here_is_opened_while_it_is_away(far, tmp_path, monkeypatch, made, opened, away):
    config = tmp_path / "config.toml"
    config.write_text(f'[stores.prod]\nurl = "{far.url}"\n')
    monkeypatch.setenv("TIERFS_CONFIG", str(config))
    uuid = made(far).descriptor.uuid
    far.forget()
    far.is_away(away)
    store = opened(far)
    assert store.descriptor.uuid == uuid
    far.is_away(None)
    save_at(store, "a", b"a", Level.OBJECT)
    far.forget()
    assert load(tierfs.init(far.url), "a") == b"a"


def test_a_store_of_another_host_is_known_once_opened_here(far, monkeypatch, tmp_path):
    uuid = tierfs.init(far.url).descriptor.uuid
    for number, opened in enumerate([by_init, by_path]):
        far.forget()
        monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / f"other-{number}"))
        opened(far)
        far.forget()
        far.is_away(refused)
        assert tierfs.init(far.url).descriptor.uuid == uuid
        far.is_away(None)


@pytest.mark.parametrize("opened", [by_init, by_path_and_create])
@pytest.mark.parametrize("away", AWAY)
def test_an_unknown_store_is_not_created_while_unreachable(far, monkeypatch, tmp_path, opened, away):
    if away is hangs:
        FarFileSystem.release.set()
    far.is_away(away)
    with pytest.raises(
        StoreError, match=r"far:///bucket/run\S* cannot be opened.*not opened a store there before"
    ) as caught:
        opened(far)
    assert caught.value.transient
    far.is_away(None)
    assert not FarFileSystem.store


def test_a_store_that_may_not_be_looked_into_is_not_away(far):
    tierfs.init(far.url)
    far.forget()
    far.is_away(denied)
    with pytest.raises(ReadOnlyError):
        tierfs.init(far.url)


def test_a_store_that_is_away_keeps_its_kind_of_digests(far):
    tierfs.init(far.url)
    far.forget()
    far.is_away(refused)
    with pytest.raises(InvalidInputError, match="already a store with xxh3-128 digests"):
        tierfs.init(far.url, digest="blake3")


def test_a_removed_store_is_created_anew(far):
    first = tierfs.init(far.url).descriptor.uuid
    far.forget()
    FarFileSystem.store.clear()
    second = tierfs.init(far.url)
    assert second.descriptor.uuid != first
    far.forget()
    far.is_away(refused)
    assert tierfs.init(far.url).descriptor.uuid == second.descriptor.uuid, "the newest is known"


def test_another_store_at_the_same_root_gets_no_changes(far):
    first = tierfs.init(far.url).descriptor.uuid
    far.forget()
    FarFileSystem.store.clear()
    far.is_away(refused)
    assert tierfs.init(far.url).descriptor.uuid == first
    far.is_away(None)
    theirs = b"somebody else's!"
    create_store(connect("far", "/bucket/run", {}), far.url, digest=DigestKind.XXH3_128, random_bytes=theirs)
    store, _ = open_store(parse_url(f"{far.url}/a"), write=True)
    assert store.descriptor.uuid == theirs.hex()
    assert tierfs.init(far.url).descriptor.uuid == theirs.hex()


def test_the_job_of_the_guide_goes_on_while_its_store_is_away(far):
    url = f"tierfs::{far.url}"
    # The option is not JSON, so the flusher is a thread of this process, which knows the protocol.
    options = {"ack": "staged", "ram": "64MiB", "nvme": "0", "far": {"marker": FarFileSystem}}
    tierfs.init(far.url, options={"marker": FarFileSystem})
    fs, root = fsspec.url_to_fs(url, **options)
    fs.pipe_file(f"{root}/run/step_1", b"one" * 50_000)
    fs.wait(f"{root}/run/step_1", "object")
    del fs
    far.forget()
    far.is_away(refused)
    tierfs.init(far.url, options={"marker": FarFileSystem})
    fs, root = fsspec.url_to_fs(url, **options)
    fs.pipe_file(f"{root}/run/step_2", b"two" * 50_000)
    assert fs.cat_file(f"{root}/run/step_2") == b"two" * 50_000
    far.is_away(None)
    fs.wait(f"{root}/run", "object")
    far.forget()
    assert load(tierfs.init(far.url), "run/step_2") == b"two" * 50_000
