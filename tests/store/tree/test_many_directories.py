"""A directory of very many directories takes a few requests to list, with the same entries as one request for each."""

from __future__ import annotations

import gc
import os
import uuid
from dataclasses import replace
from random import Random

import pytest
from support.waiting import until

from tierfs.format import keys
from tierfs.format.manifest import Tombstone
from tierfs.objects import MeasuredObjects, MemoryObjects
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import Store, delete, find, list_directory, make_directory, save
from tierfs.store.create import create_store
from tierfs.store.store import RecordCache
from tierfs.store.tree import listing
from tierfs.store.tree.directory import new_marker


class FarObjects(WrappedObjects):
    """An object tier that is not on this host and, like a bucket, lists in the order of keys."""

    @property
    def capabilities(self):
        return replace(self.inner.capabilities, host_local=False)

    def list(self, prefix, *, delimiter=False):
        return iter(sorted(self.inner.list(prefix, delimiter=delimiter), key=lambda item: item.key))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    objects = MeasuredObjects(FarObjects(MemoryObjects(f"/many-{uuid.uuid4().hex}")))
    descriptor, _ = create_store(objects, "store", random_bytes=os.urandom(16))
    return Store(objects, descriptor, url="store")


def lists(store):
    return store.objects.snapshot()["list"]["requests"]


def names(store, path, *, detail=False):
    return [(entry.path, entry.is_directory) for entry in list_directory(store, path, detail=detail)]


@pytest.mark.parametrize("detail", [False, True])
def test_listing_many_directories_takes_three_listings(store, detail):
    for number in range(100):
        save(store, f"run/step {number}/x", b"x")
    before = lists(store)
    assert len(names(store, "run", detail=detail)) == 100
    assert lists(store) - before == 3


def test_a_large_directory_among_many_does_not_have_all_its_names_listed(store):
    many = 60 * listing.LOOK_NAMES
    for number in range(many):
        key = keys.record_key(f"run/a/{number}")
        store.objects.put(key, [b"x"])
    for number in range(50):
        save(store, f"run/b{number}/x", b"x")
    before = lists(store)
    assert len(names(store, "run")) == 51
    assert lists(store) - before == 3 + 50  # all listed names are below the first directory


def test_few_directories_are_looked_into(store):
    for number in range(3):
        save(store, f"run/{number}/x", b"x")
    before = lists(store)
    assert len(names(store, "run")) == 3
    assert lists(store) - before == 2 + 3


@pytest.mark.parametrize("count", [3, 100])
def test_the_marker_of_the_root_is_no_directory_in_it(store, count):
    store.objects.put(keys.marker_key(""), [new_marker(store).encode("/")])
    for number in range(count):
        save(store, f"{number:03}/x", b"x")
    assert names(store, "") == [(f"{number:03}", True) for number in range(count)]


def grow(store, seed):
    """Create directories with files, markers, tombstones, foreign objects, and mixtures of these."""
    rng = Random(seed)
    for number in range(60):
        name = f"run/d{number} !{'ö' * (number % 2)}"
        for kind in rng.sample(["file", "deep", "deleted", "marker", "foreign", "stray", "hidden"], rng.randrange(4)):
            if kind in ("file", "deleted"):
                save(store, f"{name}/{kind}", b"x")
            if kind == "deep":
                save(store, f"{name}/a/b", b"x")
            if kind == "deleted":
                delete(store, f"{name}/deleted")
            if kind == "marker":
                make_directory(store, name, exist_ok=True)
            if kind == "foreign":
                store.objects.put(f"{name}/foreign", [b"x"])
            if kind == "stray":
                store.objects.put(f"{keys.directory_prefix(name)}stray", [b"x"])
            if kind == "hidden":
                store.objects.put(f"{name}/{keys.PRIVATE}/x", [b"x"])
        if number % 7 == 0:
            key = keys.record_key(f"run/gone{number}/x")
            store.objects.put(key, [Tombstone(bytes(16), 0, 0).encode(f"run/gone{number}/x")])
    save(store, "run/top", b"x")


@pytest.mark.parametrize("seed", range(3))
def test_one_listing_finds_what_looking_into_each_directory_finds(store, seed, monkeypatch):
    grow(store, seed)
    found = []
    for looks_max, names_each in ((10_000, 64), (0, 64), (0, 1), (0, 2)):
        monkeypatch.setattr(listing, "LOOKS_MAX", looks_max)
        monkeypatch.setattr(listing, "LOOK_NAMES", names_each)
        found.append(names(store, "run"))
    assert found == found[:1] * 4
    below = {entry.path for entry in find(store, "run", detail=False) if entry.path.count("/") == 1}
    assert below == {path for path, _ in found[0]}


class Waiting(WrappedObjects):
    """Waits in each listing until garbage is collected."""

    def list(self, prefix, *, delimiter=False):
        until(gc.isenabled)
        return super().list(prefix, delimiter=delimiter)


@pytest.mark.parametrize("look", [list_directory, find])
def test_garbage_is_collected_while_a_listing_waits_for_the_endpoint(store, look, monkeypatch):
    save(store, "run/a", b"x")
    monkeypatch.setattr(listing, "UNCOLLECTED_S_MAX", 0.05)
    waiting = Store(Waiting(store.objects), store.descriptor, url="store")
    assert [entry.path for entry in look(waiting, "run")] == ["run/a"]


def test_a_listing_of_more_than_there_is_room_for_fetches_the_rest_alone(store):
    for number in range(100):
        save(store, f"run/{number:03}", b"x" * 100)
    store.host_records = None
    size = store.records.status()["bytes"] // store.records.status()["count"]
    store.records = RecordCache(bytes_max=60 * size + 1)
    read = []
    for _ in range(3):
        before = store.objects.snapshot()["read"]["requests"]
        assert len(list_directory(store, "run")) == 100
        read.append(store.objects.snapshot()["read"]["requests"] - before)
    assert read == [100, 40, 40]
    assert store.records.status() == {"count": 60, "bytes": 60 * size, "bytes_max": 60 * size + 1}


@pytest.mark.parametrize(("memory", "share"), [(64 << 30, 2 << 30), (1 << 30, 128 << 20), (4 << 40, 4 << 30)])
def test_details_are_kept_for_a_share_of_the_memory(monkeypatch, memory, share):
    monkeypatch.setattr("tierfs.store.store.memory_limit", lambda: memory)
    assert RecordCache().bytes_max == share
