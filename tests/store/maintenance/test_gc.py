"""The steps of a gc run: reasons to keep, kills at each step, damage, concurrent gcs, stale answers."""

import json
from dataclasses import replace

import pytest
from support.damaging import GRACE_S, LEASE_S, make_world, middle, pass_grace
from support.served import KilledError, StepLink

from tierfs.errors import ConflictError, InvalidInputError, StoreError
from tierfs.format import keys
from tierfs.objects import OVERWRITE
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import Store, Writer, delete, load, save, verify
from tierfs.store.maintenance.gc_turn import Turn

ONE, TWO, THREE = b"one" * 1000, b"two" * 2000, b"three" * 3000


@pytest.fixture
def world():
    return make_world()


def three_files(world):
    for path, content in (("a", ONE), ("b", TWO), ("c", THREE)):
        save(world.store, path, content)


class Retained(WrappedObjects):
    """A bucket with its own retention: every put needs a checksum."""

    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        assert checksum is not None, key
        return super().put(key, data, mode=mode, checksum=checksum)


def test_every_put_of_gc_has_a_checksum(world):
    three_files(world)
    Turn(world.store).begin()
    with pytest.raises(ConflictError, match="another gc is running"):
        world.gc(Retained(world.tier))
    world.clock.sleep(LEASE_S + 3)
    assert world.gc(Retained(world.tier)).reached.count == 3


def test_chunks_are_deleted_one_grace_after_condemnation(world):
    three_files(world)
    delete(world.store, "b")
    first = world.gc()
    assert (first.young.count, first.condemned.count, first.reached.count) == (1, 0, 2), "too young"
    pass_grace(world.store)
    second = world.gc()
    assert (second.condemned.count, second.deleted.count) == (1, 0)
    assert second.tombstones.count == 1
    assert GRACE_S <= second.next_s <= GRACE_S + 5
    third = world.gc()
    assert (third.waiting.count, third.deleted.count) == (1, 0)
    world.clock.sleep(second.next_s)
    fourth = world.gc()
    assert (fourth.deleted.count, fourth.deleted.bytes) == (1, second.condemned.bytes)
    assert world.count(keys.CHUNKS) == 2
    assert world.count(keys.TREE) == 2
    pass_grace(world.store)
    assert world.gc().lists.count == 1
    assert [item.key for item in world.tier.list(keys.GC)] == [keys.COLLECTOR]
    assert (load(world.store, "a"), load(world.store, "c")) == (ONE, THREE)


def test_a_save_outlives_the_tombstone_that_it_replaces(world):
    save(world.store, "b", TWO)
    delete(world.store, "b")
    pass_grace(world.store)
    first, second = Writer(world.store, "b"), Writer(world.open_on(), "b")
    first.write(ONE)
    second.write(THREE)
    assert world.gc().tombstones.count == 1
    first.commit()
    with pytest.raises(ConflictError):
        second.commit()
    assert load(world.store, "b") == ONE


@pytest.mark.parametrize("dry_run", [True, False])
def test_chunks_that_files_need_and_that_are_missing_are_counted(world, dry_run):
    three_files(world)
    for key in [item.key for item in world.tier.list(keys.CHUNKS)][:2]:
        world.tier.delete([key])
    report = world.gc(dry_run=dry_run)
    assert (report.missing, report.reached.count) == (2, 1)
    assert not report.is_blocked


def test_a_dry_run_changes_nothing_and_says_the_same(world):
    three_files(world)
    delete(world.store, "b")
    pass_grace(world.store)
    before = {item.key: item.version for item in world.tier.list("")}
    would = world.gc(dry_run=True)
    assert {item.key: item.version for item in world.tier.list("")} == before
    did = world.gc()
    assert (would.condemned, would.tombstones, would.reached) == (did.condemned, did.tombstones, did.reached)
    pass_grace(world.store)
    assert world.gc(dry_run=True).deleted == world.gc().deleted
    json.dumps(did.as_dict())


