"""A store behind local tiers: what was written is seen at once, read from the nearest good copy, and gets down in order."""

import contextlib
import dataclasses
import os
import sys
import threading
import time

import pytest

from tierfs.digest import DigestKind
from tierfs.errors import AlreadyExistsError, CapacityError, ConflictError, InvalidInputError, NotFoundError, StoreError
from tierfs.flush.engine import FlushEngine
from tierfs.flush.levels import Level
from tierfs.flush.uploading import Uploader
from tierfs.local.nvme import NvmeTier
from tierfs.local.slab import SlotKind, SlotState
from tierfs.objects.memory import MemoryObjects
from tierfs.store import (
    WriteMode,
    Writer,
    copy,
    delete,
    discard_conflict,
    evict,
    find,
    level_of,
    list_directory,
    load,
    open_entry,
    prefetch,
    rename,
    save,
    stat,
    status,
    verify,
    wait,
)
from tierfs.store.create import create_store
from tierfs.store.localtiers import Target, tiers_for
from tierfs.store.settings import ResolvedTiers
from tierfs.store.store import Store
from tierfs.testing import Fault, FaultyObjects, PlannedFault

MIB = 1 << 20
BIG = 40 * MIB


class Host:
    """One host: its own state directory, and a store opened there with local tiers."""

    def __init__(self, tmp_path, objects, descriptor, name="here", ram=128 * MIB, nvme=128 * MIB, ack=Level.STAGED):
        self.settings = ResolvedTiers(ack, ram, nvme, tmp_path / name, 20.0)
        self.objects, self.descriptor = objects, descriptor
        self.open()

    def open(self):
        target = Target(self.descriptor.uuid, "memory://store", {}, DigestKind.XXH3_128, False, True)
        self.tiers = tiers_for(target, self.settings, self.plain, required=True)
        self.store = Store(
            self.objects,
            self.descriptor,
            url="memory://store",
            tiers=self.tiers,
            ack=self.settings.ack,
            ack_timeout_s=20,
        )

    def plain(self):
        return Store(self.objects, self.descriptor, url="memory://store")

    def close(self):
        self.tiers.close()

    @contextlib.contextmanager
    def held(self):
        """While the object tier refuses everything, so that nothing gets past the local tiers."""
        self.objects.down = True
        try:
            yield
        finally:
            self.objects.down = False


class Gate(MemoryObjects):
    """An object tier that is down when told to be."""

    down = False

    def __getattribute__(self, name):
        if name in ("put", "get", "read", "head", "list", "delete") and object.__getattribute__(self, "down"):

            def refuse(*_args, **_kwargs):
                raise StoreError("the object tier is down", transient=True)

            return refuse
        return super().__getattribute__(name)


@pytest.fixture
def root():
    return f"/tiered-{os.urandom(8).hex()}"


@pytest.fixture
def objects(root):
    return MemoryObjects(root)


@pytest.fixture
def descriptor(objects):
    return create_store(objects, "memory://store", digest=DigestKind.XXH3_128, random_bytes=os.urandom(16))[0]


@pytest.fixture
def make_host(tmp_path, root, descriptor):
    hosts = []

    def make(name="here", **options):
        host = Host(tmp_path, Gate(root), descriptor, name, **options)
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.objects.down = False
        host.close()


@pytest.fixture
def host(make_host):
    return make_host()


@pytest.fixture(params=["both", "ram", "nvme"])
def any_host(make_host, request):
    return make_host(ram=0 if request.param == "nvme" else 128 * MIB, nvme=0 if request.param == "ram" else 128 * MIB)


def content(size=BIG):
    return os.urandom(size)


@pytest.mark.parametrize("size", [0, 10, 70_000, 3 * MIB + 1, BIG])
def test_a_staged_file_is_read_back_before_and_after_it_reaches_the_object_tier(any_host, size):
    data = content(size)
    save(any_host.store, "run/a", data)
    assert load(any_host.store, "run/a") == data
    wait(any_host.store, "run/a", Level.OBJECT, 20)
    assert load(any_host.store, "run/a") == data
    assert load(any_host.plain(), "run/a") == data


