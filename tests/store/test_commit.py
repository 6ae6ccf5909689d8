"""A checkpoint of several hosts is published once, in order, by the first process that sees all of its files."""

import itertools
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.tiered import Host
from support.waiting import HANG_S, until

from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.errors import ConflictError, CorruptionError, FormatError, NotFoundError, ReadOnlyError, StoreError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT, SEQUENCE_MAX, SaveMark, named_files
from tierfs.format.keys import record_key
from tierfs.host.pending.levels import Level
from tierfs.objects import FsspecObjects, MeasuredObjects
from tierfs.objects.backends.local import LocalObjects
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.objects.protocol import OVERWRITE
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import commit, delete, find, load, stat, status
from tierfs.store.announced_saves import PENDING
from tierfs.store.commit import PART, PART_IN_PLACE, Commits, part_of
from tierfs.store.create import create_store
from tierfs.store.store import Store
from tierfs.store.write import staging
from tierfs.store.write.writer import Writer

ALL = pytest.mark.parametrize("directory", ["run/step_1", ""])


def put(host, path, data=b"x" * 100_000, level=Level.STAGED, metadata=PART, staged=False):
    """Save a part as a rank does."""
    writer = Writer(host.store, path, metadata=metadata, level=level, staged=staged)
    writer.write(data)
    writer.commit()


def document(*names, note=""):
    return json.dumps({"files": {name: {"length": 100_000} for name in names}, "note": note}).encode()


def mark(number, who=None):
    return SaveMark(number, who * 32 if who else f"{number:032x}")


def at(directory, name):
    return f"{directory}/{name}" if directory else name


def content(store, path):
    return bytes(load(store, path))


def is_there(store, path):
    try:
        stat(store, path)
    except NotFoundError:
        return False
    return True


def announced(store, directory):
    return [entry.path for entry in find(store, at(directory, PENDING)) if not entry.is_directory]


@pytest.fixture
def hosts(make_host):
    return make_host("first"), make_host("second")


@ALL
def test_the_last_part_that_arrives_publishes_it(hosts, directory):
    first, second = hosts
    with second.held():
        put(first, at(directory, "rank-0"))
        put(second, at(directory, "rank-1"))
        Commits(first.store).announce(directory, document("rank-0", "rank-1"), mark(1))
        first.tiers.wait(directory, Level.OBJECT)
        assert not is_there(first.store, at(directory, ROOT))
        (waiting,) = Commits(first.store).advance(directory)
        assert waiting.missing == ("rank-1",)
        assert "waits for 1 of 2 files: rank-1" in str(waiting)
        with pytest.raises(TimeoutError, match="rank-1"):
            Commits(first.store).wait(directory, 0.1)
    second.tiers.wait(directory, Level.OBJECT)
    # Only the second host's flusher has looked since then.
    plain = first.plain()
    assert content(plain, at(directory, ROOT)) == document("rank-0", "rank-1")
    assert SaveMark.of(stat(plain, at(directory, ROOT)).manifest.metadata) == mark(1)
    assert not announced(plain, directory)


def test_an_unannounced_save_is_not_looked_for(make_host, monkeypatch):
    looks = []
    monkeypatch.setattr(Commits, "advance", lambda _, directory: looks.append(directory))
    for name, level, seen in (("object", Level.OBJECT, []), ("local", Level.LOCAL, ["run"])):
        host = make_host(name, ack=level)
        put(host, f"run/rank-{name}", level=Level.OBJECT, metadata=part_of(host.store), staged=True)
        assert looks == seen


def test_a_part_that_is_in_place_completes_a_save_like_any(hosts):
    first, second = hosts
    put(second, "run/rank-1", level=Level.OBJECT, metadata=PART_IN_PLACE, staged=True)
    with first.held():
        put(first, "run/rank-0")
    Commits(second.store).announce("run", document("rank-0", "rank-1"), mark(1))
    first.tiers.wait("run", Level.OBJECT)
    Commits(second.store).wait("run", 20)
    assert is_there(second.store, f"run/{ROOT}")


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_the_save_that_began_last_stands(hosts, order):
    first, second = hosts
    commits = Commits(first.store)
    for number in (1, 2, 3):
        commits.announce("run", document(f"rank-{number}", note=str(number)), mark(number))
    stands = 0
    for number in order:
        put(second, f"run/rank-{number}", level=Level.OBJECT)
        waiting = Commits(second.store).advance("run")
        stands = max(stands, number)
        assert content(first.plain(), f"run/{ROOT}") == document(f"rank-{stands}", note=str(stands))
        assert all(save.mark.sequence > stands for save in waiting)
    assert not announced(first.store, "run")


