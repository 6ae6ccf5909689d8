"""The flusher's order of pending changes, its limits, and the failures that stop it."""

import contextlib
import dataclasses
import threading
import time
import uuid
from collections import Counter

import pytest
from support.nvme_tools import file_named
from support.saving import Flushing
from support.tiered import BIG, MIB, Host, content, save_at
from support.waiting import HANG_S, until

from tierfs import digest
from tierfs.digest import DigestKind, local_name
from tierfs.errors import (
    CapacityError,
    ConflictError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
    StoreNotFoundError,
)
from tierfs.flusher import scan
from tierfs.flusher.engine import FlushEngine
from tierfs.flusher.nvme import NvmePersister
from tierfs.flusher.scan import PendingScan
from tierfs.flusher.upload import Uploader
from tierfs.format import keys
from tierfs.host.nvme.batch import DraftBatches
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.host.rpc.client import FlusherClient, NoAnswerError
from tierfs.host.slab.budget import RamBudget
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.table import SlotKind
from tierfs.host.write import writer as slab_writer
from tierfs.objects import MeasuredObjects, MemoryObjects
from tierfs.store import (
    Writer,
    copy,
    discard_conflict,
    evict,
    find,
    load,
    save,
    stat,
    status,
    wait,
)
from tierfs.testing import Fault, FaultyObjects, PlannedFault


def test_writes_go_on_while_the_object_tier_is_down(host):
    with host.held():
        save(host.store, "a", content(MIB))
        save_at(host.store, "b", content(MIB), Level.LOCAL)
    assert host.store.tiers.counters["blind_writes"] == 2
    wait(host.store, "", Level.OBJECT)
    assert {entry.path for entry in find(host.plain(), "")} == {"a", "b"}


def test_a_late_flush_never_replaces_what_another_host_wrote(make_host):
    here, there = make_host("here"), make_host("there")
    with here.held():
        save(here.store, "a", b"late")
        save_at(there.store, "a", b"theirs", Level.OBJECT)
    with pytest.raises(ConflictError, match="another writer"):
        wait(here.store, "a", Level.OBJECT)
    assert load(here.plain(), "a") == b"theirs"
    assert load(here.store, "a") == b"theirs"
    assert [item["path"] for item in status(here.store)["conflicts"]] == ["a"]
    assert discard_conflict(here.store, "a") == 1
    wait(here.store, "a", Level.OBJECT)
    assert status(here.store)["conflicts"] == []


def test_files_closed_after_a_conflict_wait(make_host):
    here, there = make_host("here"), make_host("there")
    with here.held():
        save(here.store, "run/shard", b"late")
        save(here.store, "run/metadata", b"names the shard")
        save(here.store, "latest", b"names the run")
        save(here.store, "beside/it", b"is free")
        save_at(there.store, "run/shard", b"theirs", Level.OBJECT)
    wait(here.store, "beside/it", Level.OBJECT)
    for path in ("run/metadata", "latest"):
        with pytest.raises(ConflictError, match=r"run/shard"):
            wait(here.store, path, Level.OBJECT)
        with pytest.raises(NotFoundError):
            stat(here.plain(), path)
    discard_conflict(here.store, "run/shard")
    wait(here.store, "", Level.OBJECT)
    assert load(here.plain(), "latest") == b"names the run"


def test_a_write_to_the_object_tier_does_not_overtake_what_was_closed_before_it(host, monkeypatch):
    writer = Writer(host.store, "d/b", level=Level.OBJECT)
    writer.write(content(MIB))
    monkeypatch.setattr(Uploader, "next", lambda _: None)
    save(host.store, "d/a", content(MIB))
    host.store.timeout_s = 0.2
    with pytest.raises(TimeoutError):
        writer.commit()
    assert find(host.plain(), "") == []
    monkeypatch.undo()
    wait(host.store, "", Level.OBJECT)
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
        wait(here.store, "d/a", Level.OBJECT)
    discard_conflict(here.store, "d/a")
    wait(here.store, "", Level.OBJECT)
    assert load(here.plain(), "b") == data
    assert status(here.store)["tiers"]["ram"]["dirty_bytes"] == 0


