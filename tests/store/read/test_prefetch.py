"""Prefetched files are complete in the requested tier, and stay there."""

import threading

import pytest
from support.tiered import MIB, content, save_at
from support.waiting import HANG_S

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError, NotFoundError
from tierfs.host.pending.levels import Level
from tierfs.host.slab.pool import KEPT_BYTES
from tierfs.host.slab.table import SlotState
from tierfs.store import evict, load, open_entry, prefetch, stat
from tierfs.threads import processors

MORE = KEPT_BYTES + 2 * CHUNK_BYTES


@pytest.fixture
def stored(make_host):
    """The content of a file "a" in the object tier, larger than the first segment of a ram tier."""
    data = content(MORE)
    save_at(make_host("writer", ram=0, nvme=0).store, "a", data, Level.OBJECT)
    return data


def read_held(host):
    """Read the file "a" while the object tier is down."""
    out = bytearray(MORE)
    entry = stat(host.store, "a")
    with host.held():
        open_entry(host.store, entry).read_into(0, memoryview(out))
    return out


def test_a_lone_process_that_prefetches_into_the_ram_tier_keeps_all_of_it(make_host, stored):
    host = make_host(ram=512 * MIB)
    assert prefetch(host.store, "a", "ram") == MORE
    assert read_held(host) == stored
    assert host.tiers.counters["ram_read_bytes"] == MORE


def test_prefetch_into_a_ram_tier_without_room_for_all_says_how_much_lies_there(make_host, monkeypatch):
    host = make_host(ram=80 * MIB)
    data = content(2 * MORE)
    save_at(make_host("other", ram=0, nvme=0).store, "b", data, Level.OBJECT)
    gets, real = [], host.objects.get
    monkeypatch.setattr(
        host.objects, "get", lambda key, *rest, **options: gets.append(key) or real(key, *rest, **options)
    )
    with pytest.raises(CapacityError, match=r"the ram tier now holds \d+ MiB of \d+ MiB: raise ram="):
        prefetch(host.store, "b", "ram")
    assert len([key for key in gets if "/chunks/" in key]) < 10, "it went on for long"
    assert load(host.store, "b") == data


def test_prefetch_gets_all_into_the_nvme_tier_through_a_small_ram_tier(make_host, stored):
    host = make_host(ram=24 * MIB, nvme=256 * MIB)
    assert prefetch(host.store, "a", "nvme") == MORE
    evict(host.store, "a", "ram")
    assert read_held(host) == stored
    assert host.tiers.counters["nvme_read_bytes"] == MORE


def test_prefetch_into_an_nvme_tier_without_room_for_all_is_refused(make_host, stored):
    host = make_host(ram=512 * MIB, nvme=48 * MIB)
    with pytest.raises(CapacityError, match="raise nvme="):
        prefetch(host.store, "a", "nvme")
    assert load(host.store, "a") == stored


@pytest.mark.parametrize("keeps_reads", [False, True])
def test_a_chunk_that_is_in_a_file_many_times_takes_one_place(make_host, keeps_reads):
    host = make_host(ram=40 * MIB)
    host.tiers.cache.keeps_reads = keeps_reads
    save_at(make_host("other", ram=0, nvme=0).store, "b", content(CHUNK_BYTES) * 10, Level.OBJECT)
    assert prefetch(host.store, "b", "ram") == 10 * CHUNK_BYTES
    assert host.tiers.ram.usage().clean_bytes < 2 * CHUNK_BYTES


def test_prefetch_keeps_present_chunks(make_host, stored):
    host = make_host(ram=160 * MIB)
    open_entry(host.store, stat(host.store, "a")).read_into(0, memoryview(bytearray(2 * CHUNK_BYTES)))
    save_at(make_host("other", ram=0, nvme=0).store, "b", content(5 * CHUNK_BYTES), Level.OBJECT)
    assert prefetch(host.store, "b", "ram") == 5 * CHUNK_BYTES
    for segment in host.tiers.ram.segments():
        for slot in segment.slots(states=(SlotState.CLEAN,)):
            segment._table.used_s[slot.index] -= 60  # as if those of "a" were older
    assert prefetch(host.store, "a", "ram") == MORE


def test_prefetch_of_what_is_not_there_changes_nothing(make_host):
    host = make_host()
    with pytest.raises(NotFoundError):
        prefetch(host.store, "nothing", "ram")
    assert not host.tiers.cache.shares_reads


def test_prefetched_ram_copies_end_with_their_process(make_host, stored):
    first = make_host(ram=512 * MIB)
    prefetch(first.store, "a", "ram")
    assert first.tiers.ram.usage().clean_bytes >= MORE
    first.close()
    assert make_host(ram=512 * MIB).tiers.ram.usage().host_bytes == 0


@pytest.fixture
def two_processors(monkeypatch):
    for name in ("_places", "_turns"):
        monkeypatch.setattr(processors(), name, threading.Semaphore(2))


@pytest.mark.usefixtures("two_processors")
def test_threads_that_wait_to_keep_what_they_read_do_not_make_the_ram_tier_grow(make_host, stored):
    host = make_host(ram=1024 * MIB)
    assert load(host.store, "a") == stored
    # A chunk that another thread is filling cannot be evicted, so one chunk more may be kept.
    assert host.tiers.ram.usage().used_bytes <= KEPT_BYTES + CHUNK_BYTES < MORE


@pytest.mark.usefixtures("two_processors")
def test_waiting_for_ram_does_not_block_processors(make_host, stored):
    host = make_host(ram=512 * MIB)
    began, goes_on = threading.Event(), threading.Event()
    real = host.tiers.ram.take

    def take(*arguments, **options):
        began.set()
        assert goes_on.wait(HANG_S)
        return real(*arguments, **options)

    host.tiers.ram.take = take
    waiting = threading.Thread(target=load, args=(host.store, "a"))
    waiting.start()
    try:
        assert began.wait(HANG_S)
        found = []
        other = threading.Thread(target=lambda: found.append(load(host.plain(), "a")))
        other.start()
        other.join(HANG_S)
        assert found == [stored]
    finally:
        goes_on.set()
        waiting.join(HANG_S)