def test_a_superseded_save_raises(hosts):
    first, second = hosts
    put(first, "run/rank-0", level=Level.OBJECT)
    Commits(first.store).publish(f"run/{ROOT}", document("rank-0"), mark(7, "b"))
    first.tiers.wait("run", Level.OBJECT)
    with pytest.raises(ConflictError, match="began later than save 0000"):
        Commits(second.store).announce("run", document("rank-1"), mark(6))
    with pytest.raises(ConflictError, match="superseded"):
        Commits(first.store).publish(f"run/{ROOT}", document("rank-1"), mark(6))
    assert content(first.store, f"run/{ROOT}") == document("rank-0")
    assert not announced(first.store, "run")


def test_a_metadata_file_of_no_save_is_replaced(hosts):
    first, _ = hosts
    put(first, f"run/{ROOT}", b"a pickle of stock DCP", level=Level.OBJECT)
    put(first, "run/rank-0", level=Level.OBJECT)
    Commits(first.store).announce("run", document("rank-0"), Commits(first.store).begin(f"run/{ROOT}", "a" * 32)[0])
    assert content(first.plain(), f"run/{ROOT}") == document("rank-0")


def test_metadata_of_no_save_outlives_a_save_that_began_before(hosts):
    first, second = hosts
    with second.held():
        put(second, "run/rank-1")
        began = Commits(first.store).begin(f"run/{ROOT}", "a" * 32)[0]
        Commits(first.store).announce("run", document("rank-1"), began)
        put(first, f"run/{ROOT}", b"a pickle of stock DCP", level=Level.OBJECT)
    second.tiers.wait("run", Level.OBJECT)
    assert content(first.plain(), f"run/{ROOT}") == b"a pickle of stock DCP"
    assert not announced(first.plain(), "run")
    with pytest.raises(ConflictError, match="belongs to no save, and was written later"):
        Commits(first.store).check_stands(f"run/{ROOT}", began)


def test_a_later_save_of_one_host_replaces_an_earlier_one(hosts):
    # Another host completes the earlier save after the later one was closed and before it is flushed.
    first, second = hosts
    with second.held():
        put(second, "run/rank-1")
        Commits(first.store).announce("run", document("rank-1"), mark(1))
        first.objects.down = True
        put(first, "run/rank-2")
        Commits(first.store).publish(f"run/{ROOT}", document("rank-2"), mark(2))
    second.tiers.wait("run", Level.OBJECT)
    assert content(second.plain(), f"run/{ROOT}") == document("rank-1")
    first.objects.down = False
    first.tiers.wait("run", Level.OBJECT)
    assert content(second.plain(), f"run/{ROOT}") == document("rank-2")


def test_an_overtaken_save_holds_up_no_later_one(hosts, caplog):
    first, second = hosts
    with first.held():
        put(first, "run/rank-0")
        Commits(first.store).publish(f"run/{ROOT}", document("rank-0"), mark(1))
        put(second, "run/rank-1", level=Level.OBJECT)
        Commits(second.store).announce("run", document("rank-1"), mark(2))
    first.tiers.wait("run", Level.OBJECT)
    assert "a save of this host is not published" in caplog.text
    assert content(second.plain(), f"run/{ROOT}") == document("rank-1")
    Commits(first.store).publish(f"run/{ROOT}", document("rank-0"), mark(3))
    first.tiers.wait("run", Level.OBJECT)
    assert content(second.plain(), f"run/{ROOT}") == document("rank-0")


def test_a_save_removed_before_its_flush_stays_removed(hosts):
    first, second = hosts
    put(first, f"run/{ROOT}", level=Level.OBJECT)
    with first.held():
        Commits(first.store).publish(f"run/{ROOT}", document(), Commits(first.store).begin(f"run/{ROOT}", "a" * 32)[0])
        delete(second.store, f"run/{ROOT}")
    with pytest.raises(ConflictError):
        first.tiers.wait("run", Level.OBJECT)
    assert not is_there(second.store, f"run/{ROOT}")


def test_a_complete_save_is_kept_until_its_successor_is_safe(hosts, root):
    first, second = hosts
    objects = MemoryObjects(root)  # reaches the object tier even when the flusher does not
    looking = Commits(Store(objects, first.descriptor, url="memory://store", tiers=first.tiers, ack=Level.STAGED))
    looking.announce("run", document("rank-1"), mark(1))
    with first.held():
        looking.publish(f"run/{ROOT}", document(), mark(2))
        put(second, "run/rank-1", level=Level.OBJECT)
        assert not looking.advance("run")
        # As if the first host were lost now.
        assert not Commits(second.store).advance("run")
        assert content(second.store, f"run/{ROOT}") == document("rank-1")
    first.tiers.wait("run", Level.OBJECT)
    assert content(second.store, f"run/{ROOT}") == document()


