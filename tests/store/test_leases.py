"""Each of the rules that keep garbage collection and writers apart."""

import uuid
from dataclasses import replace

import pytest
from support.forked import answer_of
from support.waiting import until

from tierfs.clock import ManualClock
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, DigestKind, digests_of
from tierfs.errors import CorruptionError, StoreError
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.format.keys import ChunkName
from tierfs.format.lease import Condemned, Lease
from tierfs.format.manifest import Row
from tierfs.objects import LocalObjects, MeasuredObjects, MemoryObjects, RetryingObjects
from tierfs.objects.wrappers.verify import as_promised
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import Store, WriteMode, Writer, copy, delete, load, open_entry, rename, save, stat
from tierfs.store.chunks import LOOK_BYTES_MIN
from tierfs.store.leases import LOOKS_AT_FIRST, LOOKS_EARNED, LOOKS_MAX, release_leases
from tierfs.store.tree.records import observe
from tierfs.testing import Fault, FaultyObjects

CONTENT = b"content" * 20000
OTHER = b"other" * 20000


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def tier():
    return MemoryObjects(f"/presence-{uuid.uuid4().hex}")


def open_on(objects, clock):
    descriptor = Descriptor("0" * 32, 0, DigestKind.XXH3_128, objects.capabilities, lease_s=60, grace_s=3600)
    return Store(objects, descriptor, url="store", clock=clock)


@pytest.fixture
def store(tier, clock):
    return open_on(tier, clock)


def rows_of(store, path):
    return observe(store, path).manifest.rows


def condemn(tier, *names, epoch=1):
    listed = Condemned(epoch, 0, DigestKind.XXH3_128, frozenset(names))
    tier.put(keys.condemned_key(epoch), [listed.encode()])


def remove_chunk(tier, name):
    tier.delete([keys.chunk_key(name)])


@pytest.mark.parametrize("by", ["a save", "a copy", "another writer"])
def test_a_condemned_chunk_is_stored_as_the_next_generation(store, tier, clock, by):
    save(store, "a", CONTENT)
    name = rows_of(store, "a")[0].name
    condemn(tier, name)
    clock.sleep(40)  # past half the lease: the writer renews it and reads the condemned list
    if by == "a copy":
        copy(store, "a", "b")
    else:
        delete(store, "a")
        save(store if by == "a save" else open_on(tier, clock), "b", CONTENT)
    assert rows_of(store, "b")[0].name == name._replace(generation=1)
    remove_chunk(tier, name)
    assert load(store, "b") == CONTENT


@pytest.mark.parametrize("how", ["ran out", "was swept"])
def test_chunks_are_checked_again_after_a_lease(store, tier, clock, how):
    save(store, "a", CONTENT)
    name = rows_of(store, "a")[0].name
    delete(store, "a")
    if how == "was swept":
        tier.delete([info.key for info in tier.list(keys.LEASES)])
    clock.sleep(61 if how == "ran out" else 40)
    remove_chunk(tier, name)
    save(store, "b", CONTENT)
    assert load(store, "b") == CONTENT


def begin(store, path):
    """Write a file whose first chunk is sent before it is closed. Return the writer, and the chunk's name."""
    content = CONTENT * 120
    writer = Writer(store, path)
    writer.write(content)
    name = ChunkName(digests_of(DigestKind.XXH3_128, content[:CHUNK_BYTES])[1])
    until(lambda: any(True for _ in store.objects.list(keys.chunk_key(name))))
    return writer, name


def test_a_listed_chunk_is_usable_until_condemned(store, tier, clock):
    base, delta = ChunkName(bytes(16)), ChunkName(bytes(15) + b"1", 0, b"recipe__")
    term = store.lease_cache.ensure()
    store.lease_cache.learn(term, [Row(delta, 1, 1, (base,))])
    assert store.lease_cache.unverified([Row(delta, 1, 1, (base,)), Row(base, 1, 1)])
    store.lease_cache.add_listed(term, [Row(delta, 1, 1, (base,))])
    assert not store.lease_cache.unverified([Row(delta, 1, 1, (base,)), Row(base, 1, 1)])
    condemn(tier, base)
    clock.sleep(40)
    store.lease_cache.ensure()
    assert len(store.lease_cache.unverified([Row(delta, 1, 1, (base,)), Row(base, 1, 1)])) == 2


