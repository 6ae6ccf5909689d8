"""Each rule of the gc protocol, with an interleaving that needs it: without the rule, a needed chunk is deleted."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.damaging import GRACE_S, LEASE_S, make_world
from support.served import StepLink

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import ConflictError, CorruptionError, StoreError
from tierfs.format.manifest import Manifest
from tierfs.store import Writer, delete, load, rename, save
from tierfs.store.leases import LeaseCache
from tierfs.store.maintenance.gc.name_set import NameSet
from tierfs.store.maintenance.gc.run import _Collection
from tierfs.store.maintenance.gc_turn import Turn
from tierfs.store.tree import copy as copying
from tierfs.testing import Fault, FaultyObjects

CONTENT = b"content" * 1000


@pytest.fixture
def world():
    world = make_world()

    def pass_time(seconds=GRACE_S + 5):
        world.clock.sleep(seconds)

    def collect_all():
        """Condemn, delete, and remove the condemned lists."""
        for _ in range(4):
            world.gc()
            pass_time()

    return SimpleNamespace(**vars(world), pass_time=pass_time, collect_all=collect_all, writer=world.store)


def check(world, *paths):
    """Check that a new reader can read these paths."""
    for path in paths:
        assert load(world.open_on(world.tier), path) == CONTENT


def make_garbage(world):
    """Create a chunk that no file needs and that is old enough to be condemned. The writer has just seen it."""
    save(world.writer, "old", CONTENT)
    world.pass_time()
    save(world.writer, "again", CONTENT)
    delete(world.writer, "old")
    delete(world.writer, "again")


# -- interleavings -----------------------------------------------------------------------------------------------------


def a_writer_refers_to_what_was_condemned_just_now(world):
    make_garbage(world)
    world.gc()
    writer = begin(world)
    world.gc()
    writer.commit()
    check(world, "new")
    world.collect_all()
    check(world, "new")


def begin(world):
    """Begin a file whose chunks the writer has seen in the store. It is committed later."""
    writer = Writer(world.writer, "new")
    writer.write(CONTENT)
    writer._finish_rows()
    return writer


def a_writer_keeps_its_lease_for_longer_than_a_grace(world):
    make_garbage(world)
    writer = begin(world)
    world.gc()
    stay_busy(world)
    world.gc()
    commit(world, writer)


def commit(world, writer):
    """Commit a file whose chunks were collected. The commit fails, since the writer no longer has the bytes."""
    try:
        writer.commit()
    except StoreError as error:
        assert "was collected" in str(error)  # noqa: PT017 - without the rule it is published, and that is what fails
    assert load_or_nothing(world, "new") in (None, CONTENT)


def stay_busy(world):
    for number in range(9):
        world.pass_time(9)
        save(world.writer, "busy", b"busy %d" % number)


def a_second_list_names_what_the_writer_knows(world):
    save(world.writer, "other", CONTENT[::-1])
    save(world.writer, "old", CONTENT)
    world.pass_time()
    delete(world.writer, "other")
    world.gc()
    save(world.writer, "busy", b"busy")  # reads the first list
    delete(world.writer, "old")
    writer = begin(world)
    world.gc()
    stay_busy(world)
    world.gc()
    commit(world, writer)


def a_writer_comes_back_after_its_lease_ran_out(world):
    make_garbage(world)
    writer = begin(world)
    world.collect_all()
    commit(world, writer)


def a_file_is_renamed_behind_the_cursor_of_each_mark(world):
    save(world.writer, "m", b"between")
    save(world.writer, "z", CONTENT)
    world.pass_time()
    for target in ("a", "b"):
        # The listing has passed the target's key, but not yet the source's.
        world.gc(
            Steps(
                StepLink(world.tier), "listed .tierfs/tree/m!", lambda target=target: rename(world.writer, "z", target)
            )
        )
        check(world, target)
        world.pass_time()
        rename(world.writer, target, "z")
    check(world, "z")
    world.collect_all()
    check(world, "z")


def a_process_stands_still_between_a_look_and_its_lease(world):
    save(world.writer, "a", CONTENT)
    other = world.open_on(world.tier)
    observe = copying.observe

    def observe_and_stand_still(store, path):
        found = observe(store, path)
        if path == "a":
            delete(other, "a")
            world.pass_time()
            world.collect_all()
            world.collect_all()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "observe", observe_and_stand_still)
        with pytest.raises((ConflictError, StoreError)):
            rename(world.writer, "a", "b")
    assert load_or_nothing(world, "b") in (None, CONTENT)


def a_process_stands_still_right_before_it_publishes(world):
    make_garbage(world)
    encode = Manifest.encode

    def encode_and_stand_still(self, path):
        found = encode(self, path)
        if path == "new":
            world.collect_all()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "encode", encode_and_stand_still)
        try:
            save(world.writer, "new", CONTENT)
        except StoreError as error:
            assert "was paused" in str(error)  # noqa: PT017 - without the rule it is published, and that is what fails
    assert load_or_nothing(world, "new") in (None, CONTENT)


def a_gc_stands_still_while_another_one_does_all(world):
    make_garbage(world)
    world.gc()
    world.pass_time()

    def meanwhile():
        world.pass_time(LEASE_S + 5)
        world.collect_all()
        save(world.writer, "new", CONTENT)

    # By now the collector has listed the chunks that it is going to delete.
    stalled = Steps(StepLink(world.tier), "listed .tierfs/chunks/", meanwhile)
    with pytest.raises(ConflictError):
        world.gc(stalled)
    check(world, "new")


def a_deletion_arrives_late(world):
    make_garbage(world)
    world.gc()
    world.pass_time()
    faulty = FaultyObjects(world.tier)
    faulty.inject(Fault.LATE, method="delete", key_part="/chunks/")
    with pytest.raises(StoreError):
        world.gc(faulty)
    world.gc()
    save(world.writer, "new", CONTENT)
    faulty.deliver_late()
    check(world, "new")


class Steps(StepLink):
    """Run an action at the first step whose name begins like this."""

    def __init__(self, link, at, action):
        super().__init__(link.inner)
        self._at, self._action = at, action

    def step(self, what):
        super().step(what)
        if self._action is not None and what.startswith(self._at):
            action, self._action = self._action, None
            action()


def load_or_nothing(world, path):
    try:
        return load(world.open_on(world.tier), path)
    except FileNotFoundError:
        return None


# -- rules, each disabled ----------------------------------------------------------------------------------------------


def no_grace(patch):
    patch.setattr(_Collection, "_is_over", lambda *_: True)


def condemned_lists_are_not_read(patch):
    patch.setattr(LeaseCache, "_read_condemned", lambda _: None)


def only_the_first_list_is_read(patch):
    read = LeaseCache._read_condemned

    def once(self):
        if not self._condemned:
            read(self)

    patch.setattr(LeaseCache, "_read_condemned", once)


def no_second_mark(patch):
    patch.setattr(NameSet, "contains", lambda self, data: np.zeros(len(data) // self._width, np.bool_))


def knowledge_outlives_its_lease(patch):
    patch.setattr(LeaseCache, "_begin_term", lambda *_: None)


def looks_from_before_the_lease_count(patch):
    hear = LeaseCache.add_listed
    patch.setattr(LeaseCache, "add_listed", lambda self, term, rows, since=None: hear(self, term, rows))


def a_lease_is_not_looked_at_before_a_put(patch):
    patch.setattr(LeaseCache, "is_valid", lambda *_: True)
    patch.setattr(LeaseCache, "is_too_late", lambda *_: False)


def a_turn_is_not_looked_at_before_a_deletion(patch):
    patch.setattr(Turn, "hold", lambda _: None)


def lists_go_with_their_chunks(patch):
    finish = _Collection._finish

    def finish_and_remove(self, epochs, *others):
        finish(self, epochs, *others)
        self._remove_lists([epoch for epoch, state in self._turn.record.epochs.items() if state.swept_ns is not None])

    patch.setattr(_Collection, "_finish", finish_and_remove)


PAIRS = [
    (a_writer_refers_to_what_was_condemned_just_now, no_grace),
    (a_writer_refers_to_what_was_condemned_just_now, no_second_mark),
    (a_writer_keeps_its_lease_for_longer_than_a_grace, condemned_lists_are_not_read),
    (a_second_list_names_what_the_writer_knows, only_the_first_list_is_read),
    (a_writer_comes_back_after_its_lease_ran_out, knowledge_outlives_its_lease),
    (a_file_is_renamed_behind_the_cursor_of_each_mark, condemned_lists_are_not_read),
    (a_process_stands_still_between_a_look_and_its_lease, looks_from_before_the_lease_count),
    (a_process_stands_still_right_before_it_publishes, a_lease_is_not_looked_at_before_a_put),
    (a_gc_stands_still_while_another_one_does_all, a_turn_is_not_looked_at_before_a_deletion),
    (a_deletion_arrives_late, lists_go_with_their_chunks),
]


@pytest.mark.parametrize("interleaving", dict.fromkeys(pair[0] for pair in PAIRS), ids=lambda each: each.__name__)
def test_everything_can_be_read_when(interleaving, world):
    interleaving(world)


@pytest.mark.parametrize(("interleaving", "mutation"), PAIRS, ids=lambda each: each.__name__)
def test_a_chunk_is_gone_without_a_rule(interleaving, mutation, world, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises((CorruptionError, AssertionError, pytest.fail.Exception)):
        interleaving(world)


def test_a_write_may_take_longer_than_gc_waits(world):
    writer = Writer(world.writer, "a")
    for number in range(9):
        writer.write(bytes([number]) * CHUNK_BYTES)
        world.pass_time(GRACE_S / 2)
        world.gc()
    writer.commit()
    world.collect_all()
    found = load(world.open_on(world.tier), "a")
    assert [found[at] for at in range(0, len(found), CHUNK_BYTES)] == list(range(9))