@pytest.mark.parametrize("what", ["part", "checkpoint"])
def test_a_save_that_was_removed_is_not_waited_for_in_vain(hosts, what):
    first, second = hosts
    commits = Commits(first.store)
    commits.announce("run", document("rank-1"), mark(1))
    if what == "checkpoint":
        put(second, "run/rank-1", level=Level.OBJECT)
        commits.advance("run")
    for path in [*announced(second.store, "run"), *([f"run/{ROOT}"] if what == "checkpoint" else [])]:
        delete(second.store, path)
    commits.wait("run", 0.1, mark(1))
    with pytest.raises(NotFoundError, match="removed"):
        commits.check_stands(f"run/{ROOT}", mark(1))


def test_waiting_for_one_save_ignores_others(hosts):
    first, second = hosts
    put(first, "run/rank-0", level=Level.OBJECT)
    Commits(first.store).announce("run", document("rank-0"), mark(1))
    Commits(second.store).announce("run", document("never"), mark(2))
    Commits(first.store).wait("run", 0.1, mark(1))
    Commits(first.store).check_stands(f"run/{ROOT}", mark(1))
    with pytest.raises(TimeoutError, match="never"):
        Commits(second.store).wait("run", 0.1, mark(2))


def test_a_save_that_can_never_be_published_is_not_waited_for(hosts):
    first, second = hosts
    Commits(first.store).announce("run", document("never", note="x" * 100_000), mark(1))
    for item in list(first.plain().objects.list(keys.CHUNKS)):
        first.plain().objects.delete([item.key])
    with pytest.raises(CorruptionError, match="cannot be published"):
        Commits(Store(second.plain().objects, second.descriptor, url="store")).wait("run", None, mark(1))


def test_marks_have_an_end(hosts):
    first, second = hosts
    Commits(first.store).announce("run", document("never"), SaveMark(SEQUENCE_MAX, "c" * 31))
    with pytest.raises(FormatError, match="remove that"):
        Commits(second.store).begin(f"run/{ROOT}", "d" * 32)[0]


def test_a_part_that_was_removed_is_missing(hosts):
    first, _ = hosts
    put(first, "run/rank-0", level=Level.OBJECT)
    delete(first.store, "run/rank-0")
    Commits(first.store).announce("run", document("rank-0"), mark(1))
    assert not is_there(first.store, f"run/{ROOT}")


def test_many_commit_at_once(hosts):
    first, second = hosts
    for number in range(5):
        put(first, f"run/rank-{number}", level=Level.OBJECT)
    Commits(first.store).announce("run", document("other"), mark(1))
    put(second, "run/other", level=Level.OBJECT)
    with ThreadPoolExecutor(8) as pool:
        stores = [first.plain() for _ in range(8)]
        results = list(pool.map(lambda store: Commits(store).advance("run"), stores))
    assert not any(results)
    assert content(first.plain(), f"run/{ROOT}") == document("other")


def test_malformed_metadata_fails_the_save_not_the_part(hosts, caplog):
    first, second = hosts
    with second.held():
        put(second, "run/rank-1")
        Commits(first.store).announce("run", document("rank-1"), mark(1))
        bad = Writer(first.store, f"run/{PENDING}/{'b' * 32}", metadata=mark(2, "b").as_metadata(), level=Level.OBJECT)
        bad.write(b"no document")
        bad.commit()
    second.tiers.wait("run", Level.OBJECT)
    assert content(first.plain(), f"run/{ROOT}") == document("rank-1")
    (waiting,) = Commits(first.store).advance("run")
    assert "cannot be published" in str(waiting)
    assert "not the metadata of a checkpoint" in str(waiting)
    # It blocks no other save, and disappears with the next one.
    put(first, "run/rank-2", level=Level.OBJECT)
    Commits(first.store).announce("run", document("rank-2"), mark(3))
    assert content(first.plain(), f"run/{ROOT}") == document("rank-2")
    assert not announced(first.plain(), "run")


def test_a_damaged_announcement_blocks_no_save(hosts, caplog):
    first, _ = hosts
    Commits(first.store).announce("run", document("never"), mark(1))
    key = record_key(f"run/{PENDING}/{mark(1).save_id}")
    first.objects.put(key, [b"x" * 500])
    put(first, "run/rank-0", level=Level.OBJECT)
    Commits(first.plain()).announce("run", document("rank-0"), mark(2))
    assert content(first.plain(), f"run/{ROOT}") == document("rank-0")
    assert "the announced save is lost" in caplog.text


def test_a_document_larger_than_any_is_not_read(hosts, monkeypatch):
    first, _ = hosts
    monkeypatch.setattr("tierfs.store.announced_saves.DOCUMENT_BYTES_MAX", 100)
    put(first, "run/rank-0", level=Level.OBJECT)
    Commits(first.store).announce("run", document("rank-0", note="n" * 100), mark(1))
    (waiting,) = Commits(first.store).advance("run")
    assert "too many" in waiting.problem