def test_a_staged_file_is_listed_at_once(host):
    with host.held():
        save(host.store, "run/sub/a", content(100))
        host.objects.down = False  # what is not pending has to be looked up there
        assert [entry.path for entry in list_directory(host.store, "run")] == ["run/sub"]
        assert [entry.path for entry in find(host.store, "run")] == ["run/sub", "run/sub/a"]
        assert stat(host.store, "run").is_directory


def test_levels_are_reported_as_they_are_reached(host):
    with host.held():
        save(host.store, "a", content())
        wait(host.store, "a", Level.LOCAL, 20)
        assert host.store.tiers.drafts.level("a") is Level.LOCAL
    wait(host.store, "a", Level.OBJECT, 30)
    assert level_of(host.store, "a") is Level.OBJECT


def test_a_file_in_ram_alone_has_not_reached_local(make_host):
    host = make_host(nvme=0)
    with host.held():
        save(host.store, "a", content(MIB))
        with pytest.raises(TimeoutError, match="a among them"):
            wait(host.store, "a", Level.LOCAL, 0.3)
        assert host.store.tiers.drafts.level("a") is Level.STAGED
    wait(host.store, "a", Level.LOCAL, 30)
    assert level_of(host.store, "a") is Level.OBJECT


def test_a_write_may_ask_for_another_level_than_the_stores(host):
    save_at(host.store, "a", content(MIB), Level.OBJECT)
    assert level_of(host.store, "a") is Level.OBJECT


def save_at(store, path, data, level):
    writer = Writer(store, path, level=level)
    writer.write(data)
    writer.commit()


def test_pending_files_are_renamed_copied_and_deleted_without_the_object_tier(host):
    data = content(3 * MIB)
    with host.held():
        save(host.store, "tmp", data)
        save(host.store, "gone", content(10))
        host.objects.down = False
        assert load(host.store, "tmp") == data
        host.objects.down = True
        rename_while_down(host, "tmp", "final")
    wait(host.store, "", Level.OBJECT, 30)
    assert load(host.plain(), "final") == data
    with pytest.raises(NotFoundError):
        stat(host.plain(), "tmp")


def rename_while_down(host, source, target):
    # The target is looked up in the object tier, so it has to be there for that.
    host.objects.down = False
    rename(host.store, source, target)


def test_a_deleted_pending_file_is_gone_at_once_and_stays_gone(host):
    save(host.store, "a", content(MIB))
    delete(host.store, "a")
    with pytest.raises(NotFoundError):
        stat(host.store, "a")
    wait(host.store, "", Level.OBJECT, 20)
    with pytest.raises(NotFoundError):
        stat(host.plain(), "a")


def test_a_copy_of_a_pending_file_outlives_the_original(any_host):
    data = content(2 * MIB)
    save(any_host.store, "a", data)
    copy(any_host.store, "a", "b")
    delete(any_host.store, "a")
    assert load(any_host.store, "b") == data
    wait(any_host.store, "", Level.OBJECT, 20)
    assert load(any_host.plain(), "b") == data


def test_a_copy_of_a_file_that_is_published_meanwhile_names_its_chunks_as_they_are_stored(host, monkeypatch):
    module = sys.modules[copy.__module__]

    def then_published(look):
        def looked(store, path):
            found = look(store, path)
            host.objects.down = False
            wait(host.store, "a", Level.OBJECT, 30)
            return found

        return looked

    monkeypatch.setattr(module, "observe", then_published(module.observe))
    monkeypatch.setattr(module, "stat", then_published(module.stat))
    host.objects.down = True
    save(host.store, "a", content(MIB))
    copy(host.store, "a", "b")
    wait(host.store, "", Level.OBJECT, 30)
    assert verify(host.plain()).damage == []


def test_appending_to_a_pending_file_keeps_what_it_had(any_host):
    data = content(20 * MIB)
    save(any_host.store, "a", data)
    save(any_host.store, "a", b"more", mode=WriteMode.APPEND)
    assert load(any_host.store, "a") == data + b"more"
    wait(any_host.store, "", Level.OBJECT, 20)
    assert load(any_host.plain(), "a") == data + b"more"


