"""Records that vanished without a tombstone stop gc, and repair, verify and the listings of checkpoints name them."""

import itertools
import json

import pytest
from support.damaging import content, copied, gc, keys_below, make_store, pass_grace, paths, reopened, run
from support.served import KilledError, StepLink

from tierfs.format import keys
from tierfs.format.checkpoint import ROOT, SaveMark
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import delete, load, rename, save, usage, verify
from tierfs.store.commit import PART, Commits
from tierfs.store.tree.references import write_references
from tierfs.store.write.writer import Writer


def part(store, path, seed):
    writer = Writer(store, path, metadata=PART)
    writer.write(content(seed))
    writer.commit()


def checkpoint(store, directory, *shards, sequence=1):
    """Save a checkpoint with these shard files as `TierWriter` does."""
    for number in shards:
        part(store, f"{directory}/shard-{number}", number)
    document = json.dumps({"files": {f"shard-{number}": {"length": 1} for number in shards}}).encode()
    Commits(store).publish(f"{directory}/{ROOT}", document, SaveMark(sequence, "ab"))
    write_references(store, directory)


@pytest.fixture
def store():
    store = make_store("auto")
    for step in (1, 2, 3):
        checkpoint(store, f"run/{step}", *range(step * 10, step * 10 + 4))
    save(store, "loose", content(50))
    pass_grace(store)
    return store


def collect_all(store, objects=None, **how):
    for _ in range(4):
        report = gc(store, objects, **how)
        pass_grace(store)
    return report


def vanish(store, *paths):
    store.objects.delete([keys.record_key(path) for path in paths])


def a_tree(store):
    below = [item.key for item in store.objects.list(keys.directory_prefix("run"))]
    store.objects.delete(below)
    return [f"run/{step}/{ROOT}" for step in (1, 2, 3)]


def a_root(store):
    vanish(store, f"run/2/{ROOT}")
    return [f"run/2/{ROOT}"]


def every_second_record(store):
    below = sorted(item.key for item in store.objects.list(keys.directory_prefix("run")))
    store.objects.delete(below[1::2])
    return []


def a_shard(store):
    vanish(store, "run/2/shard-21")
    return ["run/2/shard-21"]


def a_shard_without_a_list(store):
    store.objects.delete([keys.references_key("run/2")])
    return a_shard(store)


def a_file_that_only_the_list_covers(store):
    save(store, "run/2/notes", content(70))
    write_references(store, "run/2")
    pass_grace(store)
    vanish(store, "run/2/notes")
    return ["run/2"]


def a_file_of_torchs_own_checkpoint(store):
    for name in ("__0_0.distcp", "__1_0.distcp", ROOT):
        save(store, f"run/4/{name}", content(len(name)))
    write_references(store, "run/4")
    pass_grace(store)
    vanish(store, "run/4/__1_0.distcp")
    return ["run/4"]


VANISHED = [
    a_tree,
    a_root,
    every_second_record,
    a_shard,
    a_shard_without_a_list,
    a_file_that_only_the_list_covers,
    a_file_of_torchs_own_checkpoint,
]


@pytest.mark.parametrize("how", [{}, {"exclusive": True}], ids=["shared", "exclusive"])
@pytest.mark.parametrize("lose", VANISHED)
def test_records_that_vanished_stop_gc(store, lose, how):
    named = lose(store)
    before = keys_below(store, keys.CHUNKS), keys_below(store, keys.REFERENCES)
    for _ in range(3):
        report = gc(store, **how)
        assert report.is_blocked
        assert report.deleted.count + report.condemned.count + report.references.count == 0
        assert {each.path for each in report.unreadable} >= set(named)
        pass_grace(store)
    assert (keys_below(store, keys.CHUNKS), keys_below(store, keys.REFERENCES)) == before


@pytest.mark.parametrize("lose", VANISHED)
def test_a_person_can_give_vanished_records_up(store, lose):
    lose(store)
    assert gc(store).is_blocked
    assert not gc(store, without=["run"]).is_blocked
    pass_grace(store)
    for path in [path for path in paths(store) if path.startswith("run/2/")]:
        delete(store, path)  # a checkpoint without one of its files goes on blocking
    if lose is every_second_record:
        return
    assert not collect_all(store).is_blocked
    assert load(reopened(store), "loose") == content(50)


@pytest.mark.parametrize("lose", VANISHED)
def test_verify_and_repair_name_what_vanished(store, lose):
    named = lose(store)
    damage = {each.path for each in verify(reopened(store)).vanished}
    report = run(reopened(store))
    assert damage
    assert not report.is_whole
    assert damage >= set(named)
    assert set(report.vanished) >= set(named)
    assert gc(store).is_blocked


def deleted(store):
    for path in paths(store):
        if path.startswith("run/2"):
            delete(store, path)


def deleted_shards(store):
    delete(store, "run/2/shard-20")
    delete(store, "run/2/shard-22")


def renamed(store):
    for path in sorted(paths(store)):
        if path.startswith("run/2"):
            rename(store, path, f"other/{path}")


