"""Reference lists: when they are written, when a mark may use them, and when it must not."""

import random

import pytest
from support.damaging import content, gc, keys_below, make_store, pass_grace, paths, reopened, run
from support.served import KilledError, StepLink

from tierfs.format import keys
from tierfs.format.upkeep import ReferenceList, record_check
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import copy, delete, load, rename, save, usage, usages, verify
from tierfs.store.maintenance.gc.name_set import NameSet
from tierfs.store.tree.references import write_references
from tierfs.testing import Fault, PlannedFault
from tierfs.testing.faults import flip_bit


def checkpoint(store, directory, *numbers):
    for number in numbers:
        save(store, f"{directory}/__{number}_0", content(number))
    save(store, f"{directory}/.metadata", content(max(numbers) * 100))
    write_references(store, directory)


@pytest.fixture
def store():
    store = make_store("auto")
    checkpoint(store, "run/1", 1, 2)
    checkpoint(store, "run/2", 2, 3)
    save(store, "loose", content(50))
    return store


class Reads(WrappedObjects):
    """Record the keys of all reads."""

    def __init__(self, inner):
        super().__init__(inner)
        self.read_keys = []

    def read(self, key, limit):
        self.read_keys.append(key)
        return super().read(key, limit)


def read_by(store):
    objects = Reads(store.objects)
    report = gc(store, objects)
    return report, [key for key in objects.read_keys if key.startswith((keys.TREE, keys.REFERENCES))]


def decoded(store, directory):
    key = keys.references_key(directory)
    return ReferenceList.decode(store.objects.read(key, 1 << 20)[0], key)


def test_a_list_is_written_with_the_checkpoint(store):
    found = decoded(store, "run/1")
    assert found.path == "run/1"
    versions = {item.key: item.version for item in store.objects.list(keys.directory_prefix("run/1"))}
    assert found.records == b"".join(sorted(record_check(key, version) for key, version in versions.items()))
    assert len(found.names) == 3 * 28
    assert keys_below(store, keys.REFERENCES) == {keys.references_key("run/1"), keys.references_key("run/2")}


def test_a_mark_reads_one_object_for_each_checkpoint(store):
    report, read = read_by(store)
    assert sorted(read) == sorted(
        [keys.references_key("run/1"), keys.references_key("run/2"), keys.record_key("loose")]
    )
    assert (report.files, report.by_list, report.made_lists, report.reached.count) == (7, 6, 0, 6)


def overwritten(store):
    save(reopened(store), "run/1/__1_0", content(11))


def added(store):
    save(reopened(store), "run/1/more", content(11))


def deleted(store):
    delete(reopened(store), "run/1/__1_0")


def moved_in(store):
    rename(reopened(store), "loose", "run/1/loose")


def copied_in(store):
    copy(reopened(store), "loose", "run/1/loose")


def damaged(store):
    flip_bit(store.objects, keys.references_key("run/1"), 300)


def removed(store):
    store.objects.delete([keys.references_key("run/1")])


def of_another(store):
    data = store.objects.read(keys.references_key("run/2"), 1 << 20)[0]
    store.objects.put(keys.references_key("run/1"), [data])


@pytest.mark.parametrize("change", [overwritten, added, deleted, moved_in, copied_in, damaged, removed, of_another])
def test_a_list_that_does_not_speak_for_what_is_there_counts_for_nothing_and_is_made_again(store, change):
    change(store)
    before = {entry: load(reopened(store), entry) for entry in paths(store)}
    for _ in range(4):
        report, _ = read_by(store)
        assert not report.is_blocked
        pass_grace(store)
    assert {entry: load(reopened(store), entry) for entry in paths(store)} == before
    assert verify(reopened(store)).damage == []
    report, read = read_by(store)
    assert report.by_list >= 6 - (change is deleted)
    assert keys.references_key("run/1") in read
    assert count_unneeded(store) == 0


def count_unneeded(store):
    report = gc(store, dry_run=True)
    return report.condemned.count + report.waiting.count + report.deleted.count + report.young.count


def test_the_list_goes_with_its_checkpoint_and_what_it_named_too(store):
    for path in paths(store):
        if path.startswith("run/1/"):
            delete(store, path)
    for _ in range(4):
        gc(store)
        pass_grace(store)
    assert keys_below(store, keys.REFERENCES) == {keys.references_key("run/2")}
    assert count_unneeded(store) == 0
    assert load(reopened(store), "run/2/__2_0") == content(2), "it shares that with the one that is gone"