def test_a_listed_chunk_does_not_count_as_seen(store):
    rows = [
        Row(ChunkName(bytes(16)), 1, 1),
        Row(ChunkName(bytes(15) + b"1", 0, b"recipe__"), 1, 1, (ChunkName(bytes(16)),)),
    ]
    store.lease_cache.add_listed(store.lease_cache.ensure(), rows)
    for row in rows:
        assert store.lease_cache.find(row.name.digest) is None
        assert store.lease_cache.find_listed(row.name.digest) == row
        store.lease_cache.add_verified(row.name)
    assert [store.lease_cache.find(row.name.digest) for row in rows] == [rows[0], None], (
        "what a delta needs was not read"
    )
    store.lease_cache.mark_damaged(rows[0].name)
    assert [store.lease_cache.find_listed(row.name.digest) for row in rows] == [None, None]


def test_a_seen_and_listed_chunk_needs_no_other_look(store, clock):
    row = Row(ChunkName(bytes(16)), 1, 1)
    delta = Row(ChunkName(bytes(15) + b"1", 0, b"recipe__"), 1, 1, (row.name,))
    lease_cache = store.lease_cache
    lease_cache.learn(lease_cache.ensure(), [delta])
    clock.sleep(61)
    lease_cache.add_listed(lease_cache.ensure(), [row, delta])
    assert [lease_cache.find(each.name.digest) for each in (row, delta)] == [None, None], "its base was not seen"
    lease_cache.learn(lease_cache.ensure(), [row])
    clock.sleep(61)
    term = lease_cache.ensure()
    assert lease_cache.find(row.name.digest) is None
    lease_cache.add_listed(term, [row, delta])
    assert [lease_cache.find(each.name.digest) for each in (row, delta)] == [row, delta]
    lease_cache.mark_damaged(row.name)
    lease_cache.clear_damaged(row.name)
    lease_cache.add_listed(term, [row, delta])
    assert [lease_cache.find(each.name.digest) for each in (row, delta)] == [None, None]


def test_readers_do_not_wait_for_a_lease(store):
    row = Row(ChunkName(bytes(16)), 1, 1)
    store.lease_cache.add_listed(store.lease_cache.ensure(), [row])
    with store.lease_cache._lock:
        store.lease_cache.add_verified(row.name)
    assert store.lease_cache.find(row.name.digest) is None


def test_listed_chunks_are_forgotten_with_their_lease(store, clock):
    row = Row(ChunkName(bytes(16)), 1, 1)
    term = store.lease_cache.ensure()
    store.lease_cache.add_listed(term, [row])
    clock.sleep(61)
    store.lease_cache.ensure()
    store.lease_cache.add_listed(term, [row])
    assert store.lease_cache.find_listed(row.name.digest) is None
    assert store.lease_cache.unverified([row])


def test_a_manifest_does_not_prove_that_a_chunk_exists(tier, clock):
    save(open_on(tier, clock), "a", CONTENT)
    store = open_on(tier, clock)
    copy(store, "a", "b")
    remove_chunk(tier, rows_of(store, "a")[0].name)
    save(store, "c", CONTENT)
    for path in ("a", "b", "c"):
        assert load(store, path) == CONTENT


def test_an_append_does_not_speak_for_the_chunks_that_it_keeps(tier, clock):
    save(open_on(tier, clock), "a", chunks(2, 0))
    store = open_on(tier, clock)
    with_more = Writer(store, "a", mode=WriteMode.APPEND)
    with_more.write(OTHER)
    with_more.commit()
    remove_chunk(tier, rows_of(store, "a")[0].name)
    save(store, "b", chunks(2, 0))
    assert load(store, "a") == chunks(2, 0) + OTHER


def test_a_reused_chunk_is_read_back_once_a_lease(tier, clock):
    measured = MeasuredObjects(tier)
    store = open_on(measured, clock)
    save(store, "a", CONTENT)
    gets = []
    for number in range(5):
        clock.sleep(20)
        gets.append(chunk_requests(measured, lambda number=number: save(store, f"b{number}", CONTENT))[0])
    assert gets == [1, 0, 0, 1, 0]


def test_an_own_remote_chunk_is_read_back_by_one_block(tier, clock):
    measured = MeasuredObjects(as_promised(tier, replace(tier.capabilities, host_local=False)))
    store = open_on(measured, clock)
    save(store, "a", chunks(1, 0))
    before = measured.snapshot()["get"]
    save(store, "b", chunks(1, 0))
    save(store, "c", chunks(1, 0))
    after = measured.snapshot()["get"]
    assert after["requests"] - before["requests"] <= 2
    assert after["bytes"] - before["bytes"] < 2 * BLOCK_BYTES


