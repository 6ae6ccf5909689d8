"""A store's location, its identity after it was removed or created again, and foreign objects in it."""

import os
import shutil
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import tierfs
from tierfs.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreNotFoundError,
)
from tierfs.format import keys
from tierfs.objects import LocalObjects, MemoryObjects, WrappedObjects
from tierfs.session import TierOptions, open_store, parse_url
from tierfs.store import (
    Store,
    WriteMode,
    Writer,
    delete,
    find,
    list_directory,
    load,
    save,
    stat,
    transfer,
    usage,
    verify,
)
from tierfs.store.create import create_store
from tierfs.testing import flip_bit

CONTENT = os.urandom(100_000)


@pytest.fixture
def tier():
    return MemoryObjects(f"/roots-{uuid.uuid4().hex}")


@pytest.fixture
def store(tier):
    return Store(tier, create_store(tier, "store", random_bytes=os.urandom(16))[0], url="store")


def test_a_store_around_another_one_is_refused(tmp_path):
    tierfs.init(f"file://{tmp_path}/run/step_1")
    with pytest.raises(InvalidInputError, match=r"run/step_1 is a store"):
        tierfs.init(f"file://{tmp_path}/run")
    with pytest.raises(InvalidInputError, match=r"run/step_1 is a store"):
        open_store(parse_url(f"file://{tmp_path}/run/top"), create=True)