def test_a_file_larger_than_the_ram_tier_is_staged_on_the_disk(make_host):
    host = make_host(ram=64 * MIB, nvme=512 * MIB)
    data = content(160 * MIB)
    with host.held():
        save_at(host.store, "a", data, Level.STAGED)
        assert load(host.store, "a") == data
        assert status(host.store)["tiers"]["ram"]["fallbacks"]["overflow_segments"] > 0
        assert status(host.store)["tiers"]["ram"]["host_bytes"] <= 64 * MIB
    assert host.store.tiers.counters["overflow_bytes"] > 90 * MIB
    wait(host.store, "a", Level.OBJECT)
    assert load(host.plain(), "a") == data
    assert status(host.store)["tiers"]["nvme"]["dirty_bytes"] == 0
    until(lambda: not any(host.tiers.ram.host.overflow.iterdir()))


def test_a_file_on_the_disk_is_sealed_without_room_in_the_ram_tier(make_host):
    host = make_host(ram=16 * MIB, nvme=0)
    host.store.timeout_s = 2
    ram = host.tiers.ram
    with host.held():
        for length in (MIB, 4096):
            with contextlib.suppress(CapacityError):
                while True:  # another writer's chunks, not sealed yet
                    ram.take(SlotKind.CHUNK, length, timeout_s=0)
        data = content(20 * MIB)
        save_at(host.store, "a", data, Level.STAGED)
        assert load(host.store, "a") == data
    wait(host.store, "a", Level.OBJECT)
    assert load(host.plain(), "a") == data


def test_overflow_without_an_nvme_tier_sends_each_byte_once_and_fetches_few(make_host):
    host = make_host(ram=64 * MIB, nvme=0)
    # The flusher opens this store, as if it were beyond a network.
    host.objects = MeasuredObjects(host.objects)
    host.descriptor = dataclasses.replace(
        host.descriptor, endpoint=dataclasses.replace(host.descriptor.endpoint, host_local=False)
    )
    data = content(160 * MIB)
    save(host.store, "a", data)
    wait(host.store, "a", Level.OBJECT)
    counters, requests = status(host.store)["counters"], host.objects.snapshot()
    assert counters["process_overflow_bytes"] > 90 * MIB
    assert counters["flusher_uploaded_bytes"] == len(data)
    assert len(data) <= requests["put"]["bytes"] < len(data) + 2 * MIB
    assert requests["get"]["bytes"] < 16 * MIB
    assert load(host.plain(), "a") == data


@pytest.mark.parametrize("nvme", [0, 64 * MIB])
@pytest.mark.parametrize("level", [Level.STAGED, Level.LOCAL])
def test_a_ram_tier_smaller_than_a_chunk_stages_chunks_on_the_disk(make_host, level, nvme):
    host = make_host(ram=4 * MIB, nvme=nvme)
    for path, data in (("a", content()), ("b", content(100_000))):
        save_at(host.store, path, data, level)
        assert load(host.store, path) == data
    assert host.tiers.counters["overflow"]
    with host.held():
        save(host.store, "small", b"few bytes")
        assert load(host.store, "small") == b"few bytes"
        assert host.tiers.drafts.pending("small") is not None
    wait(host.store, "", Level.OBJECT)
    assert find(host.plain(), "")
    assert status(host.store)["tiers"]["ram"]["waits"] == 0


def test_readers_and_small_writers_keep_house(make_host):
    before = sum(thread.name == "tierfs-housekeeping" for thread in threading.enumerate())
    host, other = make_host("host"), make_host("other")
    save(host.store, "a", b"few bytes")
    save_at(host.store, "b", content(MIB), Level.OBJECT)
    assert load(other.store, "b")
    assert other.tiers.ram.own_segments()
    assert sum(thread.name == "tierfs-housekeeping" for thread in threading.enumerate()) == before + 2


def test_the_flusher_keeps_to_its_bandwidth(make_host):
    host = make_host()
    host.close()
    host.settings = dataclasses.replace(host.settings, bandwidth=50 * MIB)
    host.open()
    begin = time.monotonic()
    save(host.store, "a", content(BIG))
    wait(host.store, "a", Level.LOCAL)
    wait(host.store, "a", Level.OBJECT)
    assert time.monotonic() - begin > 40 / 50
    assert load(host.plain(), "a") == load(host.store, "a")