def test_chunks_are_checked_before_publishing_after_a_lease(store, tier, clock):
    writer, name = begin(store, "a")
    clock.sleep(61)
    remove_chunk(tier, name)
    with pytest.raises(StoreError, match=r"collected while this writer had lost contact.*write the file again"):
        writer.commit()
    assert observe(store, "a").record is None


def test_a_condemned_chunk_is_stored_anew_before_publishing(store, tier, clock):
    writer, name = begin(store, "a")
    condemn(tier, name)
    clock.sleep(40)
    writer.commit()
    assert rows_of(store, "a")[0].name == name._replace(generation=1)


def test_a_lease_is_released_unless_a_put_may_still_take_effect(store, tier, clock):
    save(store, "run/a", CONTENT)
    store.lease_cache.release()
    assert not list(tier.list(keys.LEASES))
    save(store, "run/b", CONTENT)  # goes on in a lease of its own
    (lease,) = tier.list(keys.LEASES)
    objects = FaultyObjects(tier)
    other = open_on(objects, clock)
    objects.inject(Fault.LATE, method="put", key_part="tree/run/c")
    with pytest.raises(StoreError):
        save(other, "run/c", CONTENT)
    other.lease_cache.release()
    assert {item.key for item in tier.list(keys.LEASES)} > {lease.key}


def test_leases_are_released_when_the_process_ends(store, tier):
    save(store, "a", CONTENT)
    release_leases()  # what the interpreter calls then
    assert not list(tier.list(keys.LEASES))


def test_a_forked_child_leaves_its_parents_lease(tmp_path, clock):
    objects = LocalObjects(tmp_path)
    store = open_on(objects, clock)
    save(store, "a", CONTENT)
    assert answer_of(release_leases) == "None"
    assert len(list(objects.list(keys.LEASES))) == 1


def test_a_list_that_gc_has_finished_with_is_forgotten(store, tier, clock):
    save(store, "a", CONTENT)
    name = rows_of(store, "a")[0].name
    delete(store, "a")
    condemn(tier, name)
    clock.sleep(40)
    save(store, "b", CONTENT)
    remove_chunk(tier, name)
    tier.delete([keys.condemned_key(1)])
    clock.sleep(61)
    assert store.lease_cache.is_unusable(name)
    store.lease_cache.ensure()
    assert not store.lease_cache.is_unusable(name)


def test_the_lease_is_renewed_conditionally_and_counts_up(store, tier, clock):
    for _ in range(3):
        store.lease_cache.ensure()
        clock.sleep(31)
    (info,) = tier.list(keys.LEASES)
    lease = Lease.decode(tier.read(info.key, 4096)[0], info.key)
    assert (lease.sequence, lease.duration_s, keys.lease_key(lease.holder)) == (3, 60, info.key)
    tier.delete([info.key])
    store.lease_cache.ensure()
    (other,) = tier.list(keys.LEASES)
    assert other.key != info.key
    assert Lease.decode(tier.read(other.key, 4096)[0], other.key).sequence == 1


def test_knowledge_ends_with_its_lease(store, tier, clock):
    cache, row = store.lease_cache, Row(ChunkName(bytes(16)), 1, 1)
    term = cache.ensure()
    cache.learn(term, [row])
    clock.sleep(59)
    assert cache.is_valid(term)
    clock.sleep(1)
    assert not cache.is_valid(term)
    assert cache.ensure() != term
    cache.learn(term, [row])
    assert cache.find(row.name.digest) is None
    term = cache.ensure()
    cache.learn(term, [row])
    assert cache.find(row.name.digest) == row
    tier.delete([info.key for info in tier.list(keys.LEASES)])  # as another client does when it has run out
    clock.sleep(31)
    assert cache.ensure() != term
    assert not cache.is_valid(term)
    assert cache.unverified([row]) == [row]