def test_an_open_state_directory_is_refused(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    (tmp_path / "state").mkdir(mode=0o755)
    (tmp_path / "state").chmod(0o755)
    options = TierOptions(ram="64MiB", state_dir=str(tmp_path / "state"))
    with pytest.raises(ReadOnlyError, match=r"chmod 700"):
        open_store(replace(parse_url(f"file://{tmp_path}/store/a"), tiers=options))


def test_a_state_directory_in_home_is_expanded(tmp_path, monkeypatch):
    tierfs.init(f"file://{tmp_path}/store")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    location = parse_url(f"file://{tmp_path}/store/a")
    store, path = open_store(replace(location, tiers=TierOptions(ram="64MiB", state_dir="~/state")))
    save(store, path, b"content")
    assert os.listdir(tmp_path / "home") == ["state"]
    assert os.listdir() == []


def test_a_relative_state_directory_is_refused(tmp_path, monkeypatch):
    tierfs.init(f"file://{tmp_path}/store")
    monkeypatch.chdir(tmp_path)
    location = parse_url(f"file://{tmp_path}/store/a")
    with pytest.raises(InvalidInputError, match="relative: a state directory must be an absolute path"):
        open_store(replace(location, tiers=TierOptions(ram="64MiB", state_dir="relative")))
    assert os.listdir() == ["store"]


def test_a_store_that_was_deleted_takes_no_more_writes(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    location = parse_url(f"file://{tmp_path}/store/a")
    open_store(location)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreNotFoundError):
        open_store(location, write=True)


def test_a_store_that_was_made_anew_is_opened_anew(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    location = parse_url(f"file://{tmp_path}/store/a")
    old, path = open_store(location)
    save(old, path, CONTENT)
    shutil.rmtree(tmp_path / "store")
    objects = LocalObjects(tmp_path / "store")
    create_store(objects, "store", random_bytes=os.urandom(16))  # as another process would
    new, path = open_store(location, write=True)
    assert new is not old
    save(new, path, CONTENT)
    assert load(new, path) == CONTENT


def test_a_refused_look_up_on_the_way_does_not_end_the_search(tmp_path, monkeypatch):
    tierfs.init(f"file://{tmp_path}/store")
    location = parse_url(f"file://{tmp_path}/store/locked/x")
    real = LocalObjects.read

    def read(self, key, limit):
        if str(self.root).endswith("locked"):
            raise ReadOnlyError("refused")
        return real(self, key, limit)

    monkeypatch.setattr(LocalObjects, "read", read)
    monkeypatch.setattr("tierfs.session.open.open_stores", {})
    assert open_store(location)[1] == "locked/x"


@pytest.mark.parametrize(("denied", "proposed"), [("team", "team/run"), ("", "team/run"), ("team/run", "team/run/a")])
def test_no_store_is_proposed_where_access_was_denied(tmp_path, monkeypatch, denied, proposed):
    (tmp_path / denied).mkdir(parents=True, exist_ok=True)

    # Root may read every directory of this host, so the tier denies it here, as a bucket does.
    def read(self, key, limit):
        if (tmp_path / denied).is_relative_to(self.root):
            raise ReadOnlyError("refused")
        raise NotFoundError(key)

    monkeypatch.setattr(LocalObjects, "read", read)
    with pytest.raises(ReadOnlyError, match=f"tierfs init file://{tmp_path}/{proposed}$"):
        open_store(parse_url(f"file://{tmp_path}/team/run/a"), write=True)


def test_verify_finds_damage_in_what_belongs_to_no_file(store, tier):
    save(store, "a", CONTENT)
    chunk = next(info.key for info in tier.list(keys.CHUNKS))
    lease = next(info.key for info in tier.list(keys.LEASES))
    delete(store, "a")
    tier.put(keys.condemned_key(1), [b"rubbish"])
    for key in (chunk, lease, keys.DESCRIPTOR):
        flip_bit(tier, key, 8 * 60)
    report = verify(store)
    assert {damage.key for damage in report.damage} == {chunk, lease, keys.DESCRIPTOR, keys.condemned_key(1)}


def test_a_foreign_file_behind_a_tombstone_is_not_written_over(store, tier):
    save(store, "a", b"ours")
    delete(store, "a")
    tier.put("a", [b"theirs"])
    with pytest.raises(ReadOnlyError):
        save(store, "a", b"ours again")
    with pytest.raises(AlreadyExistsError):
        save(store, "a", b"ours again", mode=WriteMode.CREATE)
    assert load(store, "a") == b"theirs"


def test_another_stores_objects_are_no_foreign_files(store, tier):
    tier.put("inner/.tierfs/store.json", [b"{}"])
    tier.put("inner/foreign", [b"x"])
    assert [entry.path for entry in find(store, "")] == ["inner", "inner/foreign"]
    assert [entry.path for entry in list_directory(store, "inner")] == ["inner/foreign"]


def test_an_empty_foreign_directory_is_not_there_for_anybody(tmp_path):
    store = tierfs.init(f"file://{tmp_path}/store")
    (tmp_path / "store" / "empty").mkdir()
    assert list_directory(store, "") == []
    with pytest.raises(FileNotFoundError):
        stat(store, "empty")


def test_a_file_that_shadows_a_foreign_one_is_counted_once(store, tier):
    save(store, "a", b"1234")
    tier.put("a", [b"foreign"])
    assert (usage(store).files, usage(store).foreign_files) == (1, 0)


def test_a_move_between_stores_deletes_only_what_it_copied(store, tier):
    class Busy(WrappedObjects):
        """An object tier that gets the record while another writer changes the source."""

        is_busy = False

        def put(self, key, *arguments, **options):
            if self.is_busy and key == keys.record_key("a"):
                save(Store(tier, store.descriptor, url="store"), "a", b"new")
            return super().put(key, *arguments, **options)

    other_tier = Busy(MemoryObjects(f"/roots-{uuid.uuid4().hex}"))
    other = Store(other_tier, create_store(other_tier, "other", random_bytes=os.urandom(16))[0], url="other")
    writer = Writer(store, "a", metadata={"epoch": 7})
    writer.write(b"old")
    writer.commit()
    other_tier.is_busy = True
    with pytest.raises(ConflictError):
        transfer(store, "a", other, "a", move=True)
    assert load(store, "a") == b"new"
    assert load(other, "a") == b"old"
    assert stat(other, "a").manifest.metadata == {"epoch": 7}


def test_hosts_that_make_a_store_at_once_make_one(tier):
    barrier = threading.Barrier(12)

    def make(number):
        barrier.wait()
        return create_store(tier, "store", random_bytes=bytes([number]) * 16)

    with ThreadPoolExecutor(12) as threads:
        made = list(threads.map(make, range(12)))
    assert len({descriptor.uuid for descriptor, _ in made}) == 1
    assert [is_new for _, is_new in made].count(True) == 1
    assert create_store(tier, "store", random_bytes=os.urandom(16)) == (made[0][0], False)
