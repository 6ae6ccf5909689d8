"""A store with local tiers: writes are visible at once, reads take the nearest sound copy, changes go down in order."""

import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from support.flipped_copies import CHUNK, SEALED, flip_in_ram
from support.nvme_tools import file_named
from support.opened import descriptors
from support.tiered import BIG, MIB, Gate, Host, content, save_at
from support.waiting import HANG_S

from tierfs.buffers import PAGE_BYTES
from tierfs.digest import local_name
from tierfs.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
)
from tierfs.flusher.state import FlushState
from tierfs.format import keys
from tierfs.format.keys import chunk_key
from tierfs.host.chunk_sources import ChunkRequest
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.host.pending.scan import StagedIndex
from tierfs.host.slab import pool
from tierfs.host.slab.table import HEAD_BYTES, SlotKind, SlotState
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
from tierfs.testing import flip_bit


@pytest.mark.parametrize("size", [0, 10, 70_000, 3 * MIB + 1, BIG])
def test_a_staged_file_is_read_back_before_and_after_it_reaches_the_object_tier(any_host, size):
    data = content(size)
    save(any_host.store, "run/a", data)
    assert load(any_host.store, "run/a") == data
    wait(any_host.store, "run/a", Level.OBJECT)
    assert load(any_host.store, "run/a") == data
    assert load(any_host.plain(), "run/a") == data


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("change", ["save", "delete", "rename", "rename onto"])
def test_closing_a_file_changed_by_another_process_conflicts(host, change, is_pending, is_there):
    if not is_there and change in ("delete", "rename"):
        return
    save(host.store, "run/other", b"other")
    if is_there:
        save(host.store, "run/a", b"before")
    wait(host.store, "", Level.OBJECT)
    late = Writer(host.store, "run/a")
    late.write(content(MIB))
    with host.held() if is_pending and change == "save" else contextlib.nullcontext():
        if change == "save":
            save(host.store, "run/a", b"first")
        elif change == "delete":
            delete(host.store, "run/a")
        elif change == "rename":
            rename(host.store, "run/a", "run/b")
        else:
            rename(host.store, "run/other", "run/a")
        if not is_pending:
            wait(host.store, "", Level.OBJECT)
        with pytest.raises(ConflictError, match="on this host"):
            late.commit()
    late.abort()
    wait(host.store, "", Level.OBJECT)
    assert host.tiers.drafts.conflicts() == []
    found = {entry.path: load(host.store, entry.path) for entry in find(host.store, "run") if not entry.is_directory}
    assert (
        found
        == {
            "save": {"run/other": b"other", "run/a": b"first"},
            "delete": {"run/other": b"other"},
            "rename": {"run/other": b"other", "run/b": b"before"},
            "rename onto": {"run/a": b"other"},
        }[change]
    )
    save(host.store, "run/a", b"again")
    wait(host.store, "", Level.OBJECT)


@pytest.mark.parametrize("by", ["reader", "verify"])
@pytest.mark.parametrize("how", ["removed", "damaged", "damaged, then removed"])
def test_a_flusher_stores_a_lost_chunk_again(host, how, by):
    data = content(2 * MIB)
    for path in ("run/a", "run/b"):
        save(host.store, path, data)
        wait(host.store, path, Level.OBJECT)
    (row,) = stat(host.plain(), "run/a").manifest.rows
    key = chunk_key(row.name)
    if how != "removed":
        flip_bit(host.objects, key, 8 * MIB)
    evict(host.store, "run", "ram")
    evict(host.store, "run", "nvme")
    if how == "removed":
        host.objects.delete([key])
    if by == "verify":
        found = [(damage.path, damage.key) for damage in verify(host.store, "run").damage]
        assert found == [("run/a", key), ("run/b", key)]
    else:
        with pytest.raises(CorruptionError):
            load(host.store, "run/a")
    if how == "damaged, then removed":
        host.objects.delete([key])
    save(host.store, "run/a", data)
    wait(host.store, "run/a", Level.OBJECT)
    assert load(host.plain(), "run/a") == data
    assert [damage.path for damage in verify(host.plain()).damage] == (["run/b"] if how == "damaged" else [])


