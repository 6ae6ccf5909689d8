"""What is prefetched lies in the tier that was asked for, all of it, and stays there."""

import pytest
from tiered import BIG, MIB, content, save_at

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError
from tierfs.flush.levels import Level
from tierfs.local.growth import FIRST_DATA_BYTES
from tierfs.store import evict, load, open_entry, prefetch, stat

MORE = FIRST_DATA_BYTES + 2 * CHUNK_BYTES


@pytest.fixture
def stored(make_host):
    """What a file "a" consists of, in the object tier: more than the first segment of a ram tier holds."""
    data = content(MORE)
    save_at(make_host("writer", ram=0, nvme=0).store, "a", data, Level.OBJECT)
    return data


def read_held(host):
    """The file "a", while no byte of it can come from the object tier."""
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


def test_prefetch_into_a_ram_tier_without_room_for_all_says_how_much_lies_there(make_host):
    host = make_host(ram=160 * MIB)
    data = content(2 * MORE)
    save_at(make_host("other", ram=0, nvme=0).store, "b", data, Level.OBJECT)
    with pytest.raises(CapacityError, match=r"the ram tier holds \d+ MiB of 192 MiB by now: raise ram="):
        prefetch(host.store, "b", "ram")
    assert load(host.store, "b") == data


def test_prefetch_of_more_chunks_at_once_than_the_ram_tier_holds_is_refused(make_host, stored):
    host = make_host(ram=40 * MIB)
    with pytest.raises(CapacityError, match="the ram tier does not hold 6 chunks beside what it holds: raise ram="):
        prefetch(host.store, "a", "ram")
    assert load(host.store, "a") == stored


def test_prefetch_gets_all_into_the_nvme_tier_through_a_small_ram_tier(make_host, stored):
    host = make_host(ram=40 * MIB, nvme=256 * MIB)
    assert prefetch(host.store, "a", "nvme") == MORE
    evict(host.store, "a", "ram")
    assert read_held(host) == stored
    assert host.tiers.counters["nvme_read_bytes"] == MORE


def test_prefetch_into_an_nvme_tier_without_room_for_all_is_refused(make_host, stored):
    host = make_host(ram=512 * MIB, nvme=48 * MIB)
    with pytest.raises(CapacityError, match="raise nvme="):
        prefetch(host.store, "a", "nvme")
    assert load(host.store, "a") == stored


def test_what_was_prefetched_into_the_ram_tier_outlives_its_process(make_host, stored):
    first = make_host(ram=512 * MIB)
    prefetch(first.store, "a", "ram")
    first.close()
    second = make_host(ram=512 * MIB)
    assert read_held(second) == stored
    assert second.tiers.counters["ram_read_bytes"] == MORE
    assert second.tiers.ram.own_segments() == []
    second.store.tiers.cache.evict(None, "ram")
    assert second.tiers.ram.usage().host_bytes == 0


def test_what_was_prefetched_gives_way_to_what_is_written(make_host, stored):
    first = make_host(ram=128 * MIB)
    prefetch(first.store, "a", "ram")
    first.close()
    second = make_host(ram=128 * MIB)
    data = content(BIG)
    save_at(second.store, "b", data, Level.OBJECT)
    assert load(second.store, "b") == data
    assert second.tiers.ram.usage().host_bytes <= 128 * MIB


def test_what_was_only_read_goes_with_its_process(make_host, stored):
    first = make_host(ram=512 * MIB)
    load(first.store, "a")
    assert first.tiers.ram.usage().clean_bytes > 0
    first.close()
    assert make_host(ram=512 * MIB).tiers.ram.usage().host_bytes == 0


def test_threads_that_wait_to_keep_what_they_read_do_not_make_the_ram_tier_grow(make_host, stored):
    host = make_host(ram=1024 * MIB)
    assert load(host.store, "a") == stored
    assert host.tiers.ram.usage().host_bytes < 2 * FIRST_DATA_BYTES