def test_an_announced_save_is_not_a_failed_one(hosts, caplog):
    first, second = hosts
    put(first, "run/rank-0", level=Level.OBJECT)
    with first.held("list"):
        Commits(first.store).announce("run", document("rank-0"), mark(1))
    assert "cannot check now whether the save is complete" in caplog.text
    assert not Commits(second.store).advance("run")
    assert is_there(second.store, f"run/{ROOT}")


def test_a_failed_look_for_complete_saves_is_repeated(hosts):
    # The part is published already. Its draft is published again, which finds the record, and then looks for saves.
    first, second = hosts
    Commits(first.store).announce("run", document("rank-1"), mark(1))
    with second.held("list"):
        put(second, "run/rank-1", b"a small part needs no listing")
        until(lambda: is_there(first.plain(), "run/rank-1"))
        until(lambda: status(second.store)["errors"])
        assert not is_there(first.plain(), f"run/{ROOT}")
    second.tiers.wait("run", Level.OBJECT)
    assert content(first.plain(), f"run/{ROOT}") == document("rank-1")


class Rivalled(WrappedObjects):
    """An object tier where another writer changes the metadata just before each put of it."""

    rival = None

    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        if key == record_key(f"run/{ROOT}") and (rival := self.rival) is not None:
            self.rival = None
            again = rival()
            self.rival = rival if again else None
        return super().put(key, data, mode=mode, checksum=checksum)


@pytest.fixture
def rivalled(root):
    """A store without local tiers, and its object tier."""
    objects = Rivalled(MemoryObjects(root))
    descriptor, _ = create_store(objects, "store", digest=DigestKind.XXH3_128, random_bytes=bytes(16))
    store = Store(objects, descriptor, url="store", clock=ManualClock())
    put_plain(store, "run/rank-0", mark(0))
    return store, objects


@pytest.mark.parametrize("other", [1, 3])
def test_the_later_of_two_simultaneous_saves_is_published(rivalled, other):
    store, objects = rivalled
    objects.rival = lambda: put_plain(store, f"run/{ROOT}", mark(other))
    Commits(store).announce("run", document("rank-0"), mark(2))
    assert SaveMark.of(stat(store, f"run/{ROOT}").manifest.metadata) == mark(max(other, 2))
    assert not announced(store, "run")
    assert list(store.objects.list(keys.references_key("run")))


def test_a_save_gives_up_after_so_many_rivals(rivalled):
    store, objects = rivalled
    rivals = itertools.count(1)

    def rival():
        put_plain(store, f"run/{ROOT}", mark(next(rivals)))
        return True

    objects.rival = rival
    Commits(store).announce("run", document("rank-0"), mark(99))  # its publication fails, the announcement stays
    assert next(rivals) == commit.ATTEMPTS_MAX + 1
    with pytest.raises(ConflictError):
        Commits(store).advance("run")
    assert next(rivals) == 2 * commit.ATTEMPTS_MAX + 2
    with pytest.raises(ConflictError):
        Commits(store).publish(f"run/{ROOT}", document(), mark(98))
    assert next(rivals) == 3 * commit.ATTEMPTS_MAX + 3
    objects.rival = None
    assert Commits(store).advance("run") == []
    assert SaveMark.of(stat(store, f"run/{ROOT}").manifest.metadata) == mark(99)


def test_saves_that_one_process_began_follow_each_other(rivalled):
    commits = Commits(rivalled[0])
    first, other, second = (
        commits.begin(at(path, ROOT), who * 32)[0] for path, who in zip(("run", "x", "run"), "abc", strict=True)
    )
    assert (other.sequence, second.sequence) == (first.sequence, first.sequence + 1)
    assert second.may_replace(first)


def test_a_part_in_a_directory_below_is_not_the_awaited_one(rivalled):
    store, _ = rivalled
    put_plain(store, "run/inner/rank-1", mark(0))
    Commits(store).announce("run", document("rank-0", "rank-1"), mark(1))
    (waiting,) = Commits(store).advance("run")
    assert waiting.missing == ("rank-1",)


def test_a_wait_lasts_until_the_last_part_is_there(rivalled):
    store, _ = rivalled
    Commits(store).announce("run", document("rank-0", "rank-1"), mark(1))

    class Arriving(ManualClock):
        def sleep(self, seconds):
            super().sleep(seconds)
            if self.monotonic() >= began + 1:
                put_plain(store, "run/rank-1", mark(0))

    began, store.clock = store.clock.monotonic(), Arriving()
    Commits(store).wait("run", 60)
    assert store.clock.monotonic() == began + 1
    assert is_there(store, f"run/{ROOT}")