def test_a_damaged_object_that_is_removed_late_is_stored_again_for_all_that_name_it(host):
    data = content(2 * MIB)
    for path in ("run/a", "run/b"):
        save(host.store, path, data)
        wait(host.store, path, Level.OBJECT)
    (row,) = stat(host.plain(), "run/b").manifest.rows
    flip_bit(host.objects, chunk_key(row.name), 8 * MIB)
    for is_removed in (False, True):
        if is_removed:
            host.objects.delete([chunk_key(row.name)])
        assert verify(host.store).damage
        save(host.store, "run/a", data)  # first beside the damaged chunk, then in its place
        wait(host.store, "run/a", Level.OBJECT)
    assert load(host.plain(), "run/b") == data
    assert verify(host.plain()).damage == []


@pytest.mark.parametrize("ask", [list_directory, find], ids=["list", "find"])
def test_a_file_published_during_a_listing_is_listed(host, monkeypatch, ask):
    listed = host.objects.list

    def publish_after_listing(prefix, **options):
        found = list(listed(prefix, **options))
        if prefix.startswith(keys.TREE):
            host.objects.down = False
            host.tiers.wait("run", Level.OBJECT)
        return iter(found)

    host.objects.down = ("put",)
    save(host.store, "run/a", b"x" * 100)
    monkeypatch.setattr(host.objects, "list", publish_after_listing)
    assert [entry.path for entry in ask(host.store, "run")] == ["run/a"]


def test_a_path_that_is_new_is_not_asked_for_and_what_is_there_all_the_same_stands(host):
    with host.held():
        writer = Writer(host.store, "a", level=Level.OBJECT, is_new=True)
    save(host.plain(), "a", b"theirs")
    writer.write(b"ours")
    with pytest.raises(ConflictError):
        writer.commit()
    assert load(host.plain(), "a") == b"theirs"


