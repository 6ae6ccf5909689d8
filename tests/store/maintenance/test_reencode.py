"""Chunks that were sent raw under pressure are encoded by gc, and their files keep their content."""

import pytest
from support.damaging import GRACE_S, chunk_of, make_world, middle
from support.served import KilledError, StepLink

from tierfs.format import keys
from tierfs.store import copy, delete, load, save, verify
from tierfs.store.chunks import store_chunk
from tierfs.store.maintenance.gc_turn import read_collector
from tierfs.store.tree.records import observe

MIB = 1 << 20
TEXT = b"nothing new under the sun\n" * (4 * MIB // 26)


@pytest.fixture
def world():
    return make_world()


def save_raw(store, path, data=TEXT):
    """Save a file as a flusher with a backlog does."""
    store_chunk(store, memoryview(bytearray(data)), pressure="backlog")
    save(store, path, data)


def stored(world):
    return sum(info.size for info in world.tier.list(keys.CHUNKS))


def settle(world):
    world.clock.sleep(GRACE_S + 5)
    world.gc()


def test_chunks_that_were_sent_raw_are_encoded_and_their_raw_objects_deleted(world):
    save_raw(world.store, "run/step_1/a")
    save(world.store, "run/step_1/copy", TEXT)
    assert stored(world) > len(TEXT)
    assert world.gc(reencode=True).reencoded.count == 0, "too young"
    world.clock.sleep(GRACE_S + 5)
    assert world.gc(reencode=True, dry_run=True).reencoded.count == 1
    report = world.gc(reencode=True)
    assert (report.reencoded.count, report.reached.count) == (1, 1)
    assert report.reencoded.bytes > len(TEXT) - MIB
    assert read_collector(world.store)[0].last["reencoded"]["count"] == 1
    before = observe(world.open_on(), "run/step_1/a").manifest
    for _ in range(3):
        settle(world)
    assert stored(world) < MIB
    for path in ("run/step_1/a", "run/step_1/copy"):
        assert load(world.open_on(), path) == TEXT
    assert world.gc(reencode=True).reencoded.count == 0
    assert observe(world.open_on(), "run/step_1/a").manifest == before
    verify(world.open_on())


def test_a_save_of_the_same_bytes_uses_the_encoded_chunk(world):
    save_raw(world.store, "step_1")
    world.clock.sleep(GRACE_S + 5)
    world.gc(reencode=True)
    copy(world.open_on(), "step_1", "step_2")
    for _ in range(3):
        settle(world)
    assert world.count(keys.CHUNKS) == 1
    assert load(world.open_on(), "step_2") == TEXT


def test_files_that_a_writer_may_replace_stay_as_they_are(world):
    save(world.store, "latest", b"first")
    save_raw(world.store, "latest")
    world.clock.sleep(GRACE_S + 5)
    assert world.gc(reencode=True).reencoded.count == 0
    world.store.lease_cache.release()
    assert world.gc(reencode=True, exclusive=True).reencoded.count == 1
    assert load(world.open_on(), "latest") == TEXT


def test_a_file_that_is_replaced_meanwhile_keeps_its_new_content(world):
    save_raw(world.store, "a")
    world.clock.sleep(GRACE_S + 5)
    link = StepLink(world.tier)
    world.gc(link, reencode=True, dry_run=True)
    for step in range(2, 3 * link.steps, 7):
        path = f"b{step}"
        save_raw(world.open_on(), path, b"%d" % step + TEXT)
        world.clock.sleep(GRACE_S + 5)
        world.gc(StepLink(world.tier, {step: lambda path=path: save(world.open_on(), path, b"newer")}), reencode=True)
        assert load(world.open_on(), path) == b"newer"


def test_a_kill_at_any_step_loses_nothing(world):
    step, kills = 1, 0
    while True:
        path = f"step_{step}/a"
        save_raw(world.open_on(), path, b"%d" % step + TEXT)
        world.clock.sleep(GRACE_S + 5)
        try:
            world.gc(StepLink(world.tier, kill_at=step), reencode=True)
        except KilledError:
            kills += 1
        assert load(world.open_on(), path) == b"%d" % step + TEXT
        world.clock.sleep(GRACE_S + 5)
        world.gc(reencode=True)
        assert load(world.open_on(), path) == b"%d" % step + TEXT
        delete(world.open_on(), path)
        if kills < step // 5:
            break
        step += 5
    assert kills > 3


def test_a_damaged_chunk_stays_and_the_others_are_encoded(world):
    save_raw(world.store, "damaged")
    middle(world.store, chunk_of(world.store, "damaged"))
    save_raw(world.store, "sound", b"sound" + TEXT)
    world.clock.sleep(GRACE_S + 5)
    assert world.gc(reencode=True).reencoded.count == 1
    assert load(world.open_on(), "sound") == b"sound" + TEXT