def test_a_delta_counts_as_its_base_does(store, tier, clock):
    cache, base = store.lease_cache, ChunkName(bytes(16))
    delta = Row(ChunkName(bytes(15) + b"1", 0, b"recipe__"), 1, 1, (base,))
    condemn(tier, base)
    term = cache.ensure()
    cache.add_listed(term, [delta])
    cache.learn(term, [delta])
    assert cache.find_listed(delta.name.digest) is None
    clock.sleep(29)  # not yet half of the lease
    assert cache.ensure() == term
    assert cache.is_unusable(base)
    clock.sleep(2)
    tier.delete([keys.condemned_key(1)])
    cache.add_listed(cache.ensure(), [delta])
    assert cache.find_listed(delta.name.digest) == delta
    cache.mark_damaged(base)
    assert cache.find_listed(delta.name.digest) is None


def test_all_objects_of_damaged_bytes_are_forgotten(store):
    cache, first = store.lease_cache, ChunkName(bytes(16))
    cache.learn(cache.ensure(), [Row(first._replace(generation=1), 1, 1)])
    cache.mark_damaged(first)
    assert cache.find(first.digest) is None
    assert (cache.is_damaged(first), cache.is_lost(first)) == (True, False)
    cache.clear_damaged(first)
    assert (cache.is_damaged(first), cache.is_lost(first)) == (False, True)
    cache.learn(cache.ensure(), [Row(first, 1, 1)])
    assert not cache.is_lost(first)


def test_a_put_is_too_late_one_grace_after_its_lease_began(store, clock):
    store.lease_cache.ensure()
    clock.sleep(3599)
    assert store.lease_cache.is_too_late() is False
    clock.sleep(1)
    assert store.lease_cache.is_too_late() is True


@pytest.mark.parametrize("is_collected", [False, True])
def test_a_put_of_a_grace_misses_what_was_collected_meanwhile(tier, clock, is_collected):
    objects = FaultyObjects(tier, clock=clock)
    store = open_on(objects, clock)
    writer, name = begin(store, "a")
    objects.inject(Fault.SLOW, method="put", key_part="/tree/", seconds=3600)
    if not is_collected:
        writer.commit()
        return
    remove_chunk(tier, name)
    with pytest.raises(StoreError, match="published more than a grace"):
        writer.commit()


def test_what_was_read_before_the_lease_proves_nothing(store, clock):
    cache, row = store.lease_cache, Row(ChunkName(bytes(16)), 1, 1)
    before = clock.monotonic()
    clock.sleep(1)
    term = cache.ensure()
    cache.add_listed(term, [row], since=before)
    assert cache.find_listed(row.name.digest) is None
    cache.add_listed(term, [row], since=clock.monotonic())
    assert cache.find_listed(row.name.digest) == row


def test_the_bases_that_were_seen_count_with_their_delta(store):
    cache, base = store.lease_cache, Row(ChunkName(bytes(16)), 1, 1)
    delta = Row(ChunkName(bytes(15) + b"1", 0, b"recipe__"), 1, 1, (base.name,))
    cache.learn(cache.ensure(), [delta], named=True)
    assert cache.unverified([delta, base]) == []


def test_a_check_counts_until_its_object_is_put_anew(store):
    cache, name = store.lease_cache, ChunkName(bytes(16))
    cache.add_listed(cache.ensure(), [Row(name, 1, 1)])
    cache.note_check(name, 7.0, is_whole=False)
    assert (cache.facts(name).checked_s, cache.facts(name).is_checked) == (7.0, False)
    cache.add_verified(name, is_whole=True)
    assert cache.facts(name).is_checked
    cache.note_put(name)
    assert (cache.facts(name).is_own, cache.facts(name).checked_s, cache.facts(name).is_checked) == (True, None, False)
    cache.mark_damaged(name)
    assert not cache.facts(name).is_own


def test_a_condemned_chunk_is_not_seen_when_it_is_named_again(store, tier, clock):
    cache, row = store.lease_cache, Row(ChunkName(bytes(16)), 1, 1)
    cache.learn(cache.ensure(), [row])
    condemn(tier, row.name)
    clock.sleep(40)
    cache.ensure()
    tier.delete([keys.condemned_key(1)])
    clock.sleep(40)
    cache.add_listed(cache.ensure(), [row])
    assert (cache.find(row.name.digest), cache.find_listed(row.name.digest)) == (None, row)


def test_a_condemned_list_is_read_when_it_has_changed(tier, clock):
    measured = MeasuredObjects(tier)
    cache, names = open_on(measured, clock).lease_cache, [ChunkName(bytes(15) + bytes([at])) for at in range(2)]
    condemn(tier, names[0])
    reads = []
    for listed in ([], [], names, []):
        if listed:
            condemn(tier, *listed)
        before = measured.snapshot()["read"]["requests"]
        cache.ensure()
        reads.append(measured.snapshot()["read"]["requests"] - before)
        clock.sleep(40)
    assert reads == [1, 0, 1, 0]
    assert all(map(cache.is_unusable, names))