def test_exclusive_deletes_at_once_and_is_refused_while_a_writer_has_a_lease(world):
    three_files(world)
    delete(world.store, "b")
    with pytest.raises(ConflictError, match="live lease"):
        world.gc(exclusive=True)
    world.clock.sleep(LEASE_S + 5)
    assert world.gc(exclusive=True).deleted.count == 1
    assert world.count(keys.CHUNKS) == 2
    assert verify(world.open_on()).damage == []


def test_an_exclusive_dry_run_changes_nothing_and_tells_the_truth(world):
    three_files(world)
    delete(world.store, "b")
    world.clock.sleep(LEASE_S + 5)
    before = {item.key: item.version for item in world.tier.list("")}
    would = world.gc(dry_run=True, exclusive=True)
    assert {item.key: item.version for item in world.tier.list("")} == before
    did = world.gc(exclusive=True)
    assert (would.deleted, would.condemned) == (did.deleted, did.condemned)
    assert did.deleted.count == 1
    assert world.gc(dry_run=True, exclusive=True).deleted.count == 0


def test_exclusive_deletes_what_an_earlier_run_condemned(world):
    three_files(world)
    delete(world.store, "b")
    pass_grace(world.store)
    assert world.gc().condemned.count == 1
    would, did = world.gc(dry_run=True, exclusive=True), world.gc(exclusive=True)
    assert (did.deleted.count, did.waiting.count) == (1, 0)
    assert would.deleted == did.deleted
    assert world.count(keys.CHUNKS) == 2


def test_a_writer_that_begins_during_an_exclusive_run_stops_it(world):
    three_files(world)
    delete(world.store, "b")
    world.clock.sleep(LEASE_S + 5)
    other = world.open_on()
    link = StepLink(world.tier, {})

    def step(what, step=link.step):
        step(what)
        if what.startswith(f"answer put {keys.GC}0"):
            save(other, "again", ONE)

    link.step = step
    with pytest.raises(ConflictError, match="live lease"):
        world.gc(link, exclusive=True)
    assert world.count(keys.CHUNKS) == 3


def test_a_store_for_one_writer_is_collected_exclusively_or_not_at_all():
    world = make_world()
    endpoint = replace(world.tier.capabilities, conditional_update=False)
    world = make_world(endpoint=endpoint)
    three_files(world)
    delete(world.store, "b")
    with pytest.raises(InvalidInputError, match="--exclusive"):
        world.gc()
    world.clock.sleep(LEASE_S + 5)
    assert world.gc(exclusive=True).deleted.count == 1


def test_one_gc_at_a_time(world):
    three_files(world)
    errors = []

    def another():
        with pytest.raises(ConflictError, match="another gc is running") as raised:
            world.gc()
        errors.append(raised.value)

    world.gc(StepLink(world.tier, {20: another}))
    assert len(errors) == 1
    world.gc()


def test_a_killed_gc_is_followed_by_the_next_one_when_its_turn_is_over(world):
    three_files(world)
    with pytest.raises(KilledError):
        world.gc(StepLink(world.tier, kill_at=20))
    with pytest.raises(ConflictError, match="if it was killed, its turn ends in"):
        world.gc()
    world.clock.sleep(LEASE_S + 5)
    world.gc()


def steps_of(world):
    """Fill a store so that gc has every kind of work: lists, chunks to delete and condemn, tombstones, leases."""
    three_files(world)
    save(world.store, "d", ONE + TWO)
    save(world.store, "e", TWO + THREE)
    delete(world.store, "b")
    pass_grace(world.store)
    world.gc()
    pass_grace(world.store)
    delete(world.open_on(), "c")
    world.gc()
    delete(world.open_on(), "e")
    pass_grace(world.store)


def test_gc_goes_on_after_a_kill_at_every_step():
    world = make_world()
    steps_of(world)
    link = StepLink(world.tier)
    report = world.gc(link)
    assert report.deleted.count
    assert report.condemned.count
    assert report.lists.count
    assert report.tombstones.count
    assert link.steps > 30
    for at in range(1, link.steps + 1):
        world = make_world()
        steps_of(world)
        with pytest.raises(KilledError):
            world.gc(StepLink(world.tier, kill_at=at))
        for path, content in (("a", ONE), ("d", ONE + TWO)):
            assert load(world.open_on(), path) == content
        for _ in range(4):
            pass_grace(world.store)
            world.gc()
        for path, content in (("a", ONE), ("d", ONE + TWO)):
            assert load(world.open_on(), path) == content
        assert world.count(keys.CHUNKS) == 2
        assert world.count(keys.TREE) == 2
        assert world.count(keys.GC) == 1