class Broken(MemoryObjects):
    """An object tier that lists nothing, and will not later."""

    def list(self, *_args, **_how):
        raise StoreError("there is no such bucket", transient=False)


def test_a_look_that_is_refused_is_no_save_in_an_empty_place(tmp_path, root, descriptor):
    host = Host(tmp_path, Broken(root), descriptor)
    try:
        with pytest.raises(StoreError, match="no such bucket"):
            Commits(host.store).begin(f"run/{ROOT}", "a" * 32)
    finally:
        host.close()


@pytest.fixture(params=["memory", "directory", "fsspec memory", "fsspec directory"])
def counted(request, root, tmp_path):
    """A store without local tiers on each kind of object tier, with counted requests."""
    inner = {
        "memory": lambda: MemoryObjects(root),
        "directory": lambda: LocalObjects(tmp_path / "store"),
        "fsspec memory": lambda: FsspecObjects(MemoryFileSystem(), root),
        "fsspec directory": lambda: FsspecObjects(fsspec.filesystem("file"), f"{tmp_path}/store"),
    }[request.param]()
    objects = MeasuredObjects(inner)
    descriptor, _ = create_store(objects, "store", digest=DigestKind.XXH3_128, random_bytes=bytes(16))
    return Store(objects, descriptor, url="store")


def asked(store, action):
    """Return the result of an action, and the requests that it sent."""
    before = {method: counters["requests"] for method, counters in store.objects.snapshot().items()}
    result = action()
    after = {method: counters["requests"] for method, counters in store.objects.snapshot().items()}
    return result, {
        method: number - before.get(method, 0) for method, number in after.items() if number > before.get(method, 0)
    }


@ALL
def test_a_save_into_a_new_directory_looks_once(counted, directory):
    commits, path = Commits(counted), at(directory, ROOT)
    (began, is_new), requests = asked(counted, lambda: commits.begin(path, "a" * 32))
    assert is_new
    assert requests == {"list": 1, "head": 1}
    _, requests = asked(counted, lambda: commits.publish(path, document(), began, is_new=is_new))
    assert requests == {"put": 1}
    assert content(counted, path) == document()
    assert commits.begin(path, "b" * 32)[0] > began


def test_names_that_begin_alike_are_no_checkpoints(counted):
    for name in (
        "run/.metadata2",
        "run/.metadat",
        "run/.metadata/x",
        "run/.pendings/x",
        "run/.pendin/y",
        "run2/.metadata",
    ):
        put_plain(counted, name, mark(2**50))
    (began, is_new), requests = asked(counted, lambda: Commits(counted).begin(f"run/{ROOT}", "a" * 32))
    assert is_new
    assert requests == {"list": 1, "head": 1}
    assert began.save_id == "a" * 32


@ALL
def test_a_checkpoint_below_the_pending_name_is_no_announcement(counted, directory):
    others = [at(directory, f"{PENDING}/{ROOT}"), at(directory, f"{PENDING}/step_1/{ROOT}")]
    for path in others:
        put_plain(counted, path, mark(1))
    put_plain(counted, at(directory, ROOT), mark(2))
    assert Commits(counted).advance(directory) == []
    assert [content(counted, path) for path in others] == [document()] * 2


def put_plain(store, path, of=None):
    writer = Writer(store, path, metadata=None if of is None else of.as_metadata())
    writer.write(document())
    writer.commit()


@pytest.mark.parametrize("what", ["published", "announced"])
def test_a_mark_is_greater_than_that_of_a_save_that_is(counted, what):
    far = SaveMark(counted.clock.now_ns() + 10**15, "c" * 32)
    put_plain(counted, f"run/{ROOT}" if what == "published" else f"run/{PENDING}/{far.save_id}", far)
    began, is_new = Commits(counted).begin(f"run/{ROOT}", "d" * 32)
    assert began == SaveMark(far.sequence + 1, "d" * 32)
    assert is_new == (what == "announced")


def test_a_checkpoint_that_was_removed_is_nothing_new(counted):
    commits, path = Commits(counted), f"run/{ROOT}"
    put_plain(counted, path, mark(1))
    delete(counted, path)
    began, is_new = commits.begin(path, "a" * 32)
    assert not is_new
    commits.publish(path, document(), began, is_new=is_new)
    assert content(counted, path) == document()


@pytest.mark.parametrize("how", ["new", "after a removal"])
def test_foreign_metadata_is_refused_before_the_save_begins(counted, how):
    path = f"run/{ROOT}"
    if how == "after a removal":
        put_plain(counted, path, mark(1))
        delete(counted, path)
    counted.objects.put(path, [b"a pickle of stock DCP"])
    with pytest.raises(ReadOnlyError, match="not written by tierfs"):
        Commits(counted).begin(path, "a" * 32)