def test_an_exclusive_create_sees_what_is_pending(host):
    save(host.store, "a", b"x")
    with pytest.raises(AlreadyExistsError):
        Writer(host.store, "a", mode=WriteMode.CREATE)


def test_many_versions_of_one_file_end_with_the_last(any_host):
    for number in range(12):
        save(any_host.store, "a", str(number).encode() * 70_000)
    assert load(any_host.store, "a") == b"11" * 70_000
    wait(any_host.store, "", Level.OBJECT, 30)
    assert load(any_host.plain(), "a") == b"11" * 70_000


def test_writes_go_on_while_the_object_tier_is_down(host):
    with host.held():
        save(host.store, "a", content(MIB))
        save_at(host.store, "b", content(MIB), Level.LOCAL)
    assert host.store.tiers.counters["blind_writes"] == 2
    wait(host.store, "", Level.OBJECT, 60)
    assert {entry.path for entry in find(host.plain(), "")} == {"a", "b"}


def test_a_late_flush_never_replaces_what_another_host_wrote(make_host):
    here, there = make_host("here"), make_host("there")
    with here.held():
        save(here.store, "a", b"late")
        save_at(there.store, "a", b"theirs", Level.OBJECT)
    with pytest.raises(ConflictError, match="somebody else"):
        wait(here.store, "a", Level.OBJECT, 30)
    assert load(here.plain(), "a") == b"theirs"
    assert load(here.store, "a") == b"theirs"
    assert [item["path"] for item in status(here.store)["conflicts"]] == ["a"]
    assert discard_conflict(here.store, "a") == 1
    wait(here.store, "a", Level.OBJECT, 30)
    assert status(here.store)["conflicts"] == []


def test_what_was_closed_after_a_conflict_in_its_directory_is_held_back(make_host):
    here, there = make_host("here"), make_host("there")
    with here.held():
        save(here.store, "run/shard", b"late")
        save(here.store, "run/metadata", b"names the shard")
        save(here.store, "latest", b"names the run")
        save(here.store, "beside/it", b"is free")
        save_at(there.store, "run/shard", b"theirs", Level.OBJECT)
    wait(here.store, "beside/it", Level.OBJECT, 30)
    for path in ("run/metadata", "latest"):
        with pytest.raises(ConflictError, match=r"run/shard"):
            wait(here.store, path, Level.OBJECT, 30)
        with pytest.raises(NotFoundError):
            stat(here.plain(), path)
    discard_conflict(here.store, "run/shard")
    wait(here.store, "", Level.OBJECT, 30)
    assert load(here.plain(), "latest") == b"names the run"


def test_a_write_to_the_object_tier_does_not_overtake_what_was_closed_before_it(host, monkeypatch):
    writer = Writer(host.store, "d/b", level=Level.OBJECT)
    writer.write(content(MIB))
    monkeypatch.setattr(Uploader, "next", lambda _: None)
    save(host.store, "d/a", content(MIB))
    host.store.ack_timeout_s = 0.2
    with pytest.raises(TimeoutError):
        writer.commit()
    assert find(host.plain(), "") == []
    monkeypatch.undo()
    wait(host.store, "", Level.OBJECT, 20)
    assert [entry.path for entry in find(host.plain(), "d")] == ["d/a", "d/b"]


def test_chunks_of_a_discarded_conflict_stay_for_its_copy_and_no_longer(make_host, monkeypatch):
    here, there = make_host("here", nvme=0), make_host("there")
    data = content(3 * MIB)
    monkeypatch.setattr(Uploader, "next", lambda _: None)
    save(here.store, "d/a", data)
    copy(here.store, "d/a", "b")
    save_at(there.store, "d/a", b"theirs", Level.OBJECT)
    monkeypatch.undo()
    with pytest.raises(ConflictError):
        wait(here.store, "d/a", Level.OBJECT, 20)
    discard_conflict(here.store, "d/a")
    wait(here.store, "", Level.OBJECT, 20)
    assert load(here.plain(), "b") == data
    assert status(here.store)["tiers"]["ram"]["dirty_bytes"] == 0