def test_a_record_that_cannot_be_read_stops_everything_until_a_person_gives_it_up(world):
    three_files(world)
    delete(world.store, "b")
    pass_grace(world.store)
    world.gc()
    pass_grace(world.store)
    middle(world.store, keys.record_key("a"))
    before = world.count(keys.CHUNKS)
    report = world.gc()
    assert report.is_blocked
    assert [each.path for each in report.unreadable] == ["a"]
    assert (world.count(keys.CHUNKS), world.count(keys.GC)) == (before, 2)
    assert world.gc(without=["c"]).is_blocked
    after = world.gc(without=["a"])
    assert not after.is_blocked
    assert [each.path for each in after.passed_over] == ["a"]
    assert (after.deleted.count, after.condemned.count) == (1, 1)


@pytest.mark.parametrize("then", ["replaced", "removed", "neither"])
def test_a_record_that_changes_while_it_is_read_is_no_damage(world, then):
    three_files(world)
    key = keys.record_key("a")

    class Changing(WrappedObjects):
        answers = 0

        def read(self, read, limit):
            data, info = super().read(read, limit)
            if read != key or (self.answers == 2 and then != "neither"):
                return data, info
            self.answers += 1  # what cannot be decoded is asked for twice
            if self.answers == 2 and then == "replaced":
                save(world.store, "a", TWO)
            elif self.answers == 2 and then == "removed":
                world.tier.delete([key])
            return b"what is read amid a change", info

    report = world.gc(Changing(world.tier))
    assert report.is_blocked == (then == "neither")
    assert [each.path for each in report.unreadable] == (["a"] if then == "neither" else [])


def test_a_damaged_condemned_list_goes_after_a_grace_and_nothing_is_deleted_for_it(world):
    three_files(world)
    delete(world.store, "b")
    pass_grace(world.store)
    world.gc()
    (key,) = [item.key for item in world.tier.list(keys.GC) if keys.is_condemned_key(item.key)]
    middle(world.store, key)
    pass_grace(world.store)
    report = world.gc()
    assert (report.deleted.count, report.condemned.count) == (0, 1), "it is condemned anew"
    pass_grace(world.store)
    assert world.gc().deleted.count == 1
    pass_grace(world.store)
    world.gc()
    save(world.open_on(), "b", TWO)
    assert load(world.open_on(), "b") == TWO


def test_a_damaged_record_of_the_collector_is_made_anew(world):
    three_files(world)
    delete(world.store, "b")
    pass_grace(world.store)
    world.gc()
    first = {item.key for item in world.tier.list(keys.GC)}
    middle(world.store, keys.COLLECTOR)
    with pytest.raises(ConflictError):
        world.gc()
    pass_grace(world.store)
    world.gc()
    pass_grace(world.store)
    assert world.gc().deleted.count == 1
    assert {item.key for item in world.tier.list(keys.GC)} == first, "no list is published under a number that was used"


class StaleHeads(WrappedObjects):
    """A cache in front of the object tier, which answers every HEAD with the first result."""

    def __init__(self, inner):
        super().__init__(inner)
        self._seen = {}

    def head(self, key):
        return self._seen.setdefault(key, super().head(key))


def test_old_metadata_is_told_as_that(world):
    three_files(world)
    world.gc()
    stale = StaleHeads(world.tier)
    stale.head(keys.COLLECTOR)
    with pytest.raises(StoreError, match="clocks are not the cause"):
        world.gc(stale)


def test_an_interval_follows_the_longest_lease(world):
    three_files(world)
    slow = make_world(lease_s=300)
    slow.tier = world.tier
    save(
        Store(world.tier, replace(world.store.descriptor, lease_s=300), url="store", clock=world.clock), "d", ONE + ONE
    )
    delete(world.store, "b")
    pass_grace(world.store)
    assert world.gc().next_s > 2 * 300