def saved_again(store):
    for _ in range(2):
        checkpoint(store, "run/2", store.clock.now_ns() % 10**9, sequence=store.clock.now_ns())
        store.clock.sleep(1)


def an_inner_checkpoint(store):
    save(store, "run/2/inner/data", content(80))
    write_references(store, "run/2")
    save(store, f"run/2/inner/{ROOT}", content(81))
    write_references(store, "run/2/inner")


def overwritten(store):
    save(store, "run/2/shard-20", content(90))
    save(store, "run/2/more", content(91))


LEGAL = [deleted, deleted_shards, renamed, saved_again, an_inner_checkpoint, overwritten]


@pytest.mark.parametrize(
    ("first", "second"), [(first, LEGAL[number - step]) for number, first in enumerate(LEGAL) for step in (1, 3, 4)]
)
def test_changes_through_tierfs_never_look_like_a_loss(store, first, second):
    for change in (first, second):
        if change in (renamed, deleted) or f"run/2/{ROOT}" in paths(store):
            try:
                change(store)
            except FileNotFoundError:
                continue
        before = {path: load(reopened(store), path) for path in paths(store)}
        for _ in range(4):
            assert not gc(store).unreadable
            pass_grace(store)
        assert {path: load(reopened(store), path) for path in before if path in paths(store)}.items() <= before.items()
        save(reopened(store), f"run/2/late-{change.__name__}", content(1))
    assert not gc(store).unreadable
    report = verify(reopened(store))
    assert report.damage + report.vanished == []


def test_a_killed_gc_never_makes_a_deletion_look_like_a_loss():
    world = make_store("auto")
    checkpoint(world, "run/1", 1, 2)
    checkpoint(world, "run/2", 3)
    deleted(world)
    delete(world, "run/1/shard-1")
    gc(world)
    pass_grace(world)
    for kill_at in range(1, 400):
        store = copied(world)
        link = StepLink(store.objects, kill_at=kill_at)
        try:
            gc(store, link)
        except KilledError:
            pass_grace(store)
            assert not gc(store).unreadable
        else:
            return
    raise AssertionError("the gc never ended")


class Cut(WrappedObjects):
    """An endpoint that ends every listing after some objects, and says that it is whole."""

    def list(self, prefix, *, delimiter=False):
        return itertools.islice(super().list(prefix, delimiter=delimiter), 50)


@pytest.mark.parametrize("how", [{}, {"exclusive": True}])
def test_a_listing_that_ends_early_stops_gc(how):
    store = make_store("auto")
    for number in range(150):
        save(store, f"run/{number:03}", content(number))
    pass_grace(store)
    before = keys_below(store, keys.CHUNKS)
    for _ in range(3):
        report = gc(store, Cut(store.objects), **how)
        assert report.is_blocked
        assert "ended" in report.unreadable[0].problem
        pass_grace(store)
    assert gc(store, Cut(store.objects), without=["run"]).is_blocked
    assert keys_below(store, keys.CHUNKS) == before
    assert not gc(store).is_blocked


def cut_at(prefix, count, objects):
    """Return an endpoint that ends the listings of one prefix after some objects."""

    class CutThere(WrappedObjects):
        def list(self, of, *, delimiter=False):
            return itertools.islice(super().list(of, delimiter=delimiter), count if of == prefix else None)

    return CutThere(objects)


@pytest.mark.parametrize("prefix", [keys.directory_prefix("run/2"), keys.LOST])
def test_a_listing_of_one_directory_that_ends_early_stops_gc(store, prefix):
    save(store, "run/2/zz", content(60))  # the checkpoint's reference list does not cover it
    for name in ("a", "b"):
        save(store, f"lost/{name}", content(61 + len(name)))
        key = keys.record_key(f"lost/{name}")
        store.objects.put(f"{keys.LOST}1/{key.removeprefix('.tierfs/')}", [store.objects.read(key, 1 << 20)[0]])
        delete(store, f"lost/{name}")
    pass_grace(store)
    before = keys_below(store, keys.CHUNKS)
    assert gc(store, cut_at(prefix, 1, store.objects)).is_blocked
    for _ in range(3):  # a new reference list may cover the directory by now
        gc(store, cut_at(prefix, 1, store.objects))
        pass_grace(store)
    assert keys_below(store, keys.CHUNKS) == before


def test_a_part_of_an_announced_save_stays_where_their_listing_ends_early(store):
    part(store, "last/waits", 70)
    store.clock.sleep(1)
    checkpoint(store, "last", 71)
    document = json.dumps({"files": {"waits": {}, "missing": {}}}).encode()
    Commits(store).announce("last", document, SaveMark(99, "cd"))
    pass_grace(store)
    for _ in range(4):
        gc(store, cut_at(keys.directory_prefix("last/.pending"), 0, store.objects))
        pass_grace(store)
    assert load(reopened(store), "last/waits") == content(70)