@pytest.mark.parametrize("what", ["removed", "damaged"])
def test_a_save_announced_after_the_look_is_found(make_host, what):
    # The put is conditional. If it fails, the save reads the current record.
    first, second = (make_host(name, ack=Level.OBJECT) for name in ("first", "second"))
    path = f"run/{ROOT}"
    began, is_new = Commits(first.store).begin(path, "b" * 32)
    assert is_new
    Commits(second.store).publish(path, document(note="before"), mark(1), is_new=True)
    if what == "removed":
        delete(second.store, path)
    elif what == "damaged":
        first.objects.put(record_key(path), [b"x" * 500])
    Commits(first.store).publish(path, document(), began, is_new=is_new)
    assert content(second.plain(), path) == document()
    later = SaveMark(began.sequence + 10**15, "c" * 32)
    Commits(second.store).publish(f"other/{ROOT}", document(), later, is_new=True)
    with pytest.raises(ConflictError, match="superseded"):
        Commits(first.store).publish(f"other/{ROOT}", document(), began, is_new=True)


def far_away(host):
    """Put a host's object tier beyond a network. Then only a flush notices the changes of other hosts."""
    descriptor = host.store.descriptor
    host.store.descriptor = replace(descriptor, endpoint=replace(descriptor.endpoint, host_local=False))
    return host


def test_a_flushers_file_is_checked_when_closed(make_host):
    # Once a change is pending, a conflict is final.
    host, other = far_away(make_host("host")), make_host("other", ack=Level.OBJECT)
    path = f"run/{ROOT}"
    began, is_new = Commits(host.store).begin(path, "b" * 32)
    assert is_new
    Commits(other.store).publish(path, document(note="before"), mark(1))
    delete(other.store, path)
    Commits(host.store).publish(path, document(), began, is_new=is_new)
    host.tiers.wait("run", Level.OBJECT)
    assert content(other.plain(), path) == document()


@pytest.mark.parametrize(
    ("there", "overwrite"),
    [("nothing", True), ("nothing", False), ("an earlier save", True), ("stock DCP", True)],
)
@pytest.mark.parametrize("how", ["object", "staged", "announced"])
@pytest.mark.parametrize("first_ends", [True, False])
def test_a_save_replaces_none_that_it_did_not_see(make_host, how, first_ends, there, overwrite):
    level = Level.OBJECT if how == "object" else Level.STAGED
    hosts = [far_away(make_host(name, ack=level)) for name in ("first", "second")]
    path = f"run/{ROOT}"
    if there != "nothing":
        put(hosts[0], path, level=Level.OBJECT, metadata={} if there == "stock DCP" else mark(1).as_metadata())
    put(hosts[0], "run/rank-0", level=Level.OBJECT)
    commits = [Commits(host.store) for host in hosts]
    begun = [each.begin(path, name * 32, overwrite=overwrite) for each, name in zip(commits, "ab", strict=True)]
    winner, loser = (0, 1) if first_ends else (1, 0)

    def end(number):
        data = document("rank-0", note=str(number))
        if how == "announced":
            commits[number].announce("run", data, begun[number][0])
        else:
            commits[number].publish(path, data, begun[number][0], is_new=begun[number][1])

    def settle(number):
        hosts[number].tiers.wait("run", Level.OBJECT)
        commits[number].check_stands(path, begun[number][0])

    if how == "staged":
        with hosts[loser].held():
            end(loser)
            end(winner)
            settle(winner)
    else:
        end(winner)
        with pytest.raises(ConflictError, match="superseded"):
            end(loser)
    with pytest.raises(ConflictError, match="superseded"):
        settle(loser)
    settle(winner)
    assert content(hosts[loser].plain(), path) == document("rank-0", note=str(winner))
    # The next save begins after the published one, and replaces it.
    commits[loser].publish(path, document("rank-0"), commits[loser].begin(path, "c" * 32)[0])
    hosts[loser].tiers.wait("run", Level.OBJECT)
    assert content(hosts[winner].plain(), path) == document("rank-0")


@pytest.mark.parametrize("first_ends", [True, False])
def test_an_announced_save_replaces_none_that_it_did_not_see(hosts, caplog, first_ends):
    commits = [Commits(host.store) for host in hosts]
    begun = [each.begin(f"run/{ROOT}", name * 32)[0] for each, name in zip(commits, "ab", strict=True)]
    for number in (0, 1):
        commits[number].announce("run", document(f"rank-{number}"), begun[number])
    third = commits[0].begin(f"run/{ROOT}", "c" * 32)[0]
    commits[0].announce("run", document("rank-2"), third)
    for number in (0, 1) if first_ends else (1, 0):
        put(hosts[number], f"run/rank-{number}", level=Level.OBJECT)
        commits[number].advance("run")
    stands = 0 if first_ends else 1
    assert content(hosts[0].plain(), f"run/{ROOT}") == document(f"rank-{stands}")
    assert "an announced save is not published" in caplog.text
    with pytest.raises(ConflictError, match="superseded"):
        commits[1 - stands].check_stands(f"run/{ROOT}", begun[1 - stands])
    put(hosts[1], "run/rank-2", level=Level.OBJECT)  # the third save saw both
    commits[1].wait("run", 20, third)
    assert content(hosts[0].plain(), f"run/{ROOT}") == document("rank-2")