def test_a_checkpoint_inside_of_another_has_a_list_of_its_own(store):
    checkpoint(store, "run", 5)
    checkpoint(store, "run/2/inner", 6)
    assert len(decoded(store, "run").records) == 2 * 16
    for _ in range(2):
        gc(store)
    report, read = read_by(store)
    assert (report.by_list, report.made_lists) == (10, 0)
    assert len(read) == 5


def test_a_checkpoint_that_appears_inside_of_another_during_a_mark_loses_nothing(store):
    # The list of the inner checkpoint lacks files that the outer one's listing had.
    save(store, "run/1/inner/data", content(70))
    write_references(store, "run/1")
    removed(store)
    link = StepLink(store.objects)
    done = []

    def step(what, step=link.step):
        step(what)
        if what.startswith("listed") and what.endswith("/loose!") and not done:
            done.append(what)
            save(reopened(store), "run/1/inner/.metadata", content(71))

    link.step = step
    delete(store, "loose")
    save(store, "loose", content(50))
    for _ in range(4):
        gc(store, link)
        pass_grace(store)
    assert load(reopened(store), "run/1/inner/data") == content(70)
    assert verify(reopened(store)).damage == []


def test_a_mark_that_is_killed_while_it_makes_lists_again_does_no_harm():
    steps = StepLink(make_store("auto").objects).steps
    for kill_at in range(1, 60):
        store = make_store("auto")
        checkpoint(store, "run/1", 1, 2)
        removed(store)
        link = StepLink(store.objects, kill_at=kill_at)
        try:
            gc(store, link)
        except KilledError:
            pass
        else:
            break
        pass_grace(store)
        assert not gc(store).is_blocked
        assert decoded(store, "run/1").path == "run/1"
        assert load(reopened(store), "run/1/__1_0") == content(1)
        steps = max(steps, link.steps)
    assert steps > 20


def test_a_save_does_not_fail_where_the_list_cannot_be_written():
    store = make_store("auto")
    refused = PlannedFault(Fault.DENIED, "put", key_part=keys.REFERENCES)
    checkpoint(reopened(store, refused), "run/1", 1)
    assert keys_below(store, keys.REFERENCES) == set()
    assert gc(store).made_lists == 1


def test_du_and_usages_say_to_the_byte_what_gc_frees(store):
    def stored():
        prefixes = (keys.CHUNKS, keys.TREE, keys.REFERENCES)
        return sum(item.size for prefix in prefixes for item in store.objects.list(prefix))

    said = usage(store, "run/1").freed_bytes
    assert usages(store, ["run/1", "run/2"])["run/1"].freed_bytes == said
    before = stored()
    for path in paths(store):
        if path.startswith("run/1/"):
            delete(store, path)
    for _ in range(4):
        gc(store)
        pass_grace(store)
    assert before - stored() == said


def test_repair_makes_missing_and_damaged_lists_again(store):
    removed(store)
    flip_bit(store.objects, keys.references_key("run/2"), 400)
    flip_bit(store.objects, keys.references_key("run/2"), 500)
    report = run(reopened(store))
    assert sorted(each.key for each in report.mended) == sorted(
        keys.references_key(name) for name in ("run/1", "run/2")
    )
    assert gc(store).by_list == 6
    assert verify(reopened(store)).damage == []


def test_verify_finds_a_damaged_list(store):
    damaged(store)
    assert [each.key for each in verify(reopened(store)).damage] == [keys.references_key("run/1")]


def encoded(names):
    return b"".join(name.encode() for name in names)


def test_names_over_a_bound_lie_in_files():
    drawn = random.Random(3)
    names = [keys.ChunkName(drawn.randbytes(16), number) for number in range(5000)]
    few = NameSet(28, names_max=700)
    for start in range(0, 5000, 300):
        few.add(encoded(names[start : start + 300]))
        assert len(few) > start
    assert few.contains(encoded(names)).all()
    others = [keys.ChunkName(drawn.randbytes(16)) for _ in range(1000)]
    assert not few.contains(encoded(others)).any()