def test_records_put_behind_the_end_of_a_listing_do_not_stop_gc(store):
    class Busy(WrappedObjects):
        def list(self, prefix, *, delimiter=False):
            yield from super().list(prefix, delimiter=delimiter)
            if prefix == keys.TREE:
                save(reopened(store), "zz", content(99))

    for _ in range(3):
        assert not gc(store, Busy(store.objects)).is_blocked
        pass_grace(store)
    assert load(reopened(store), "zz") == content(99)


def test_fewer_records_than_the_last_gc_left_stop_gc(store):
    for number in range(10):
        save(store, f"plain/{number}", content(number + 200))
    delete(store, "plain/0")
    assert not collect_all(store).is_blocked
    before = keys_below(store, keys.CHUNKS)
    vanish(store, "plain/3", "plain/4")
    save(store, "plain/new", content(300))
    for _ in range(3):
        report = collect_all(store)
        assert report.is_blocked
        assert "1 fewer" in report.unreadable[0].problem
    assert keys_below(store, keys.CHUNKS) >= before
    assert not gc(store, without=["plain"]).is_blocked
    assert not gc(store).is_blocked


def test_sound_records_below_lost_keep_their_chunks(store):
    a, b = keys.record_key("run/1/shard-10"), keys.record_key("loose")
    for key, other in ((a, b), (b, a)):
        data = store.objects.read(key, 1 << 20)[0]
        store.objects.put(f"aside/{other}", [data])
    for key in (a, b):
        store.objects.put(key, [store.objects.read(f"aside/{key}", 1 << 20)[0]])
        store.objects.delete([f"aside/{key}"])
    before = keys_below(store, keys.CHUNKS)
    assert len(run(reopened(store)).lost_files) == 2
    collect_all(store)
    assert keys_below(store, keys.CHUNKS) == before
    store.objects.delete([item.key for item in store.objects.list(keys.LOST)])
    collect_all(store)
    assert len(keys_below(store, keys.CHUNKS)) == len(before) - 2


def names(store, directory="last"):
    return {path.removeprefix(f"{directory}/") for path in paths(store) if path.startswith(f"{directory}/")}


def test_an_exclusive_gc_frees_at_once_what_no_save_names():
    store = make_store("auto")
    for number in range(10):
        part(store, f"last/killed-{number}", number + 500)
        store.clock.sleep(1)
        checkpoint(store, "last", number + 1, sequence=number + 1)
        store.clock.sleep(1)
    part(store, "last/under-way", 700)
    store.lease_cache.release()
    would, did = gc(store, dry_run=True, exclusive=True), gc(store, exclusive=True)
    counts = [(each.files, each.replaced, each.deleted, each.unfinished, each.reached) for each in (would, did)]
    assert counts[0] == counts[1]
    assert (did.replaced.count, did.deleted.count) == (19, 19 + 9), "each replaced metadata has a chunk, too"
    assert names(store) == {ROOT, "shard-10", "under-way"}
    assert len(keys_below(store, keys.CHUNKS)) == len(paths(store)), "each file has one chunk"
    again = gc(store, exclusive=True)
    assert (again.replaced.count, again.deleted.count, again.unreadable) == (0, 0, [])


def test_an_exclusive_gc_that_encodes_anew_waits_a_grace():
    store = make_store("auto")
    for number in range(2):
        checkpoint(store, "last", number + 1, sequence=number + 1)
        store.clock.sleep(1)
    store.lease_cache.release()
    first = gc(store, exclusive=True, reencode=True)
    assert (first.replaced.count, first.unfinished.count) == (0, 1)
    assert gc(store, exclusive=True).replaced.count == 1


def test_gc_removes_shard_files_that_no_save_names():
    store = make_store("auto")
    for number in range(1, 21):
        part(store, f"last/killed-{number}", number + 500)
        store.clock.sleep(1)
        checkpoint(store, "last", number, sequence=number)
        store.clock.sleep(1)
    part(store, "last/under-way", 700)
    part(store, "last/waits", 701)
    save(store, "last/config.json", content(702))
    part(store, "step/unfinished", 703)
    Commits(store).announce("last", json.dumps({"files": {"waits": {}, "missing": {}}}).encode(), SaveMark(99, "cd"))
    gc(store)
    assert len(names(store)) > 40, "readers of the replaced checkpoints have a grace"
    pass_grace(store)
    counted = usage(store, "last")
    assert (counted.unnamed_files, counted.files) == (40, 45)
    would, did = gc(store, dry_run=True), gc(store)
    assert would.replaced == did.replaced
    assert (did.replaced.count, did.unfinished.count) == (39, 2)
    assert usage(store, "last").unnamed_files == 1
    assert usage(store, "step").unnamed_bytes == len(content(703))
    kept = {"config.json", ROOT, "shard-20", "under-way", "waits", ".pending/cd"}
    assert names(store) == kept
    collect_all(store)
    assert names(store) == kept
    assert len(keys_below(store, keys.CHUNKS)) == len(paths(store)), "each file has one chunk"
    report = gc(store)
    assert (report.replaced.count, report.unreadable) == (0, [])