@pytest.mark.parametrize("level", [Level.OBJECT, Level.STAGED])
def test_overlapping_saves_of_one_process_replace_each_other(make_host, level):
    host, path = far_away(make_host(ack=level)), f"run/{ROOT}"
    begun = [Commits(host.store).begin(path, name * 32) for name in "abc"]
    for number in (0, 1, 2):
        Commits(host.store).publish(path, document(note=str(number)), begun[number][0], is_new=begun[number][1])
    host.tiers.wait("run", Level.OBJECT)
    assert content(host.plain(), path) == document(note="2")


def test_a_save_replaces_what_a_lost_draft_would_have_replaced(hosts):
    first, _ = hosts
    put(first, f"run/{ROOT}", metadata=mark(1).as_metadata(), level=Level.OBJECT)
    with first.held():
        draft = replace(mark(2), replaces=frozenset({mark(1)}))
        put(first, f"run/{ROOT}", metadata=draft.as_metadata())
        began = Commits(first.store).begin(f"run/{ROOT}", "a" * 32)[0]
    assert began.replaces == {mark(1), mark(2)}


def test_a_save_behind_pending_files_is_checked_when_closed(make_host, monkeypatch):
    host, other = far_away(make_host("host", ack=Level.OBJECT)), make_host("other", ack=Level.OBJECT)
    path = f"run/{ROOT}"
    began, is_new = Commits(host.store).begin(path, "b" * 32)
    Commits(other.store).publish(path, document(note="before"), mark(1))
    delete(other.store, path)
    host.objects.down = ("put",)
    put(host, "run/rank-0", level=Level.STAGED)
    behind, write = [], Writer.write

    def write_once_more(self, data):
        behind.extend(host.tiers.drafts.pending_below("run"))
        host.objects.down = False
        return write(self, data)

    monkeypatch.setattr(Writer, "write", write_once_more)
    Commits(host.store).publish(path, document(), began, is_new=is_new)
    assert behind
    assert content(other.plain(), path) == document()
    assert not host.tiers.drafts.conflicts()


@pytest.mark.parametrize("what", ["saved", "removed"])
def test_a_save_refused_by_the_flusher_is_not_repeated(make_host, what):
    # It was closed without a check, since the object tier had just failed to answer. A kept conflict stays.
    host, other = far_away(make_host("host", ack=Level.OBJECT)), make_host("other", ack=Level.OBJECT)
    path = f"run/{ROOT}"
    began, is_new = Commits(host.store).begin(path, "b" * 32)
    Commits(other.store).publish(path, document(note="before"), mark(1))
    if what == "removed":
        delete(other.store, path)
    with ThreadPoolExecutor(1) as pool:
        with host.held():
            put(host, "run/rank-0", level=Level.STAGED)
            publishing = pool.submit(Commits(host.store).publish, path, document(), began, is_new=is_new)
            while not host.tiers.drafts.pending(path) and not publishing.done():
                time.sleep(0.01)
        with pytest.raises(ConflictError, match="changed by another writer" if what == "removed" else "superseded"):
            publishing.result(HANG_S)
    assert [kept for kept, _ in host.tiers.drafts.conflicts()] == ([path] if what == "removed" else [])
    assert is_there(other.plain(), path) == (what == "saved")


def test_a_save_is_checked_again_behind_a_file_closed_meanwhile(make_host, monkeypatch):
    # The save is then left to the flusher, for which a conflict is final. The earlier check may be out of date.
    host, other = far_away(make_host("host", ack=Level.OBJECT)), make_host("other", ack=Level.OBJECT)
    path, write = f"run/{ROOT}", Writer.write
    began, is_new = Commits(host.store).begin(path, "b" * 32)
    Commits(other.store).publish(path, document(note="before"), mark(1))
    delete(other.store, path)
    closed, check_stands = [], staging.check_stands

    def write_slowly(self, data):
        if self.path == path and not closed:
            closed.append(path)
            host.objects.down = ("put",)
            put(host, "run/rank-0", level=Level.STAGED)
        return write(self, data)

    def check(*about):
        host.objects.down = False
        check_stands(*about)

    monkeypatch.setattr(Writer, "write", write_slowly)
    monkeypatch.setattr(sys.modules[Writer.__module__], "check_stands", check)
    Commits(host.store).publish(path, document(), began, is_new=is_new)
    assert closed
    host.tiers.wait("run", Level.OBJECT)
    assert content(other.plain(), path) == document()
    assert not host.tiers.drafts.conflicts()