def test_looks_are_earned_up_to_a_bound(store):
    def spent():
        return sum(iter(store.lease_cache.spend_look, False))

    assert spent() == LOOKS_AT_FIRST
    store.lease_cache.earn_looks()
    assert spent() == LOOKS_EARNED
    for _ in range(LOOKS_MAX + 1):
        store.lease_cache.earn_looks()
    assert spent() == LOOKS_MAX


def test_the_oldest_knowledge_is_dropped(store, monkeypatch):
    monkeypatch.setattr("tierfs.store.leases.KNOWN_MAX", 2)
    cache, names = store.lease_cache, [ChunkName(bytes(15) + bytes([at])) for at in range(3)]
    for name in names:
        cache.note_put(name)
    assert [cache.facts(name).is_own for name in names] == [False, True, True]
    cache.learn(cache.ensure(), [Row(name, 1, 1) for name in names])
    assert [cache.find(name.digest) is None for name in names] == [True, False, False]
    for name in names:
        cache.mark_damaged(name)
    assert [cache.is_damaged(name) for name in names] == [False, True, True]
    for name in names:
        cache.clear_damaged(name)
    assert [cache.is_lost(name) for name in names] == [False, True, True]


def test_a_renewal_that_outlasts_the_lease_is_an_error(tier, clock):
    faulty = FaultyObjects(tier, clock=clock)
    store = open_on(faulty, clock)
    faulty.inject(Fault.SLOW, method="put", key_part="/leases/", seconds=60)
    with pytest.raises(StoreError, match="too slow"):
        save(store, "a", CONTENT)
    save(store, "a", CONTENT)
    assert load(store, "a") == CONTENT


def test_a_renewal_whose_answer_was_lost_is_recognised(tier, clock):
    faulty = FaultyObjects(tier, clock=clock)
    store = open_on(RetryingObjects(faulty, clock=clock), clock)
    save(store, "a", CONTENT)
    term = store.lease_cache.ensure()
    clock.sleep(31)
    faulty.inject(Fault.LOST_RESPONSE, method="put", key_part="/leases/")
    assert store.lease_cache.ensure() == term
    assert faulty.pending == 0
    assert len(list(tier.list(keys.LEASES))) == 1


@pytest.mark.parametrize("method", ["list", "delete", None])
def test_leases_that_ran_out_long_ago_are_removed_if_possible(tier, clock, monkeypatch, caplog, method):
    save(open_on(tier, clock), "a", CONTENT)
    (lease,) = tier.list(keys.LEASES)
    now_ns = lease.modified_ns + (60 + 3600 + 10) * 1_000_000_000
    monkeypatch.setattr("time.time_ns", lambda: now_ns)
    faulty = FaultyObjects(tier)
    if method is not None:
        faulty.inject(Fault.DENIED, method=method, key_part="" if method == "delete" else keys.LEASES)
    save(open_on(faulty, clock), "b", OTHER)
    assert ("expired leases remain" in caplog.text) == (method is not None)
    assert (lease.key in {info.key for info in tier.list(keys.LEASES)}) == (method is not None)


def test_leases_of_a_tier_without_times_stay(tier, clock):
    class Timeless(WrappedObjects):
        def list(self, prefix, *, delimiter=False):
            for item in super().list(prefix, delimiter=delimiter):
                yield replace(item, modified_ns=0)

    for name in ("a", "b"):
        save(open_on(Timeless(tier), clock), name, CONTENT)
    assert len(list(tier.list(keys.LEASES))) == 2


def test_something_else_among_the_condemned_lists_stops_nobody(store, tier):
    tier.put(f"{keys.GC}.DS_Store", [b"rubbish"])
    save(store, "a", CONTENT)
    assert load(store, "a") == CONTENT


def test_a_file_of_more_chunks_than_are_remembered_is_published(store, monkeypatch):
    monkeypatch.setattr("tierfs.store.leases.KNOWN_MAX", 1)
    content = b"".join(bytes([number]) * (16 << 20) for number in range(3))
    save(store, "a", content)
    assert load(store, "a") == content