def test_a_file_larger_than_the_ram_tier_goes_through_it_in_waves(make_host):
    host = make_host(ram=64 * MIB, nvme=512 * MIB)
    data = content(160 * MIB)
    save(host.store, "a", data)
    assert host.store.tiers.counters["spilled_bytes"]
    assert load(host.store, "a") == data
    wait(host.store, "a", Level.OBJECT, 60)
    assert load(host.plain(), "a") == data
    assert status(host.store)["tiers"]["nvme"]["dirty_bytes"] == 0


def test_the_flusher_keeps_to_its_bandwidth(make_host):
    host = make_host()
    host.close()
    host.settings = dataclasses.replace(host.settings, bandwidth=50 * MIB)
    host.open()
    begin = time.monotonic()
    save(host.store, "a", content(BIG))
    wait(host.store, "a", Level.LOCAL, 20)
    wait(host.store, "a", Level.OBJECT, 20)
    assert time.monotonic() - begin > 32 / 50  # the first chunk goes at once
    assert load(host.plain(), "a") == load(host.store, "a")


def test_a_given_up_file_leaves_nothing_behind(host):
    writer = Writer(host.store, "a")
    writer.write(content())
    writer.abort()
    assert host.store.tiers.drafts.pending("a") is None
    states = [slot.state for segment in host.tiers.ram.segments() for slot in segment.slots(kind=SlotKind.CHUNK)]
    assert SlotState.SEALED not in states


def test_a_full_ram_tier_makes_writers_wait_and_then_says_what_to_do(make_host):
    host = make_host(ram=64 * MIB, nvme=0)
    host.tiers.writer._capacity_timeout_s = 0.5
    with host.held():
        save(host.store, "a", content(BIG))
        with pytest.raises((CapacityError, StoreError)):
            save(host.store, "b", content(BIG))
    wait(host.store, "", Level.OBJECT, 60)
    save(host.store, "b", content(BIG))


def test_what_was_read_from_afar_is_read_from_near_the_next_time(make_host):
    here, there = make_host("here"), make_host("there")
    data = content()
    save_at(there.store, "a", data, Level.OBJECT)
    assert load(here.store, "a") == data
    before = here.tiers.counters["ram_read_bytes"]
    assert load(here.store, "a") == data
    assert here.tiers.counters["ram_read_bytes"] == before + BIG


def test_prefetched_chunks_serve_while_the_object_tier_is_down(make_host):
    here, there = make_host("here"), make_host("there")
    data = content()
    save_at(there.store, "a", data, Level.OBJECT)
    assert prefetch(here.store, "a", "nvme") == BIG
    assert evict(here.store, "a", "ram") == BIG
    entry = stat(here.store, "a")
    with here.held():
        out = bytearray(BIG)
        open_entry(here.store, entry).read_into(0, memoryview(out))
    assert out == data
    assert here.tiers.counters["nvme_read_bytes"] == BIG
    assert evict(here.store, "a", "nvme") >= BIG


def test_a_damaged_copy_in_ram_is_put_aside_and_the_next_tier_serves(host):
    data = content()
    save_at(host.store, "a", data, Level.OBJECT)
    for segment in host.tiers.ram.own_segments():
        for slot in segment.slots(kind=SlotKind.CHUNK, states=(SlotState.CLEAN,)):
            os.pwrite(segment.fd, b"damage", slot.offset + MIB + 17)
    assert load(host.store, "a") == data
    assert host.tiers.counters["ram_quarantined"] == 3
    assert load(host.store, "a") == data


def test_a_pending_chunk_stays_sound_when_a_reader_has_it_kept_from_a_slot_that_is_used_again(host, monkeypatch):
    data = content(MIB)
    with host.held():
        save_at(host.store, "a", data, Level.LOCAL)
        segment = host.tiers.ram.own_segments()[0]
        while not (slots := segment.slots(kind=SlotKind.CHUNK, states=(SlotState.CLEAN,))):
            time.sleep(0.001)  # it is marked right after the level is told
        (slot,) = slots
        assert slot.segment.give(slot, only_clean=True)
        # As if it was looked up before the draft was committed.
        with monkeypatch.context() as patch:
            patch.setattr(NvmeTier, "has", lambda _tier, _name: False)
            patch.setattr(FlushEngine, "_slots", lambda _engine, _arguments: [slot])
            host.tiers.cache.keep([slot])
        assert load_while_down(host, "a") == data
        assert host.tiers.nvme.usage().damaged == 0
    wait(host.store, "a", Level.OBJECT, 30)
    assert load(host.plain(), "a") == data