def test_a_large_directory_is_looked_up_by_path(counted, monkeypatch):
    monkeypatch.setattr(commit, "LISTED_MAX", 3)
    for name in "abc":
        put_plain(counted, f"run/{name}")
    far = SaveMark(counted.clock.now_ns() + 10**15, "c" * 32)
    put_plain(counted, f"run/{PENDING}/{far.save_id}", far)
    commits, path = Commits(counted), f"run/{ROOT}"
    (began, is_new), requests = asked(counted, lambda: commits.begin(path, "d" * 32))
    assert is_new
    assert began.sequence == far.sequence + 1
    assert requests == {"list": 2, "read": 1, "head": 1}
    commits.publish(path, document(), began, is_new=is_new)
    assert commits.begin(path, "e" * 32) == (SaveMark(began.sequence + 1, "e" * 32), False)


def test_one_ranks_metadata_is_no_checkpoint(counted):
    path = "run/__3.metadata"
    for number in range(20):
        put_plain(counted, f"run/__{number + 10}.metadata")
    commits = Commits(counted)
    (began, is_new), requests = asked(counted, lambda: commits.begin(path, "a" * 32))
    assert is_new
    assert requests == {"read": 1, "head": 1}
    commits.publish(path, document(), began, is_new=is_new)
    assert commits.begin(path, "b" * 32)[1] is False


def test_a_newer_record_after_the_look_is_a_format_error(make_host):
    host, path = make_host("host", ack=Level.OBJECT), f"run/{ROOT}"
    began, is_new = Commits(host.store).begin(path, "b" * 32)
    put_plain(host.plain(), path)
    data = bytearray(host.objects.read(record_key(path), 1 << 20)[0])
    data[8] += 1  # the version
    host.objects.put(record_key(path), [bytes(data)])
    with pytest.raises(FormatError, match="use a newer tierfs"):
        Commits(host.store).publish(path, document(), began, is_new=is_new)


@pytest.mark.parametrize("away", [(), ("put",)], ids=["all", "puts"])
def test_a_change_of_this_host_that_is_pending_is_nothing_new(host, away):
    far = SaveMark(host.store.clock.now_ns() + 10**15, "c" * 32)
    with host.held(*away):
        put(host, f"run/{ROOT}", document(), metadata=far.as_metadata())
        assert Commits(host.store).begin(f"run/{ROOT}", "a" * 32) == (SaveMark(far.sequence + 1, "a" * 32), False)


def test_while_the_object_tier_is_away_nothing_is_taken_for_new(hosts):
    first, _ = hosts
    far = SaveMark(first.store.clock.now_ns() + 10**15, "c" * 32)
    Commits(first.store).publish(f"run/{ROOT}", document(), far)
    first.tiers.wait("run", Level.OBJECT)
    stat(first.store, f"run/{ROOT}")
    with first.held():
        assert Commits(first.store).begin(f"run/{ROOT}", "a" * 32) == (SaveMark(far.sequence + 1, "a" * 32), False)
        assert Commits(first.store).begin(f"new/{ROOT}", "a" * 32)[1] is False
    assert first.tiers.counters["blind_writes"] == 2


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"checkpoint": 3},
        {"checkpoint": {}},
        {"checkpoint": {"sequence": True, "save_id": "a"}},
        {"checkpoint": {"sequence": -1, "save_id": "a"}},
        {"checkpoint": {"sequence": 1 << 63, "save_id": "a"}},
        {"checkpoint": {"sequence": 1, "save_id": "../x"}},
        {"checkpoint": {"sequence": 1, "save_id": "a" * 65}},
        {"checkpoint": {"sequence": "1", "save_id": "a"}},
    ],
)
def test_marks_that_no_save_makes(metadata):
    assert SaveMark.of(metadata) is None


def test_a_mark_keeps_the_saves_that_it_may_replace():
    for replaces in (None, frozenset(), frozenset({mark(1), SaveMark(2, "")})):
        made = SaveMark(9, "a", replaces)
        found = SaveMark.of(json.loads(json.dumps(made.as_metadata())))
        assert (found, found.replaces) == (made, replaces)
    strange = {"checkpoint": {"sequence": 9, "save_id": "a", "replaces": [3, [1], [True, "b"], [1, "b"], {}]}}
    assert SaveMark.of(strange).replaces == {SaveMark(1, "b")}


@pytest.mark.parametrize("data", [b"", b"\x80\x02.", b"[]", b"{}", b'{"files": []}', b"[" * 100_000, b'{"files": 1}'])
def test_documents_that_are_none(data):
    with pytest.raises(FormatError):
        named_files(data, "here")