@pytest.mark.usefixtures("indirect")
def test_the_chunks_of_an_indirect_table_are_checked_too(store, tier, clock):
    writer, name = begin(store, "a")
    clock.sleep(61)
    remove_chunk(tier, name)
    with pytest.raises(StoreError, match="collected"):
        writer.commit()
    save(store, "b", CONTENT)
    save(store, "b", OTHER, mode=WriteMode.APPEND)
    rename(store, "b", "d")
    copy(store, "d", "b")
    assert load(store, "b") == load(store, "d") == CONTENT + OTHER
    manifest = observe(store, "b").manifest
    assert manifest.indirect
    clock.sleep(61)
    remove_chunk(tier, manifest.rows[0].name)
    with pytest.raises(CorruptionError):
        copy(store, "b", "c")


def chunk_requests(measured, action):
    """Return the numbers of get and put requests. Here only chunks are read by get. Puts include other objects."""
    before = measured.snapshot()
    action()
    after = measured.snapshot()
    return tuple(after[method]["requests"] - before[method]["requests"] for method in ("get", "put"))


def chunks(number, kind):
    """Return the content of ``number`` chunks."""
    return b"".join(bytes([kind, index]) * (8 << 20) for index in range(number))


@pytest.mark.usefixtures("one_transfer")
def test_chunks_are_looked_for_only_while_some_are_found(tier, clock):
    measured = MeasuredObjects(tier)
    first, other = open_on(measured, clock), open_on(measured, clock)
    looks, puts = chunk_requests(measured, lambda: save(first, "a", chunks(6, 0)))
    assert looks == 2, "nothing was there, so nobody went on looking"
    assert puts == 6 + 2  # plus the record and the lease
    looks, puts = chunk_requests(measured, lambda: save(other, "b", chunks(6, 0)))
    assert (looks, puts) == (6 * 2, 2), "each find pays for the next look, so nothing is sent that is there"


@pytest.mark.usefixtures("one_transfer")
def test_a_chunk_sent_in_vain_makes_the_next_ones_looked_for(tier, clock):
    measured = MeasuredObjects(tier)
    first, other = open_on(measured, clock), open_on(measured, clock)
    save(first, "a", chunks(4, 1))
    save(other, "b", chunks(4, 2))  # uses up the looks
    looks, puts = chunk_requests(measured, lambda: save(other, "a2", chunks(4, 1)))
    # One look at the chunk that was sent and refused, and three at the others. Each found chunk is also read back.
    assert looks == (1 + 3) * 2
    assert puts == 1 + 1
    assert load(other, "a2") == chunks(4, 1)


@pytest.mark.parametrize(("length", "gets"), [(12 << 20, 1), (1 << 20, 2)], ids=["most", "a-little"])
def test_most_of_an_encoded_chunk_comes_in_one_request(tier, clock, length, gets):
    measured = MeasuredObjects(tier)
    store = open_on(measured, clock)
    content = b"".join(b"%07d," % number for number in range(12 << 17))
    save(store, "a", content)
    out = bytearray(length)
    reader = open_entry(store, stat(store, "a"))
    assert chunk_requests(measured, lambda: reader.read_into(0, memoryview(out)))[0] == gets
    assert out == content[:length]


@pytest.mark.usefixtures("one_transfer")
@pytest.mark.parametrize(("length", "expected"), [(LOOK_BYTES_MIN - 1, 0), (LOOK_BYTES_MIN, 1)])
def test_little_is_sent_without_a_look(tier, clock, length, expected):
    # A look would cost as much as sending.
    measured, content = MeasuredObjects(tier), chunks(1, 3)[:length]
    first, again = open_on(measured, clock), open_on(measured, clock)
    assert chunk_requests(measured, lambda: save(first, "a", content)) == (expected, 1 + 2)
    assert chunk_requests(measured, lambda: save(again, "b", content)) == (1 + 1, 1 + 2 - expected), (
        "sent in vain, or found, and read back"
    )
    assert load(again, "b") == content


@pytest.mark.usefixtures("one_transfer")
def test_small_chunks_are_looked_for_without_conditional_create(tier, clock):
    measured = MeasuredObjects(as_promised(tier, replace(tier.capabilities, conditional_create=False)))
    content = chunks(1, 3)[: LOOK_BYTES_MIN - 1]
    save(open_on(measured, clock), "a", content)
    again = open_on(measured, clock)
    assert chunk_requests(measured, lambda: save(again, "b", content)) == (1 + 1, 2), (
        "looked for, read back, and not put"
    )
    assert load(again, "b") == content
