"""An index that is missing, damaged or of another arena is rebuilt from the arena. Any loss is reported."""

import errno
import os
import shutil
import sqlite3

import pytest
from support.nvme_tools import (
    BUDGET,
    content_of,
    draft,
    drop_index,
    meta_of,
    name_of,
    open_tier,
    paths,
    read,
    save,
    write,
)

from tierfs.errors import CapacityError, FormatError
from tierfs.host.nvme.arena.arena import Arena
from tierfs.host.nvme.arena.extent_page import GRANULE, ExtentKind, ExtentPage
from tierfs.host.nvme.index.index import Index
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.nvme.tier import is_needed


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "nvme"


@pytest.fixture
def stored(directory):
    """A tier with three drafts, the second of them published, and a clean chunk."""
    tier = open_tier(directory)
    save(tier, "a", 1, 2)
    gone = save(tier, "gone", 2, 3)
    save(tier, "b", 4)
    tier.forget_drafts(gone)
    write(tier, 5, keep=False)
    tier.commit()
    tier.close()
    return directory


def places(directory):
    """Return the offsets of chunks by name, and of drafts by path."""
    database = sqlite3.connect(directory / "nvme.db")
    found = dict(database.execute("SELECT name, offset FROM chunks"))
    found.update(database.execute("SELECT path, offset FROM drafts"))
    database.close()
    return found


def overwrite(directory, at, content):
    with open(directory / "nvme.arena", "r+b") as file:
        file.seek(at)
        file.write(content)


def delete(path):
    os.remove(path)


def truncate(path):
    os.truncate(path, os.path.getsize(path) // 2)


def truncate_to_a_page(path):
    os.truncate(path, 4096)


def empty(path):
    os.truncate(path, 0)


def garbage(path):
    path.write_bytes(os.urandom(os.path.getsize(path)))


def garbage_inside(path):
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(os.path.getsize(path) - 8192))


def other_epoch(path):
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", [b"f" * 16])
    database.close()


def other_index(path):
    tier = open_tier(path.parent.with_name("other"))
    save(tier, "other", 77)
    tier.close()
    shutil.copy(path.parent.with_name("other") / "nvme.db", path)


def no_tables(path):
    os.remove(path)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE something (else_)")
    database.close()


def contradiction(path):
    with sqlite3.connect(path) as database:
        database.execute("UPDATE chunks SET offset = (SELECT MIN(offset) FROM chunks)")
    database.close()