def load_while_down(host, path):
    draft = host.tiers.drafts.pending(path).draft
    out = bytearray(draft.length)
    assert host.tiers.reader.read(draft.names[0], draft.length, 0, memoryview(out)) is not None
    return out


def test_damaged_copies_in_all_local_tiers_are_repaired_from_the_object_tier(host):
    data = content()
    save(host.store, "a", data)
    wait(host.store, "a", Level.OBJECT, 20)
    evict(host.store, "a", "ram")
    arena = host.settings.directory / "stores" / host.descriptor.uuid / "nvme.arena"
    with open(arena, "r+b") as file:
        raw = file.read()
        at = raw.find(data[5 * MIB : 5 * MIB + 64])
        assert at > 0
        file.seek(at)
        file.write(b"damage")
    assert load(host.store, "a") == data
    assert host.tiers.counters["nvme_quarantined"] == 1
    assert load(host.store, "a") == data


def test_foreign_files_are_cached_by_version(make_host, objects):
    host = make_host()
    data = content(20 * MIB)
    objects.put("theirs.bin", [data])
    assert load(host.store, "theirs.bin") == data
    assert load(host.store, "theirs.bin") == data
    assert host.tiers.counters["ram_read_bytes"] == len(data)
    newer = content(20 * MIB)
    objects.put("theirs.bin", [newer])
    assert load(host.store, "theirs.bin") == newer


def test_threads_that_want_the_same_chunk_fetch_it_once(make_host):
    here, there = make_host("here"), make_host("there")
    objects = here.objects
    data = content(16 * MIB)
    save_at(there.store, "a", data, Level.OBJECT)
    gets = []
    original = objects.get

    def counted(key, *args, **kwargs):
        gets.append(key)
        return original(key, *args, **kwargs)

    objects.get = counted
    threads = [threading.Thread(target=load, args=(here.store, "a")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chunks = [key for key in gets if "/chunks/" in key]
    assert len(chunks) <= 2  # the envelope's and the blocks'


def test_a_tier_that_is_off_cannot_be_asked_for(make_host):
    host = make_host(nvme=0)
    save_at(host.store, "a", content(MIB), Level.OBJECT)
    with pytest.raises(InvalidInputError, match="switched off"):
        prefetch(host.store, "a", "nvme")
    with pytest.raises(InvalidInputError, match="no local tier"):
        prefetch(host.store, "a", "tape")


def test_a_lost_answer_to_a_publish_is_settled_by_the_write_id(tmp_path, descriptor, objects):
    faulty = FaultyObjects(objects, [PlannedFault(Fault.LOST_RESPONSE, "put", key_part="tree/")])
    host = Host(tmp_path, faulty, descriptor)
    try:
        save_at(host.store, "a", b"x" * 100_000, Level.OBJECT)
        assert load(host.plain(), "a") == b"x" * 100_000
        assert not host.tiers.drafts.conflicts()
    finally:
        host.close()


def test_nothing_is_left_dirty_and_nothing_damaged_once_all_is_published(host):
    for number in range(6):
        save(host.store, f"run/{number}", content(5 * MIB))
    rename(host.store, "run/0", "run/zero")
    delete(host.store, "run/1")
    wait(host.store, "", Level.OBJECT, 30)
    report = status(host.store)
    assert report["queue_files"] == 0
    assert report["tiers"]["ram"]["dirty_bytes"] == report["tiers"]["nvme"]["dirty_bytes"] == 0
    assert not verify(host.plain()).damage


def test_a_reopened_host_goes_on_with_what_is_pending(host):
    data = content(5 * MIB)
    with host.held():
        save_at(host.store, "a", data, Level.LOCAL)
        host.close()
        host.open()
        assert host.tiers.drafts.pending("a").level is Level.LOCAL
    wait(host.store, "a", Level.OBJECT, 30)
    assert load(host.plain(), "a") == data