@pytest.mark.parametrize("ranks", [1, 2])
def test_chunks_that_other_ranks_want_are_kept(host, make_host, monkeypatch, ranks):
    monkeypatch.setattr(pool, "CHUNKS_DATA_BYTES", 32 * MIB)
    monkeypatch.setattr(pool, "KEPT_BYTES", 32 * MIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    data = content(3 * 16 * MIB)
    save(host.plain(), "a", data)
    reader = make_host("reader", nvme=0)
    reader.tiers.cache.keeps_reads = True
    whole = open_entry(reader.store, stat(reader.store, "a"))
    for at in range(0, len(data), 16 * MIB):  # chunk by chunk: earlier ones could be evicted
        out = bytearray(16 * MIB)
        whole.read_into(at, memoryview(out))
        assert out == data[at : at + 16 * MIB]
    usage = reader.tiers.ram.usage()
    assert (usage.clean_bytes, usage.evicted_bytes == 0) == ((len(data), True) if ranks > 1 else (32 * MIB, False))


@pytest.mark.parametrize("timeout_s", [30, float("inf"), 1e300])
def test_levels_are_reported_as_they_are_reached(host, timeout_s):
    with host.held():
        save(host.store, "a", content(MIB))
        wait(host.store, "a", Level.LOCAL, timeout_s)
        assert host.store.tiers.drafts.level("a") is Level.LOCAL
    wait(host.store, "a", Level.OBJECT, timeout_s)
    assert level_of(host.store, "a") is Level.OBJECT


def test_a_file_in_ram_alone_has_not_reached_local(make_host):
    host = make_host(nvme=0)
    with host.held():
        save(host.store, "a", content(MIB))
        with pytest.raises(TimeoutError, match="a among them"):
            wait(host.store, "a", Level.LOCAL, 0.3)
        assert host.store.tiers.drafts.level("a") is Level.STAGED
    wait(host.store, "a", Level.LOCAL)
    assert level_of(host.store, "a") is Level.OBJECT


def test_a_pending_file_is_renamed_and_listed_at_once(host):
    data = content(3 * MIB)
    with host.held():
        save(host.store, "tmp", data)
        host.objects.down = ("put",)  # a target is looked up in the object tier
        rename(host.store, "tmp", "run/sub/final")
        assert load(host.store, "run/sub/final") == data
        assert [entry.path for entry in list_directory(host.store, "run")] == ["run/sub"]
        assert [entry.path for entry in find(host.store, "run")] == ["run/sub", "run/sub/final"]
        assert stat(host.store, "run").is_directory
    wait(host.store, "", Level.OBJECT)
    assert load(host.plain(), "run/sub/final") == data
    with pytest.raises(NotFoundError):
        stat(host.plain(), "tmp")


def test_a_deleted_pending_file_is_gone_at_once_and_stays_gone(host):
    save(host.store, "a", content(MIB))
    delete(host.store, "a")
    with pytest.raises(NotFoundError):
        stat(host.store, "a")
    wait(host.store, "", Level.OBJECT)
    with pytest.raises(NotFoundError):
        stat(host.plain(), "a")


def test_a_copy_of_a_pending_file_outlives_the_original(any_host):
    data = content(2 * MIB)
    save(any_host.store, "a", data)
    copy(any_host.store, "a", "b")
    delete(any_host.store, "a")
    assert load(any_host.store, "b") == data
    wait(any_host.store, "", Level.OBJECT)
    assert load(any_host.plain(), "b") == data


def test_a_slot_with_a_flipped_bit_in_its_head_is_not_read_for_ever(make_host):
    host = make_host(nvme=0)
    with host.held("put"):
        data = content(MIB)
        save(host.store, "a", data)
        load(host.store, "a")
        (folder, _) = (host.settings.directory / "segments.txt").read_text().splitlines()
        assert flip_in_ram(Path(folder), 0.2, SEALED, CHUNK, in_head=True, meta=b"")  # in its serial number
        assert load(host.store, "a") == data  # its digest proves the bytes
    discard_conflict(host.store, "a")


@pytest.mark.parametrize("change", [copy, rename])
@pytest.mark.parametrize("target", ["run/pending", "run/new"])
def test_a_copy_of_a_published_file_is_never_pending(host, change, target):
    # gc does not know pending changes, so it may delete chunks that only such a change names.
    data, other = content(2 * MIB), content(MIB)
    save_at(host.store, "a", data, Level.OBJECT)
    with host.held("put"):
        save(host.store, "run/pending", other)
        host.store.timeout_s = 0.3
        with pytest.raises(TimeoutError, match="run/pending"):
            change(host.store, "a", target)
        assert host.tiers.drafts.pending("a") is None
        assert load(host.store, "run/pending") == other
    host.store.timeout_s = HANG_S
    change(host.store, "a", target)
    assert load(host.plain(), target) == data
    assert (load(host.plain(), "run/pending") == other) is (target != "run/pending")


def test_a_copy_that_waits_does_not_replace_what_another_host_wrote(make_host):
    here, there = make_host("here"), make_host("there")
    save_at(here.store, "a", content(MIB), Level.OBJECT)
    with here.held("put"):
        save(here.store, "run/b", b"mine")
        save_at(there.store, "run/b", b"theirs", Level.OBJECT)
    with pytest.raises(ConflictError):
        copy(here.store, "a", "run/b")
    assert load(there.plain(), "run/b") == b"theirs"


def test_a_copy_of_a_file_that_is_published_meanwhile_names_its_chunks_as_they_are_stored(host, monkeypatch):
    module = sys.modules[copy.__module__]

    def then_published(look):
        def looked(store, path):
            found = look(store, path)
            host.objects.down = False
            wait(host.store, "a", Level.OBJECT)
            return found

        return looked

    monkeypatch.setattr(module, "observe", then_published(module.observe))
    monkeypatch.setattr(module, "stat_to_read", then_published(module.stat_to_read))
    host.objects.down = True
    save(host.store, "a", content(MIB))
    copy(host.store, "a", "b")
    wait(host.store, "", Level.OBJECT)
    assert verify(host.plain()).damage == []


def test_appending_to_a_pending_file_keeps_what_it_had(any_host):
    data = content(20 * MIB)
    save(any_host.store, "a", data)
    save(any_host.store, "a", b"more", mode=WriteMode.APPEND)
    assert load(any_host.store, "a") == data + b"more"
    wait(any_host.store, "", Level.OBJECT)
    assert load(any_host.plain(), "a") == data + b"more"


def test_a_given_up_file_leaves_nothing_behind(host):
    writer = Writer(host.store, "a")
    writer.write(content())
    writer.abort()
    assert host.store.tiers.drafts.pending("a") is None
    states = [slot.state for segment in host.tiers.ram.segments() for slot in segment.slots(kind=SlotKind.CHUNK)]
    assert SlotState.SEALED not in states


def test_a_remote_read_is_cached(make_host):
    here, there = make_host("here"), make_host("there")
    data = content()
    save_at(there.store, "a", data, Level.OBJECT)
    assert load(here.store, "a") == data
    assert here.tiers.counters["object_read_bytes"] == BIG
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


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_parts_of_chunks_come_from_a_local_tier_and_no_block_that_nobody_wants(host, monkeypatch, tier):
    data = content(20 * MIB)
    save_at(host.store, "a", data, Level.LOCAL)
    if tier == "nvme":
        wait(host.store, "a", Level.OBJECT)
        evict(host.store, "a", "ram")
    read_bytes = []
    read = NvmeReader.read

    def counted(reader, name, start, out):
        read_bytes.append(len(out))
        return read(reader, name, start, out)

    monkeypatch.setattr(NvmeReader, "read", counted)
    host.tiers.cache.keeps_reads = False
    spans = [(0, 10), (5, 2 * MIB), (7 * MIB - 1, 7 * MIB), (16 * MIB - 3, 17 * MIB), (20 * MIB - 1, 20 * MIB), (9, 9)]
    parts = [(begin, memoryview(bytearray(end - begin))) for begin, end in spans]
    open_entry(host.store, stat(host.store, "a"), exact=True).read_parts(parts)
    assert all(out == data[at : at + len(out)] for at, out in parts)
    assert host.tiers.counters[f"{tier}_read_bytes"] == sum(len(out) for _, out in parts)
    assert sum(read_bytes) == (6 * MIB if tier == "nvme" else 0)


def test_a_damaged_copy_in_ram_is_put_aside_and_the_next_tier_serves(host):
    data = content()
    save_at(host.store, "a", data, Level.OBJECT)
    for segment in host.tiers.ram.own_segments():
        for slot in segment.slots(kind=SlotKind.CHUNK, states=(SlotState.CLEAN,)):
            flip(segment, slot.offset + MIB + 17)
    assert load(host.store, "a") == data
    assert host.tiers.counters["ram_quarantined"] == 3
    assert load(host.store, "a") == data


def test_a_pending_chunk_stays_sound_when_a_reader_has_it_kept_from_a_slot_that_is_used_again(host, monkeypatch):
    data = content(MIB)
    with host.held():
        save_at(host.store, "a", data, Level.LOCAL)
        segment = host.tiers.ram.own_segments()[0]
        while not (slots := segment.slots(kind=SlotKind.CHUNK, states=(SlotState.CLEAN,))):
            time.sleep(0.001)  # it is marked just after the level is reported
        (slot,) = slots
        assert slot.segment.give(slot, only_clean=True)
        # As if the lookup had run before the draft was committed.
        with monkeypatch.context() as patch:
            patch.setattr(NvmeTier, "holds", lambda _tier, _name: False)
            patch.setattr(FlushState, "chunks", lambda _state, _references: [slot])
            host.tiers.cache.backfill([slot])
        assert load_while_down(host, "a") == data
        assert host.tiers.nvme.usage().damaged == 0
    wait(host.store, "a", Level.OBJECT)
    assert load(host.plain(), "a") == data


def load_while_down(host, path):
    draft = host.tiers.drafts.pending(path).draft
    out = bytearray(draft.length)
    assert host.tiers.sources.read(ChunkRequest(draft.names[0], draft.length), [(0, memoryview(out))]) is not None
    return out


def test_damaged_copies_in_all_local_tiers_are_repaired_from_the_object_tier(host):
    data = content()
    save(host.store, "a", data)
    wait(host.store, "a", Level.OBJECT)
    evict(host.store, "a", "ram")
    for name, _ in host.tiers.nvme.chunks():
        with open(file_named(host.tiers.nvme, name), "r+b") as file:
            at = file.read().find(data[5 * MIB : 5 * MIB + 64])
            if at > 0:
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
    assert len(chunks) <= 2  # one for the envelope, one for the blocks


def test_a_tier_that_is_off_cannot_be_asked_for(make_host):
    host = make_host(nvme=0)
    save_at(host.store, "a", content(MIB), Level.OBJECT)
    with pytest.raises(InvalidInputError, match="switched off"):
        prefetch(host.store, "a", "nvme")
    with pytest.raises(InvalidInputError, match="not a local tier"):
        prefetch(host.store, "a", "tape")


def test_verify_reads_the_object_tier_whatever_copies_are_here(make_host):
    host = make_host(nvme=0)
    save_at(host.store, "a", content(300_000), Level.OBJECT)
    row = stat(host.store, "a").manifest.rows[0]
    flip_bit(host.objects, chunk_key(row.name), 8 * (row.stored_length - 100))
    assert host.tiers.sources.holds(local_name(host.descriptor.digest_kind, row.name.digest), "ram")
    (damage,) = verify(host.store).damage
    assert (damage.path, damage.key) == ("a", chunk_key(row.name))
    assert verify(host.store, "a").damage == [damage]


def test_a_store_that_was_opened_and_closed_keeps_no_descriptors(tmp_path, root, descriptor):
    def use(name):
        host = Host(tmp_path, Gate(root), descriptor, name)
        save_at(host.store, f"by/{name}", content(300_000), Level.OBJECT)
        host.close()

    use("warm")
    gc.collect()
    before = descriptors()
    for number in range(5):
        use(f"host{number}")
    gc.collect()
    assert descriptors() <= before


def stop_looking(host, patch):
    """Make the flusher find no more drafts. Wait for a scan that had begun."""
    patch.setattr(host.flusher.scan, "discover", lambda: None)
    with host.flusher.scan._looking:
        pass


def flip(segment, at, bits=1):
    """Flip bits of a byte of a segment."""
    with segment.path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def damage_draft(host, *, with_path):
    """Flip a bit of the one draft in the ram tier."""
    (slot,) = host.tiers.ram.drafts()
    flip(slot.segment, slot.offset + 40)
    if with_path:
        with slot.segment.path.open("r+b") as file:
            file.seek(PAGE_BYTES + slot.index * HEAD_BYTES + 4)
            file.write(bytes(4))  # the length of its metadata


@pytest.mark.parametrize("with_path", [False, True])
def test_a_change_that_is_damaged_in_memory_is_not_passed_over(make_host, with_path, monkeypatch):
    host = make_host(nvme=0)
    save(host.store, "a", b"before")
    save(host.store, "b", b"other")
    wait(host.store, "", Level.OBJECT)
    with monkeypatch.context() as patch:
        stop_looking(host, patch)
        save(host.store, "a", b"after")
        damage_draft(host, with_path=with_path)
    with pytest.raises(CorruptionError, match="a: this host's last write"):
        load(host.store, "a")
    for path in ("", "a"):
        with pytest.raises(CorruptionError, match="damaged and cannot be recovered"):
            wait(host.store, path, Level.OBJECT)
    if with_path:
        with pytest.raises(CorruptionError, match="perhaps to this path"):
            load(host.store, "b")
    else:
        assert load(host.store, "b") == b"other"
    assert status(host.store)["unreadable_drafts"] == 1
    assert discard_conflict(host.store, "" if with_path else "a") == 1
    assert status(host.store)["unreadable_drafts"] == 0
    assert load(host.store, "a") == b"before"
    save(host.store, "a", b"after")
    wait(host.store, "", Level.OBJECT)
    assert load(host.plain(), "a") == b"after"


def save_and_damage_the_head(host, monkeypatch, at):
    """Flip the highest bit of a byte in the head of the only draft, and open the store again."""
    save(host.store, "b", b"other")
    wait(host.store, "", Level.OBJECT)
    with monkeypatch.context() as patch:
        stop_looking(host, patch)
        save(host.store, "a", b"after")
        (slot,) = host.tiers.ram.drafts()
        flip(slot.segment, PAGE_BYTES + slot.index * HEAD_BYTES + at, 0x80)
        host.close()  # or else its flusher may look once more, and publish what it knows from before
    host.open()


@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_change_with_a_damaged_head_is_still_published(make_host, at, monkeypatch, caplog):
    host = make_host(nvme=0)
    save_and_damage_the_head(host, monkeypatch, at)
    assert load(host.store, "a") == b"after"
    wait(host.store, "", Level.OBJECT)
    assert load(host.plain(), "a") == b"after"
    assert not host.tiers.ram.drafts()
    assert "have a damaged head" in caplog.text
    assert "ignored" not in caplog.text


@pytest.mark.parametrize("at", [16, 23, 31])
def test_a_change_whose_place_is_damaged_is_not_passed_over(make_host, at, monkeypatch):
    host = make_host(nvme=0)
    save_and_damage_the_head(host, monkeypatch, at)
    with pytest.raises(CorruptionError, match="a: this host's last write"):
        load(host.store, "a")
    with pytest.raises(CorruptionError, match="damaged and cannot be recovered"):
        wait(host.store, "", Level.OBJECT)
    assert status(host.store)["unreadable_drafts"] == 1
    assert discard_conflict(host.store, "a") == 1
    wait(host.store, "", Level.OBJECT)
    assert status(host.store)["unreadable_drafts"] == 0


def test_a_discarded_change_of_the_nvme_tier_is_not_counted(host):
    with host.held():
        save_at(host.store, "a", b"after", Level.LOCAL)
        host.close()
    (batch,) = (host.tiers.nvme.directory / "nvme" / "drafts").iterdir()
    os.truncate(batch, batch.read_bytes().rindex(b"after"))
    host.open()
    with pytest.raises(CorruptionError, match="damaged and cannot be recovered"):
        wait(host.store, "", Level.OBJECT)
    assert status(host.store)["unreadable_drafts"] == 1
    assert discard_conflict(host.store, "a") == 1
    assert status(host.store)["unreadable_drafts"] == 0
    wait(host.store, "", Level.OBJECT)


def test_a_flusher_ends_what_it_is_asked_for_before_it_lets_go_of_its_tiers(host):
    with host.held():
        save_at(host.store, "a", content(MIB), Level.LOCAL)
        slots = [slot for segment in host.tiers.ram.own_segments() for slot in segment.slots(kind=SlotKind.CHUNK)]
        nvme, service = host.flusher.nvme, host.tiers.flusher._launcher._service
        write, ram, events = nvme.write, host.flusher.ram, []
        close = ram.close
        asked, closed = threading.Event(), threading.Event()

        def slow(*arguments, **options):
            asked.set()
            closed.wait(0.5)  # must not be closed, however long this takes
            events.append("write")
            write(*arguments, **options)

        def closing():
            events.append("close")
            closed.set()
            close()

        nvme.write, ram.close = slow, closing
        keeping = threading.Thread(target=host.tiers.cache.backfill, args=(slots,))
        keeping.start()
        assert asked.wait(HANG_S)
        service.stop()
        keeping.join()
        assert closed.wait(HANG_S)
        assert events == ["write", "close"]


@pytest.mark.parametrize("with_path", [False, True])
def test_a_damaged_older_draft_does_not_hide_a_newer_one(make_host, with_path, monkeypatch):
    host = make_host(nvme=0)
    save(host.store, "b", b"other")
    wait(host.store, "", Level.OBJECT)
    with monkeypatch.context() as patch:
        stop_looking(host, patch)
        save(host.store, "a", b"first")
        (damaged,) = host.tiers.ram.drafts()
        save(host.store, "a", b"second")
        with monkeypatch.context() as only:
            only.setattr(host.tiers.ram, "drafts", lambda: [damaged])
            damage_draft(host, with_path=with_path)
        drafts = host.tiers.drafts
        drafts._decoded._decoded.clear()
        drafts._by_path = StagedIndex(host.tiers.ram, drafts._decoded)  # as a new process would find them
        for slot in host.tiers.ram.drafts():
            slot.segment.put_back_changed_drafts([slot.index])
        assert load(host.store, "a") == b"second"
        if with_path:
            with pytest.raises(CorruptionError, match="perhaps to this path"):
                load(host.store, "b")
    with pytest.raises(CorruptionError, match=r"damaged and cannot be recovered: discard it .*, and write it again"):
        wait(host.store, "", Level.OBJECT)
    discard_conflict(host.store, "" if with_path else "a")