DAMAGES = [
    delete, truncate, truncate_to_a_page, empty, garbage, garbage_inside, other_epoch, other_index, no_tables, contradiction,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_everything_that_is_pending_comes_back_with_its_chunks(stored, damage, caplog):
    tier = open_tier(stored)
    before = tier.drafts()
    tier.close()
    damage(stored / "nvme.db")
    tier = open_tier(stored)
    assert tier.drafts() == before
    assert paths(tier) == ["a", "b"]
    assert all(read(tier, number) for number in (1, 2, 4))
    assert read(tier, 5)
    assert tier.meta(content_of(5)[0]) == meta_of(content_of(5)[1])
    assert tier.evict([content_of(number)[0] for number in (1, 2, 4)]) == 0
    assert tier.usage().fallbacks["rebuilt"] == 1
    assert "rebuilding it from the arena" in caplog.text
    assert ("other: pending in an index that belongs to another arena" in caplog.text) == (damage is other_index)
    aside = {path.name for path in stored.glob("nvme.db.damaged-*")}
    assert ("nvme.db.damaged-1" in aside) == (damage is not delete)
    assert save(tier, "c", 9) > before[-1].seq
    tier.close()
    tier = open_tier(stored)
    assert paths(tier) == ["a", "b", "c"]
    assert tier.usage().fallbacks == {}
    tier.close()


def test_a_journal_whose_database_is_gone_is_not_played_back_into_the_next(stored):
    # A hot journal, as a crash during a commit leaves it.
    tier = open_tier(stored)
    state = tier._state
    with pytest.raises(ZeroDivisionError), state.index.transaction() as database:
        database.execute("PRAGMA cache_size=2")
        for number in range(500):
            database.execute("INSERT INTO refs VALUES (?, ?)", [f"x{number}", bytes(600)])
        shutil.copy(stored / "nvme.db-journal", stored / "hot")
        raise ZeroDivisionError
    tier.close()
    drop_index(stored)
    os.replace(stored / "hot", stored / "nvme.db-journal")
    for _ in range(2):
        tier = open_tier(stored)
        assert paths(tier) == ["a", "b"]
        assert read(tier, 1)
        tier.close()
    assert (stored / "nvme.db.damaged-1-journal").exists()


def test_drafts_are_known_by_numbers_that_were_never_used(stored):
    tier = open_tier(stored)
    used = save(tier, "late", 9)
    tier.forget_drafts(used)
    tier.close()
    drop_index(stored)
    tier = open_tier(stored)
    assert save(tier, "later", 10) > used
    tier.close()


def test_the_serials_go_on_after_a_rebuild_so_that_newer_data_wins(stored):
    for turn in range(3):
        drop_index(stored)
        tier = open_tier(stored)
        tier.evict()
        write(tier, *range(20 + turn, 22 + turn), keep=False)
        save(tier, f"turn{turn}", 30 + turn)
        tier.close()
    drop_index(stored)
    tier = open_tier(stored)
    assert paths(tier) == ["a", "b", "turn0", "turn1", "turn2"]
    assert all(read(tier, number) for number in (1, 2, 4, 30, 31, 32))
    for number in range(35):
        read(tier, number)
    tier.close()


def test_an_old_page_within_newer_data_is_not_believed(directory):
    tier = open_tier(directory)
    write(tier, *range(12), length=1000, keep=False)
    tier.commit()
    tier.evict()
    # This chunk's data contains the page of an older extent, unchanged and at the old place.
    offset, length = GRANULE, 6 * GRANULE
    state = tier._state
    with open(directory / "nvme.arena", "rb") as file:
        old = file.read()[offset + 4096 :][:length]
    assert old.count(b"TFSXTENT") == 6
    name = name_of(old)
    tier.write(name, meta_of(old), memoryview(old))
    assert state.ledger.written[name].extent.offset == offset
    tier.commit(drafts=[draft("a", [name])])
    tier.close()
    drop_index(directory)
    tier = open_tier(directory)
    out = bytearray(length)
    assert tier.read_into(name, 0, memoryview(out))
    assert out == old
    assert sum(tier.has(content_of(number, 1000)[0]) for number in range(12)) == 12 - 7 - 1
    assert paths(tier) == ["a"]
    assert tier.drafts()[0].state == "pending"
    tier.close()


def test_a_draft_whose_chunk_is_gone_from_the_arena_is_reported_not_dropped(stored, caplog):
    overwrite(stored, places(stored)[content_of(2)[0]], bytes(4096))
    drop_index(stored)
    tier = open_tier(stored)
    first, second = tier.drafts()
    assert (first.path, first.state, first.note) == ("a", "damaged", "1 of 2 chunks are not in the arena")
    assert (second.path, second.state) == ("b", "pending")
    assert "a was saved on this host and is no longer complete" in caplog.text
    assert tier.usage().damaged == tier.usage().fallbacks["drafts_damaged"] == 1
    (name, data) = content_of(2)
    tier.write(name, meta_of(data), memoryview(data))
    tier.commit()
    assert [item.state for item in tier.drafts()] == ["pending", "pending"]
    tier.close()


def test_a_draft_whose_record_is_damaged_is_reported_with_its_path(stored, caplog):
    overwrite(stored, places(stored)["a"] + 4096 + 60, b"\xff\xff")
    drop_index(stored)
    tier = open_tier(stored)
    first, second = sorted(tier.drafts(), key=lambda item: item.path)
    assert (first.path, first.state, first.data) == ("a", "damaged", b"")
    assert second.state == "pending"
    assert "a was saved on this host" in caplog.text
    reader = NvmeReader(stored)
    assert reader.draft("a").state == "damaged"
    tier.close()


def test_flipped_bits_in_a_chunk_are_left_to_whoever_verifies(stored):
    (name, data) = content_of(1)
    overwrite(stored, places(stored)[name] + 4096 + 1000, b"\xff")
    tier = open_tier(stored)
    out = bytearray(len(data))
    assert tier.read_into(name, 0, memoryview(out))
    assert out != data
    reader = NvmeReader(stored)
    assert reader.read(name, 0, memoryview(out)) == meta_of(data)
    assert out != data
    tier.close()


def test_flipped_bits_in_a_chunks_page_make_it_absent(stored):
    name, _ = content_of(1)
    overwrite(stored, places(stored)[name] + 50, b"\xff")
    tier = open_tier(stored)
    assert read(tier, 1) is None
    reader = NvmeReader(stored)
    assert read(reader, 1) is None
    assert reader.fallbacks["page_damaged"] == 1
    tier.close()


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_an_arena_whose_first_page_is_damaged_is_still_known(stored, index, caplog):
    overwrite(stored, 0, b"garbage")
    if index == "lost":
        drop_index(stored)
    tier = open_tier(stored)
    assert paths(tier) == ["a", "b"]
    assert all(read(tier, number) for number in (1, 2, 4))
    assert [item.state for item in tier.drafts()] == ["pending", "pending"]
    assert tier.usage().fallbacks["arena_page_damaged"] == 1
    assert "first page is damaged" in caplog.text
    tier.close()
    assert Arena.open(stored / "nvme.arena").epoch


def test_an_arena_that_is_gone_leaves_a_word_on_what_was_lost(stored, caplog):
    os.remove(stored / "nvme.arena")
    tier = open_tier(stored)
    assert [(item.path, item.state, item.data) for item in tier.drafts()] == [
        ("a", "damaged", b"manifest of a"),
        ("b", "damaged", b"manifest of b"),
    ]
    assert caplog.text.count("no longer complete: its arena is missing") == 2
    save(tier, "again", 1, 2)
    assert [item.state for item in tier.drafts()] == ["pending", "damaged", "pending"]
    for item in tier.drafts():
        tier.forget_drafts(item.seq)
    assert tier.usage().dirty_bytes == 0
    tier.close()


@pytest.mark.parametrize("content", [b"", b"garbage" * 100_000], ids=["empty", "garbage"])
def test_an_arena_that_was_replaced_by_something_else_leaves_a_word_on_what_was_lost(stored, content, caplog):
    (stored / "nvme.arena").write_bytes(content)
    tier = open_tier(stored)
    assert [(item.path, item.state) for item in tier.drafts()] == [("a", "damaged"), ("b", "damaged")]
    assert "no longer complete" in caplog.text
    save(tier, "again", 1, 2, 4)
    assert [item.state for item in tier.drafts()] == ["pending"] * 3
    assert read(tier, 1)
    tier.close()


def test_an_arena_that_was_cut_short_is_noticed_when_it_is_opened(stored):
    os.truncate(stored / "nvme.arena", places(stored)["b"])
    tier = open_tier(stored)
    assert os.path.getsize(stored / "nvme.arena") == BUDGET
    assert tier.usage().fallbacks["arena_cut"] == 1
    assert [(item.path, item.state) for item in tier.drafts()] == [("a", "pending"), ("b", "pending")]
    tier.close()
    os.truncate(stored / "nvme.arena", places(stored)[content_of(2)[0]])
    tier = open_tier(stored)
    assert [(item.path, item.state) for item in tier.drafts()] == [("a", "damaged"), ("b", "damaged")]
    tier.close()


INDEX_LEAF = 0x0A  # the first byte of a page of SQLite's file format


@pytest.mark.parametrize("entry", [b"a-path-of-its-own", content_of(4)[0]])
def test_an_index_of_sqlite_that_differs_from_its_table_is_rebuilt(directory, entry):
    tier = open_tier(directory)
    save(tier, "a-path-of-its-own", 1, 4)
    tier.close()
    data = bytearray((directory / "nvme.db").read_bytes())
    leaves = [page for page in range(0, len(data), 4096) if data[page] == INDEX_LEAF]
    found = [at for page in leaves if (at := data.find(entry, page, page + 4096)) >= 0]
    data[found[-1]] ^= 1
    (directory / "nvme.db").write_bytes(data)
    tier = open_tier(directory)
    assert tier.usage().fallbacks["rebuilt"] == 1
    assert paths(tier) == ["a-path-of-its-own"]
    reader = NvmeReader(directory)
    assert [item.state for item in reader.drafts_below("a-path-of-its-own")] == ["pending"]
    reader.close()


@pytest.mark.parametrize("left", [0, 5, 4096, GRANULE - 1, GRANULE])
@pytest.mark.parametrize("damage", [delete, empty, garbage])
def test_a_tier_without_an_index_whose_arena_was_cut_short_begins_anew_and_says_so(stored, damage, left, caplog):
    before = open_tier(stored)
    last = before.drafts()[-1].seq
    before.close()
    damage(stored / "nvme.db")
    os.truncate(stored / "nvme.arena", left)
    tier = open_tier(stored)
    assert paths(tier) == []
    assert tier.usage().fallbacks["rebuilt"] == 1
    assert "rebuilding it" in caplog.text
    if left < GRANULE:
        assert tier.usage().fallbacks["arena_cut"] == 1
        assert f"nvme.arena: was cut short to {left} bytes" in caplog.text
        assert "changes pending only in it are lost" in caplog.text
    assert (stored / "nvme.db.damaged-1").exists() == (damage is not delete)
    assert os.path.getsize(stored / "nvme.arena") == BUDGET
    assert save(tier, "again", 1, 2) > last
    tier.close()
    tier = open_tier(stored)
    assert paths(tier) == ["again"]
    assert read(tier, 1)
    assert tier.usage().fallbacks == {}
    tier.close()


def test_extents_of_another_arena_are_not_taken_for_ours(stored):
    arena = Arena.open(stored / "nvme.arena")
    foreign = ExtentPage(ExtentKind.CHUNK, b"f" * 16, 1 << 60, BUDGET - 2 * GRANULE, 5, b"foreign")
    arena.write(foreign, memoryview(b"other"))
    arena.close()
    drop_index(stored)
    tier = open_tier(stored)
    assert not tier.has(b"foreign")
    assert tier.usage().chunks == 5
    tier.close()


def test_a_version_that_is_not_known_is_refused_and_nothing_is_touched(stored):
    with sqlite3.connect(stored / "nvme.db") as database:
        database.execute("UPDATE meta SET value = 9 WHERE key = 'format'")
    database.close()
    before = (stored / "nvme.db").read_bytes()
    with pytest.raises(FormatError):
        open_tier(stored)
    assert (stored / "nvme.db").read_bytes() == before
    reader = NvmeReader(stored)
    assert read(reader, 1) is None
    assert reader.fallbacks["other_version"] == 1


def test_a_failure_of_the_index_is_survived_by_the_running_tier(directory, monkeypatch):
    failing = []

    def fail(point):
        if point in failing:
            raise OSError(errno.EIO, "Input/output error")

    tier = open_tier(directory, faults=fail)
    first = save(tier, "a", 1)
    # The commit took effect, but the writer received an error.
    failing[:] = ["after index.commit"]
    with pytest.raises(OSError):
        save(tier, "b", 2)
    failing[:] = []
    assert paths(tier) == ["a", "b"]
    assert save(tier, "b", 2) == tier.drafts()[1].seq
    failing[:] = ["after index.release"]
    with pytest.raises(OSError):
        tier.forget_drafts(first)
    failing[:] = []
    assert paths(tier) == ["b"]
    tier.forget_drafts(first)
    save(tier, "c", 3)
    assert read(tier, 2)
    assert read(tier, 3)
    tier.close()
    drop_index(directory)
    tier = open_tier(directory)
    assert paths(tier) == ["b", "c"], "a published draft came back"
    tier.close()


def test_an_arena_whose_index_finds_no_room_is_not_left_alone(directory, monkeypatch):
    def refuse(*_, **__):
        raise CapacityError("no room")

    with monkeypatch.context() as full:
        full.setattr(Index, "create", refuse)
        with pytest.raises(CapacityError):
            open_tier(directory)
    assert not os.path.exists(directory / "nvme.arena")
    assert not is_needed(directory)
    open_tier(directory).close()
    assert not is_needed(directory)


def test_a_tier_is_needed_where_it_has_a_draft_or_a_hold_or_cannot_say(directory):
    tier = open_tier(directory)
    write(tier, 1, keep=False)
    tier.commit()
    assert not is_needed(directory)
    seq = save(tier, "a", 2)
    assert is_needed(directory)
    tier.forget_drafts(seq)
    assert not is_needed(directory)
    tier.commit(holds={"somebody": write(tier, 3)})
    assert is_needed(directory)
    tier.drop_hold("somebody")
    tier.close()
    drop_index(directory)
    assert is_needed(directory)


class Died(BaseException):
    """The process ended at a fault point."""


def died_at(point, directory, left):
    """Return a fault that raises at the point once. First it copies the directory, since cleanup may change it."""

    def fault(at):
        if at == point and not left.exists():
            shutil.copytree(directory, left)
            raise Died

    return fault


def test_a_commit_is_undone_from_its_end(tmp_path):
    # Then the index is lost as well. The rebuilt tier must keep closing order: no draft without the earlier ones.
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    tier = open_tier(first)
    save(tier, "a", 1)
    tier.close()
    tier = open_tier(first, faults=died_at("before index.commit", first, second))
    with pytest.raises(Died):
        tier.commit(drafts=[draft(path, write(tier, number)) for number, path in enumerate("bcd", 2)])
    tier.close()
    with pytest.raises(Died):
        open_tier(second, faults=died_at("after arena.release", second, third))
    drop_index(third)
    tier = open_tier(third)
    assert paths(tier) == ["a", "b", "c"]
    tier.close()