def test_a_full_ram_tier_makes_writers_wait_and_then_says_what_to_do(make_host):
    host = make_host(ram=64 * MIB, nvme=0)
    host.store.timeout_s = 0.5
    with host.held():
        save(host.store, "a", content(56 * MIB))
        with pytest.raises(CapacityError, match="raise ram="):
            save(host.store, "b", content(BIG))
    wait(host.store, "", Level.OBJECT)
    save(host.store, "b", content(BIG))


def test_a_backlog_goes_raw_and_what_follows_it_is_encoded(make_host):
    def stored():
        return sum(host.objects.head(info.key).size for info in host.objects.list(keys.CHUNKS))

    host, text = make_host(ram=64 * MIB, nvme=0), b"nothing new\n" * (BIG // 12)
    with host.held():
        save(host.store, "a", text)
    wait(host.store, "", Level.OBJECT, 60)
    before = stored()
    assert before > 24 * MIB, "raw until 16 of 40 MiB are left"
    with host.held():
        save(host.store, "b", b"less than half of the budget" + text[: 24 * MIB])
    wait(host.store, "", Level.OBJECT, 60)
    assert stored() - before < 24 * MIB / 10


def test_a_lost_answer_to_a_publish_is_settled_by_the_write_id(tmp_path, descriptor, objects):
    faulty = FaultyObjects(objects, [PlannedFault(Fault.LOST_RESPONSE, "put", key_part="tree/")])
    host = Host(tmp_path, faulty, descriptor)
    try:
        save_at(host.store, "a", b"x" * 100_000, Level.OBJECT)
        assert load(host.plain(), "a") == b"x" * 100_000
        assert not host.tiers.drafts.conflicts()
    finally:
        host.close()


class Commits:
    """Count the flushes of drafts by purpose."""

    def __init__(self, monkeypatch):
        self.counts = Counter()
        for name in ("adding", "finish"):
            monkeypatch.setattr(DraftBatches, name, self.counted(name, getattr(DraftBatches, name)))

    def counted(self, name, real):
        def call(*arguments):
            self.counts[name] += 1
            return real(*arguments)

        return call


def test_files_that_follow_each_other_share_commits(host, monkeypatch):
    save(host.store, "first", b"has the flusher started")
    wait(host.store, "first", Level.OBJECT)
    commits = Commits(monkeypatch)
    with monkeypatch.context() as held, host.held():
        held.setattr(NvmePersister, "waiting", lambda _: [])
        for number in range(50):
            save(host.store, f"run/{number}", content(1000))
        held.undo()
        wait(host.store, "run", Level.LOCAL)
    assert commits.counts["adding"] <= 3  # the flusher may find the first draft before the others
    wait(host.store, "run", Level.OBJECT)
    assert commits.counts["finish"] < 50
    assert all(len(load(host.plain(), f"run/{number}")) == 1000 for number in range(50))
    assert status(host.store)["tiers"]["nvme"]["drafts"] == 0


@pytest.fixture
def pending_run(host, monkeypatch):
    """A function that returns a context manager. When its block ends, the flusher finds all its files together."""

    @contextlib.contextmanager
    def start():
        save(host.store, "first", b"has the flusher started")
        wait(host.store, "first", Level.OBJECT)
        with host.held(), monkeypatch.context() as held:
            held.setattr(NvmePersister, "waiting", lambda _: [])
            yield
            host.flusher.scan.discover()

    return start


def unforeseen(host):
    return status(host.store)["counters"].get("flusher_unforeseen_errors", 0)


def test_files_whose_common_commit_fails_are_stored_one_by_one_and_each_once(host, monkeypatch, pending_run):
    commit, failed, stored = NvmeTier.commit, [], Counter()

    def alone(tier, drafts, **what):
        if len(drafts) > 1:
            failed.append(drafts)
            raise StoreError("not together", tier="nvme")
        stored.update(path for _, path, *_ in drafts)
        return commit(tier, drafts, **what)

    monkeypatch.setattr(NvmeTier, "commit", alone)
    with pending_run():
        for name in "abc":
            save(host.store, f"run/{name}", content(100_000))
    wait(host.store, "run", Level.OBJECT)
    assert failed
    assert {path: count for path, count in stored.items() if path.startswith("run/")} == dict.fromkeys(
        ["run/a", "run/b", "run/c"], 1
    )
    assert "flusher_nvme_failures" not in status(host.store)["counters"]
    assert not unforeseen(host)


@pytest.mark.parametrize("bad", ["a", "b"])
def test_a_file_that_cannot_be_stored_takes_none_of_those_with_it_along(host, monkeypatch, pending_run, bad):
    write, refused = NvmeTier.write, []

    def refuse(tier, name, *args, **kwargs):
        if name in refused:
            raise StoreError("the disk says no", tier="nvme")
        write(tier, name, *args, **kwargs)

    monkeypatch.setattr(NvmeTier, "write", refuse)
    with pending_run():
        for name in "abc":
            save(host.store, f"run/{name}", content(100_000))
        refused.extend(host.tiers.drafts.pending(f"run/{bad}").draft.names)
    wait(host.store, "run", Level.OBJECT)
    assert status(host.store)["counters"]["flusher_nvme_failures"] == 1
    assert not unforeseen(host)


def test_a_tier_in_which_nothing_can_be_committed_is_passed_by(host, monkeypatch, pending_run):
    def fail(*_, **__):
        raise StoreError("the disk says no", tier="nvme")

    with pending_run():
        for name in "ab":
            save(host.store, f"run/{name}", content(1000))
        monkeypatch.setattr(NvmeTier, "commit", fail)
    wait(host.store, "run", Level.OBJECT)
    assert status(host.store)["counters"]["flusher_nvme_failures"] > 0
    assert not unforeseen(host)


def test_one_file_that_cannot_be_stored_keeps_the_others_from_nothing(host, monkeypatch):
    save(host.store, "first", b"has the flusher started")
    wait(host.store, "first", Level.OBJECT)
    write = NvmeTier.write
    bad = []

    def refuse(tier, name, *args, **kwargs):
        if name in bad:
            raise StoreError("the disk says no", tier="nvme")
        write(tier, name, *args, **kwargs)

    monkeypatch.setattr(NvmeTier, "write", refuse)
    with monkeypatch.context() as held, host.held():
        held.setattr(NvmePersister, "waiting", lambda _: [])
        save(host.store, "run/a", content(MIB))
        save(host.store, "run/b", content(MIB))
        save(host.store, "other/c", content(MIB))
        bad.extend(host.tiers.drafts.pending("run/a").draft.names)
        held.undo()
        wait(host.store, "other/c", Level.LOCAL)
        # A file that must be published after one in memory stays in memory as well.
        assert host.tiers.drafts.level("run/a") is host.tiers.drafts.level("run/b") is Level.STAGED
    wait(host.store, "", Level.OBJECT)
    assert status(host.store)["counters"]["flusher_nvme_failures"] == 1
    assert {len(load(host.plain(), path)) for path in ("run/a", "run/b", "other/c")} == {MIB}


def test_a_published_file_makes_way_for_the_next_before_its_row_is_gone(host, monkeypatch):
    save(host.store, "first", b"has the flusher started")
    wait(host.store, "first", Level.OBJECT)
    go = threading.Event()
    publish = NvmeTier.forget_drafts

    def slow(tier, *seqs):
        assert go.wait(HANG_S)
        publish(tier, *seqs)

    monkeypatch.setattr(NvmeTier, "forget_drafts", slow)
    try:
        for number in range(3):
            save(host.store, f"run/{number}", content(MIB))
        save(host.store, "run/0", b"again")
        until(lambda: {"run/0", "run/1", "run/2"} <= {entry.path for entry in find(host.plain(), "run")})
        # The next draft of this path waits. Otherwise a new flusher would attribute the first record to another host.
        assert len(load(host.plain(), "run/0")) == MIB
        with pytest.raises(TimeoutError):
            wait(host.store, "run/1", Level.OBJECT, 0.2)
    finally:
        go.set()
    wait(host.store, "", Level.OBJECT)
    assert load(host.plain(), "run/0") == b"again"


def test_an_unreleased_draft_is_published_again(host, monkeypatch):
    publish, failed = NvmeTier.forget_drafts, []

    def fail_once(tier, *seqs):
        if not failed:
            failed.append(seqs)
            raise StoreError("the disk says no", tier="nvme", transient=True)
        publish(tier, *seqs)

    monkeypatch.setattr(NvmeTier, "forget_drafts", fail_once)
    for number in range(5):
        save(host.store, f"run/{number}", content(MIB))
    wait(host.store, "", Level.OBJECT)
    assert failed
    assert status(host.store)["tiers"]["nvme"]["drafts"] == 0
    assert not host.tiers.drafts.conflicts()
    assert len(find(host.plain(), "run")) == 5


def test_an_error_that_nobody_foresaw_is_logged_and_the_flusher_goes_on(host, monkeypatch, caplog):
    sweep, failed = PendingScan.sweep, []

    def fail_once(scan):
        if not failed:
            failed.append(1)
            raise ZeroDivisionError("nobody foresaw this")
        sweep(scan)

    monkeypatch.setattr(PendingScan, "sweep", fail_once)
    save(host.store, "a", content(MIB))
    wait(host.store, "a", Level.OBJECT)
    until(lambda: "nobody foresaw this" in caplog.text)  # the sweep comes after the file's way to the object tier
    assert status(host.store)["counters"]["flusher_unforeseen_errors"] == 1


def test_local_is_reached_behind_a_conflict(make_host):
    here, there = make_host("here"), make_host("there")
    with here.held():
        save(here.store, "run/a", b"late")
        save_at(there.store, "run/a", b"theirs", Level.OBJECT)
    with pytest.raises(ConflictError):
        wait(here.store, "run/a", Level.OBJECT)
    save(here.store, "run/b", content(MIB))
    wait(here.store, "run/b", Level.LOCAL)
    with pytest.raises(ConflictError, match="run/a"):
        wait(here.store, "run/b", Level.OBJECT)


def test_a_file_larger_than_both_local_tiers_is_staged_while_the_object_tier_is_down(make_host):
    host = make_host(ram=64 * MIB, nvme=64 * MIB)
    data = content(200 * MIB)
    host.objects.down = True
    save_at(host.store, "a", data, Level.STAGED)
    assert load(host.store, "a") == data
    host.objects.down = False
    wait(host.store, "a", Level.OBJECT)
    assert load(host.plain(), "a") == data
    until(lambda: status(host.store)["tiers"]["nvme"]["dirty_bytes"] == 0)


def test_a_file_for_which_the_disk_has_no_room_either_is_given_up(make_host, monkeypatch):
    host = make_host(ram=64 * MIB, nvme=64 * MIB)
    real = RamBudget.free_bytes

    def full(budget, folder, files):
        return 10 * MIB if folder == budget.overflow else real(budget, folder, files)

    # Only a disk that is full would do otherwise.
    with (
        monkeypatch.context() as patch,
        pytest.raises(CapacityError, match="the disk of the state directory has no room"),
    ):
        patch.setattr(RamBudget, "free_bytes", full)
        save_at(host.store, "a", content(200 * MIB), Level.STAGED)
    assert find(host.store, "") == []
    save(host.store, "b", content(BIG))
    wait(host.store, "", Level.OBJECT)
    assert status(host.store)["tiers"]["nvme"]["dirty_bytes"] == 0


def test_a_sound_copy_is_not_put_aside_on_a_readers_word(host):
    data = content(16 * MIB)
    save(host.store, "a", data)
    wait(host.store, "a", Level.OBJECT)
    (name,) = names_of(host, data)
    evict(host.store, "a", "ram")
    host.tiers.flusher.request("quarantine", {"name": name.hex(), "length": len(data)})
    assert host.tiers.nvme.holds(name)
    assert load(host.store, "a") == data
    assert host.tiers.counters["nvme_read_bytes"] == len(data)


def test_a_damaged_copy_is_written_anew_from_memory(host):
    data = content(16 * MIB)
    save(host.store, "a", data)
    wait(host.store, "a", Level.OBJECT)
    (name,) = names_of(host, data)
    flip(file_named(host.tiers.nvme, name), data)
    host.tiers.flusher.request("quarantine", {"name": name.hex(), "length": len(data)})
    evict(host.store, "a", "ram")
    assert load(host.store, "a") == data
    assert host.tiers.counters["nvme_read_bytes"] == len(data)
    assert status(host.store)["counters"]["flusher_nvme_repaired"] == 1


def test_a_damaged_copy_is_not_replaced_by_another_one(host):
    data = content(16 * MIB)
    save(host.store, "a", data)
    wait(host.store, "a", Level.OBJECT)
    (name,) = names_of(host, data)
    flip(file_named(host.tiers.nvme, name), data)
    (segment,) = (segment.path for segment in host.tiers.ram.own_segments())
    flip(segment, data)
    host.tiers.flusher.request("quarantine", {"name": name.hex(), "length": len(data)})
    assert not host.tiers.nvme.holds(name)
    assert status(host.store)["counters"].get("flusher_nvme_repaired", 0) == 0
    assert load(host.store, "a") == data


def flip(path, data):
    with open(path, "r+b") as file:
        at = file.read().find(data[5 * MIB : 5 * MIB + 64])
        assert at > 0
        file.seek(at)
        file.write(b"damage")


def names_of(host, data):
    blocks = [digest.hash_bytes(DigestKind.XXH3_128, data[at : at + MIB]) for at in range(0, len(data), MIB)]
    return [local_name(DigestKind.XXH3_128, digest.combine(DigestKind.XXH3_128, len(data), blocks))]


def test_a_file_that_fits_the_nvme_tier_in_part_leaves_nothing_there(make_host):
    host = make_host(ram=200 * MIB, nvme=128 * MIB)
    writer = Writer(host.store, "big", level=Level.STAGED)
    for _ in range(20):
        writer.write(content(16 * MIB))
    writer.commit()
    wait(host.store, "", Level.OBJECT)
    assert host.flusher.nvme.usage().dirty_bytes == 0
    with host.held():
        save(host.store, "small", content(20 * MIB))
        wait(host.store, "small", Level.LOCAL)


def test_a_bit_that_flips_on_the_way_to_the_object_tier_is_read_again(make_host, monkeypatch):
    host = make_host(ram=40 * MIB, nvme=0)
    data = content(120 * MIB)
    read, flipped = Segment.read, []

    def flip_once(segment, slot, start, out):
        read(segment, slot, start, out)
        if not flipped and slot.kind is SlotKind.CHUNK:
            flipped.append(1)
            out[5] ^= 1

    monkeypatch.setattr(Segment, "read", flip_once)
    save(host.store, "big", data)
    wait(host.store, "big", Level.OBJECT)
    assert flipped
    assert load(host.plain(), "big") == data


@pytest.mark.parametrize("fails", [False, True], ids=["uploaded", "not uploaded"])
def test_a_change_built_on_a_conflict_says_why_it_is_kept(make_host, fails):
    # The result of the upload in flight does not matter.
    here, there = make_host("here"), make_host("there")
    uploading, go = threading.Event(), threading.Event()

    def hold(point):
        if point == "after upload.chunk":
            uploading.set()
            go.wait(HANG_S)
            if fails:
                raise StoreError("the object tier is down", transient=True)
        if point == "before publish.record":
            uploading.wait(HANG_S)

    with here.held():
        save(here.store, "a", b"late")
        save(here.store, "a", content(20 * MIB))
        save_at(there.store, "a", b"theirs", Level.OBJECT)
        wait(here.store, "a", Level.LOCAL)
        here.flushing.fault = hold
    until(lambda: len(status(here.store)["conflicts"]) == 2)
    go.set()
    with pytest.raises(ConflictError):
        wait(here.store, "a", Level.OBJECT)
    time.sleep(0.2)
    assert all("their version is kept" in conflict["message"] for conflict in status(here.store)["conflicts"])


@pytest.mark.parametrize("anew", [False, True], ids=["gone", "made anew"])
def test_a_draft_never_reaches_another_store(anew):
    objects = MemoryObjects(f"/flushing-{uuid.uuid4().hex}")
    flushing = Flushing(objects)
    data = content(300_000)
    flushing.save("one", data)
    late = flushing.draft("two", data)  # the store is known to have its chunk
    rows = flushing.upload(late)
    whole = {item.key: objects.read(item.key, MIB)[0] for item in objects.list("")}
    objects.delete(list(whole))
    if anew:
        other = dataclasses.replace(flushing.descriptor, uuid="f" * 32)
        objects.put(keys.DESCRIPTOR, [other.encode()])
    before = {item.key for item in objects.list("")}
    for step in (lambda: flushing.upload(late), lambda: flushing.publish(late, rows)):
        with pytest.raises(StoreNotFoundError, match="no longer at store"):
            step()
    assert {item.key for item in objects.list("")} == before
    # The store is put back.
    for key, stored in whole.items():
        objects.put(key, [stored])
    flushing.publish(late, flushing.upload(late))
    assert load(flushing.bare(), "two") == data


@pytest.mark.parametrize("connection", ["kept", "new"])
def test_a_wait_for_a_flusher_that_hangs_ends_in_time_and_says_so(host, monkeypatch, connection):
    release = threading.Event()
    with host.held():
        for name in ("run/a", "run/b"):
            save(host.store, name, content(MIB))
        with pytest.raises(TimeoutError, match="2 files"):  # opens a connection
            wait(host.store, "run", Level.OBJECT, 0)

        def hang(*_):
            release.wait(HANG_S)
            return {}

        monkeypatch.setattr(FlushEngine, "handle", hang)
        if connection == "new":
            host.tiers.flusher._forget_idle()
        expected = r"2 files \(2.*MiB\) have not reached 'object' yet, run/a among them: the flusher did not answer.*flusher.log"
        try:
            with pytest.raises(TimeoutError, match=expected):
                wait(host.store, "run", Level.OBJECT, 0.3)
        finally:
            release.set()
            monkeypatch.undo()
    wait(host.store, "run", Level.OBJECT)


@pytest.fixture
def hanging_flusher(monkeypatch):
    """Return a context in which the flusher takes requests and answers none, as if it was stopped."""
    monkeypatch.setattr(slab_writer, "ANNOUNCE_S", 1.0)

    @contextlib.contextmanager
    def hanging():
        release = threading.Event()

        def hang(*_):
            release.wait(HANG_S)
            return {}

        with monkeypatch.context() as patch:
            patch.setattr(FlushEngine, "handle", hang)
            try:
                yield
            finally:
                release.set()

    return hanging


def test_only_the_first_change_waits_for_a_flusher_that_hangs(make_host, hanging_flusher):
    running, host = make_host(), make_host()
    save_at(running.store, "before", b"x", Level.STAGED)  # so that a flusher runs
    with hanging_flusher():
        begin = time.monotonic()
        for number in range(10):
            save_at(host.store, f"run/{number}", b"x", Level.STAGED)
        assert time.monotonic() - begin < 9
    wait(host.store, "run", Level.OBJECT)
    assert load(host.plain(), "run/9") == b"x"


def test_a_change_waits_for_a_new_flusher_after_one_that_hung_has_ended(make_host, monkeypatch):
    host, told = make_host(), []
    monkeypatch.setattr(FlusherClient, "is_running", lambda _: not told)

    def request(*_, **__):
        told.append(threading.current_thread())
        if len(told) == 1:
            raise NoAnswerError("it hangs")
        return {}

    monkeypatch.setattr(FlusherClient, "request", request)
    host.store.tiers.writer.announce()
    host.store.tiers.writer.announce(wait=False)
    assert told == [threading.current_thread()] * 2


def test_a_file_larger_than_the_ram_tier_needs_no_flusher(make_host, hanging_flusher):
    host, data = make_host(ram=70 * MIB), content(100 * MIB)
    save_at(host.store, "before", b"x", Level.STAGED)  # so that a flusher runs
    with hanging_flusher():
        save_at(host.store, "big", data, Level.STAGED)
        assert load(host.store, "big") == data


def test_a_draft_is_not_found_without_one_that_was_sealed_before_it(make_host, monkeypatch):
    # While the flusher scans the segments, a file is saved in the first segment, and then one in the last.
    host, other = make_host(), make_host()
    save_at(host.store, "before", b"x", Level.STAGED)
    wait(host.store, "", Level.OBJECT)  # so that a flusher runs
    this, real, discover, seen = threading.current_thread(), Segment.take_changed_drafts, PendingScan.discover, []
    monkeypatch.setattr(
        PendingScan, "discover", lambda self: discover(self) if threading.current_thread() is this else None
    )
    save_at(other.store, "e/first", b"x", Level.STAGED)
    save_at(host.store, "e/second", b"x", Level.STAGED)
    mine, theirs = (one.tiers.ram.own_segments()[0].id for one in (host, other))

    def take_changed(self):
        found = real(self)
        if threading.current_thread() is this and self.id in {mine, theirs} and not seen:
            seen.append(self.id)
            earlier, later = (host, other) if self.id == mine else (other, host)
            save_at(earlier.store, "d/earlier", b"x", Level.STAGED)
            save_at(later.store, "d/later", b"x", Level.STAGED)
        return found

    with host.held():
        state = host.flushing
        monkeypatch.setattr(Segment, "take_changed_drafts", take_changed)
        host.flusher.scan.discover()
        assert seen[0] in {mine, theirs}
        with state.changed:
            found = {entry.path for entry in state.entries}
        assert "d/later" not in found or "d/earlier" in found
        host.flusher.scan.discover()
        with state.changed:
            assert {"d/earlier", "d/later"} <= {entry.path for entry in state.entries}


def test_files_that_could_not_be_marked_clean_are_found_by_a_later_walk(host, monkeypatch):
    # The first of three files that were committed together fails, so the flusher does not try the others.
    mark, persist_all, failed = Segment.mark, NvmePersister.persist_all, []

    def fail_once(self, slot, state):
        if slot.kind is SlotKind.DRAFT and not failed:
            failed.append(slot.name)
            raise MemoryError
        return mark(self, slot, state)

    monkeypatch.setattr(scan, "WALK_S", 0.5)
    with host.held():
        save_at(host.store, "before", b"x", Level.LOCAL)  # so that a flusher runs
        flusher = host.flusher
        monkeypatch.setattr(NvmePersister, "persist_all", lambda *_, **__: None)
        for name in "abc":
            save_at(host.store, name, b"x", Level.STAGED)
        until(lambda: len(host.flushing.entries) == 4)
        monkeypatch.setattr(Segment, "mark", fail_once)
        monkeypatch.setattr(NvmePersister, "persist_all", persist_all)
        flusher.nudge()
        until(lambda: failed and not host.tiers.ram.drafts())
    wait(host.store, "", Level.OBJECT)
    assert [load(host.plain(), name) for name in "abc"] == [b"x"] * 3


def test_concurrent_looks_share_their_result(host, monkeypatch):
    taking, go_on, take = threading.Event(), threading.Event(), PendingScan._take

    def slowly(self, slot):
        taking.set()
        assert go_on.wait(HANG_S)
        take(self, slot)

    with host.held():
        save_at(host.store, "before", b"x", Level.LOCAL)  # so that a flusher runs
        monkeypatch.setattr(PendingScan, "_take", slowly)
        save_at(host.store, "a", b"x", Level.STAGED)
        assert taking.wait(HANG_S)
        flusher, known = host.flusher, []
        waiting = threading.Thread(target=lambda: known.append(flusher.wait("a", Level.LOCAL)))
        waiting.start()
        waiting.join(0.3)
        go_on.set()
        waiting.join(HANG_S)
        assert known == [True]
    wait(host.store, "a", Level.OBJECT)


def test_a_notice_that_is_refused_stops_no_later_one(make_host, monkeypatch):
    host, request, refusals = make_host(), FlusherClient.request, []
    save(host.store, "a", b"first")

    def refuse_once(client, do, *arguments, **options):
        if do == "draft" and not refusals:
            refusals.append(threading.current_thread().name)
            raise ReadOnlyError("the state directory is read-only")
        return request(client, do, *arguments, **options)

    monkeypatch.setattr(FlusherClient, "request", refuse_once)
    save(host.store, "b", b"second")
    until(lambda: refusals)
    assert "announce" in refusals[0]
    until(lambda: not host.tiers.writer._is_telling)
