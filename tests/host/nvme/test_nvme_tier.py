"""The nvme tier without failures: commits, dirty and clean chunks, and eviction when room is short."""

import contextlib
import errno
import os
import stat
import subprocess
import threading
from types import SimpleNamespace

import pytest
from support.nvme_tools import (
    BUDGET,
    CHUNK,
    Steps,
    content_of,
    draft,
    meta_of,
    open_tier,
    paths,
    read,
    save,
    write,
)
from support.waiting import HANG_S

from tierfs.clock import ManualClock
from tierfs.errors import CapacityError, InvalidInputError, ReadOnlyError, StoreError
from tierfs.host.nvme.batch import EncodedDraft
from tierfs.host.nvme.chunk_file import file_bytes
from tierfs.host.nvme.chunks import ChunksGoneError
from tierfs.host.nvme.reader import NvmeReader


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "nvme"


@pytest.fixture
def tier(directory):
    return open_tier(directory)


def points_of(steps, action):
    """Return the steps of an action, without ``before``."""
    del steps.points[:]
    action()
    return [point.removeprefix("after ") for point in steps.points if point.startswith("after")]


def test_each_part_of_a_save_is_durable_before_the_next_begins(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    assert points_of(steps, lambda: save(tier, "a", 1)) == [
        *("chunk.write", "chunk.sync", "chunk.rename"),
        *("batch.write", "chunks.sync", "batch.rename", "batch.sync", "head.change"),
    ]


def test_a_file_is_renamed_away_before_it_is_overwritten(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    fill(tier)
    files = {file.stat().st_ino for file in (directory / "nvme" / "chunks").iterdir()}
    points = points_of(steps, lambda: write(tier, 99, keep=False))
    assert points == ["chunk.remove", "chunk.write", "chunk.sync", "chunk.rename"]
    assert {file.stat().st_ino for file in (directory / "nvme" / "chunks").iterdir()} == files


def test_a_finished_draft_is_gone_before_its_chunks_may_be_evicted(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    seq = save(tier, "a", 1)
    assert points_of(steps, lambda: tier.forget_drafts(seq)) == ["batch.finish", "head.change"]
    assert tier.drafts() == []
    assert tier.usage().dirty_bytes == 0


def fill(tier, clock=None):
    """Write clean chunks until the first eviction. Return their number."""
    for number in range(100):
        if tier.usage().used_bytes + file_bytes(CHUNK) > BUDGET:
            return number
        write(tier, number, keep=False)
        if clock is not None:
            clock.sleep(100)
    raise AssertionError


def test_a_commit_survives_reopening(tier, directory):
    first, second = save(tier, "a", 1, 2), save(tier, "b", 2, 3)
    tier.keep_as_conflict(second, "changed on the store")
    before = tier.drafts()
    again = open_tier(directory)
    assert again.drafts() == before
    assert [(item.seq, item.path, item.data, item.state) for item in before] == [
        (first, "a", b"manifest of a", "pending"),
        (second, "b", b"manifest of b", "conflict"),
    ]
    assert all(read(again, number) for number in (1, 2, 3))
    assert save(again, "c", 4) > second


def test_a_chunk_that_is_there_is_not_written_again(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    save(tier, "a", 1)
    save(tier, "b", 1)
    assert steps.points.count("before chunk.write") == 1


def test_a_draft_with_a_known_write_id_is_not_stored_again(tier):
    seq = save(tier, "a", 1)
    assert tier.commit([draft("a", [])]) == [seq]
    assert len(tier.drafts()) == 1


def test_a_draft_that_needs_what_is_not_here_is_refused_unless_it_is_elsewhere(tier):
    (here,), (absent, _) = write(tier, 1), content_of(2)
    with pytest.raises(ChunksGoneError) as caught:
        tier.commit([draft("a", [here, absent])])
    assert caught.value.names == (absent,)
    assert tier.drafts() == []
    tier.commit([draft("a", [here, absent])], elsewhere=[absent])
    assert paths(tier) == ["a"]


def test_a_written_chunk_is_clean_and_survives_reopening(tier, directory):
    write(tier, 1, keep=False)
    assert read(tier, 1)
    assert tier.usage().clean_bytes == tier.usage().used_bytes == file_bytes(CHUNK)
    again = open_tier(directory)
    assert read(again, 1)
    assert again.evict() == file_bytes(CHUNK)
    assert not read(again, 1)


def test_a_chunk_is_dirty_while_a_draft_needs_it(tier, directory):
    reader = NvmeReader(directory)
    (name,) = write(tier, 1)
    first, second = tier.commit([draft("a", [name]), draft("b", [name])])
    for drop in (
        lambda: tier.forget_drafts(first),
        lambda: tier.forget_drafts(second),
    ):
        assert tier.evict([name]) == 0
        assert tier.usage().clean_bytes == reader.usage().clean_bytes == 0
        drop()
    assert tier.usage().dirty_bytes == reader.usage().dirty_bytes == 0
    assert tier.evict([name]) > 0
    assert not tier.holds(name)


def test_a_chunk_is_kept_for_a_minute_until_its_draft_is_stored(directory):
    clock = ManualClock()
    tier = open_tier(directory, clock=clock)
    (mine,) = write(tier, 1)
    save(tier, "other", 2)
    assert tier.evict() == 0
    tier.commit([draft("a", [mine])])
    (never,) = write(tier, 3)
    clock.sleep(61)
    assert tier.evict() > 0
    assert not tier.holds(never)
    assert tier.holds(mine)


def test_the_least_recently_used_clean_chunk_is_evicted_first(directory):
    clock = ManualClock()
    tier = open_tier(directory, clock=clock)
    count = fill(tier, clock)
    assert read(NvmeReader(directory, clock=clock), 0)
    assert read(tier, 1)
    tier.protect([content_of(2)[0]])
    write(tier, 90, 91, keep=False)
    there = [read(tier, number) is not None for number in range(count)]
    assert there == [number not in (3, 4) for number in range(count)]
    usage = tier.usage()
    assert usage.evicted_bytes == 2 * file_bytes(CHUNK)
    assert usage.used_bytes <= BUDGET


def test_the_order_of_use_survives_reopening(directory):
    clock = ManualClock()
    tier = open_tier(directory, clock=clock)
    fill(tier, clock)
    assert read(tier, 0)
    tier = open_tier(directory, clock=clock)
    write(tier, 90, keep=False)
    assert read(tier, 0)
    assert not read(tier, 1)


def test_a_smaller_budget_evicts_what_is_clean(directory):
    tier = open_tier(directory)
    save(tier, "a", 50)
    fill(tier)
    tier = open_tier(directory, budget=BUDGET // 4)
    assert tier.usage().used_bytes <= BUDGET // 4
    assert read(tier, 50)


def test_the_tier_ends_where_the_disk_ends(directory, monkeypatch):
    tier = open_tier(directory)
    write(tier, 1, 2, keep=False)
    real = os.statvfs

    def full(path):
        found = real(path)
        return os.statvfs_result((*found[:4], 10, *found[5:]))

    monkeypatch.setattr(os, "statvfs", full)
    write(tier, 3, keep=False)
    assert [read(tier, number) is not None for number in (1, 2, 3)].count(True) == 2
    save(tier, "a", 4)
    save(tier, "b", 5)
    with pytest.raises(CapacityError):
        save(tier, "c", 6)


def test_dirty_bytes_are_never_evicted_and_a_full_tier_says_so(tier):
    number = 0
    with pytest.raises(CapacityError, match="wait for the flush, or raise nvme="):
        for number in range(100):
            save(tier, f"f{number}", number)
    assert number > 3
    stored = tier.drafts()
    assert all(read(tier, int(item.path[1:])) for item in stored)
    tier.forget_drafts(stored[0].seq)
    save(tier, "again", number)
    assert read(tier, number)


def test_a_chunk_larger_than_the_whole_tier_is_refused_at_once(tier):
    save(tier, "a", 1)
    with pytest.raises(CapacityError):
        write(tier, 2, length=BUDGET)
    assert read(tier, 1)


def test_a_file_that_is_used_again_holds_the_new_chunk(tier):
    for number in range(60):
        write(tier, number, keep=False)
        assert read(tier, number)
        for old in range(max(0, number - 15), number):
            read(tier, old)  # absent or correct, never wrong


def test_a_bad_copy_is_forgotten(tier):
    write(tier, 1, keep=False)
    (name, _) = content_of(1)
    tier.quarantine(name)
    assert not tier.holds(name)
    assert tier.usage().fallbacks["quarantined"] == 1
    tier.quarantine(name)
    assert tier.usage().fallbacks["quarantined"] == 1
    save(tier, "a", 1)
    assert read(tier, 1)


def test_a_bad_copy_that_a_draft_needs_is_reported_and_healed_by_writing_it_again(tier, directory, caplog):
    (name, data) = content_of(1)
    seq = save(tier, "a", 1, 2)
    tier.quarantine(name)
    assert [(item.seq, item.state) for item in tier.drafts()] == [(seq, "damaged")]
    assert "a was saved on this host and is no longer complete" in caplog.text
    assert not tier.holds(name)
    reader = NvmeReader(directory)
    assert read(reader, 1) is None
    assert reader.usage().damaged == tier.usage().damaged == 1
    tier.write(name, meta_of(data), memoryview(data), keep=False)
    assert [item.state for item in tier.drafts()] == ["pending"]
    assert read(reader, 1)
    used = tier.usage().used_bytes
    tier.forget_drafts(seq)
    tier.evict()
    assert tier.usage().used_bytes == 0
    assert used > 0


REUSED = SimpleNamespace(segment=SimpleNamespace(is_still=lambda _: False))


def test_a_chunk_found_wrong_after_writing_is_absent(tier, directory):
    name, data = content_of(1)
    tier.write(name, meta_of(data), memoryview(data), source=REUSED)
    assert not tier.holds(name)
    assert tier.usage().used_bytes == 0
    assert os.listdir(directory / "nvme" / "chunks") == []


def test_a_sound_copy_is_not_taken_back_because_another_one_would_have_been_wrong(tier):
    # The slot was reused in the meantime, but the tier already had the chunk.
    save(tier, "a", 1)
    name, data = content_of(1)
    tier.write(name, meta_of(data), memoryview(bytearray(len(data))), source=REUSED)
    assert [item.state for item in tier.drafts()] == ["pending"]
    assert read(tier, 1)


def test_many_threads_write_commit_read_and_evict_at_once(directory):
    tier = open_tier(directory, budget=8 << 20)
    failures = []

    def save_again(*what):
        # Chunks that another thread wrote and published may be evicted before the commit. A flusher writes them
        # again.
        while True:
            with contextlib.suppress(ChunksGoneError):
                return save(tier, *what)

    def work(number):
        try:
            for turn in range(12):
                seq = save_again(f"{number}/{turn}", 100 * number + turn, 7777)
                assert read(tier, 100 * number + turn)
                assert read(tier, 7777)
                tier.forget_drafts(seq)
                write(tier, 100 * number + 50 + turn, keep=False)
                if turn % 5 == number:
                    tier.evict()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tier.drafts() == []
    assert tier.usage().dirty_bytes == 0
    again = open_tier(directory, budget=8 << 20)
    for number in range(6):
        for turn in range(12):
            read(again, 100 * number + turn)


def test_threads_write_one_chunk_once(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    threads = [threading.Thread(target=write, args=(tier, 1)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps.points.count("after chunk.write") == 1


def test_different_chunks_are_written_at_the_same_time(directory):
    meeting = threading.Barrier(4, timeout=HANG_S)

    def meet(point):
        if point == "before chunk.write":
            meeting.wait()

    tier = open_tier(directory, faults=meet)
    threads = [threading.Thread(target=write, args=(tier, number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not meeting.broken
    assert all(read(tier, number) for number in range(4))


def failing_once(monkeypatch, call, when=lambda *_: True):
    """Make a call of the operating system fail once."""
    real, failing = getattr(os, call), [True]

    def fail(*arguments):
        if failing and when(*arguments):
            failing.pop()
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, call, fail)


def is_directory(fd):
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def test_a_chunk_whose_flush_fails_is_not_stored(tier, directory, monkeypatch):
    failing_once(monkeypatch, "fdatasync")
    with pytest.raises(StoreError, match="Input/output"):
        write(tier, 2)
    assert not tier.holds(content_of(2)[0])
    assert os.listdir(directory / "nvme" / "chunks") == []
    assert tier.usage().used_bytes == 0
    save(tier, "a", 2)
    assert read(tier, 2)


def test_names_whose_flush_fails_are_not_believed_the_second_time(tier, monkeypatch):
    save(tier, "before", 1)
    names = write(tier, 2)
    failing_once(monkeypatch, "fsync", is_directory)
    with pytest.raises(StoreError, match="Input/output"):
        tier.commit([draft("a", names)])
    with pytest.raises(ChunksGoneError):
        tier.commit([draft("a", names)])
    save(tier, "a", 2)
    assert paths(tier) == ["before", "a"]
    assert read(tier, 2)


@pytest.mark.parametrize("call", ["fdatasync", "fsync", "rename"])
def test_a_batch_that_cannot_be_stored_leaves_nothing(tier, directory, monkeypatch, call):
    save(tier, "a", 1)
    write(tier, 2)
    tier._chunks.flush()
    used, reader = tier.usage().used_bytes, NvmeReader(directory)
    failing_once(monkeypatch, call)
    with pytest.raises(StoreError):
        save(tier, "b", 2)
    assert paths(tier) == ["a"]
    assert [item.path for item in reader.drafts_below("")] == ["a"]
    assert tier.usage().used_bytes == used
    save(tier, "b", 2)
    assert paths(tier) == ["a", "b"]
    assert reader.draft("b")


def test_a_draft_in_a_batch_is_finished_alone(tier, directory):
    names = write(tier, 1, 2, 3)
    seqs = tier.commit([draft(path, [name]) for path, name in zip("abc", names, strict=True)])
    reader = NvmeReader(directory)
    assert reader.draft("b")
    tier.keep_as_conflict(seqs[2], "why")
    tier.forget_drafts(seqs[1])
    assert reader.draft("b") is None
    assert tier.evict([names[1]]) > 0
    again = open_tier(directory)
    assert [(item.path, item.state, item.note) for item in again.drafts()] == [
        ("a", "pending", ""),
        ("c", "conflict", "why"),
    ]
    again.forget_drafts(seqs[0], seqs[2])
    assert os.listdir(directory / "nvme" / "drafts") == []
    assert again.usage().dirty_bytes == 0


@pytest.mark.parametrize("call", ["fsync", "fdatasync", "unlink"])
def test_a_draft_whose_removal_fails_is_removed_by_the_next_attempt(tier, directory, monkeypatch, call):
    alone = save(tier, "a", 1)
    first, second = tier.commit([draft("b", write(tier, 2)), draft("c", [])])
    with monkeypatch.context() as patch:
        failing_once(patch, call, lambda *_: True)
        with pytest.raises(StoreError):
            tier.forget_drafts(alone, first)
    tier.forget_drafts(alone, first)
    assert paths(tier) == ["c"]
    assert [item.path for item in NvmeReader(directory).drafts_below("")] == ["c"]
    tier.forget_drafts(second)
    tier.evict()
    assert tier.usage().used_bytes == 0


def test_opening_reads_no_chunk(directory, monkeypatch):
    tier = open_tier(directory)
    save(tier, "a", 1)
    write(tier, 2, 3, keep=False)
    monkeypatch.setattr(os, "preadv", None)
    tier = open_tier(directory)
    assert tier.usage().chunks == 3


def test_the_disk_follows_use(tier, directory):
    def disk():
        files = [file for file in directory.rglob("*") if file.is_file()]
        return sum(file.stat().st_blocks for file in files) * 512

    assert disk() < 20_000
    seq = save(tier, "a", 1)
    assert disk() < CHUNK + 30_000
    tier.forget_drafts(seq)
    tier.evict()
    assert disk() < 20_000


@pytest.mark.parametrize("spare", [0, 1, 5, 20, 60])
def test_a_disk_that_is_full_leaves_everything_committed_intact(tmp_path, spare):
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m,mode=0700", "tmpfs", str(small)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        tier = open_tier(small / "n")
        assert not tier.usage().gives_local  # a tmpfs does not survive a crash of the host
        stored = [save(tier, "a", 1)]
        statistics = os.statvfs(small)
        (small / "ballast").write_bytes(bytes(max(0, (statistics.f_bavail - spare) * statistics.f_frsize)))
        outcome = []
        for number in range(2, 40):
            try:
                names = write(tier, number, length=1000)
                stored += tier.commit([draft(f"b{number}", names, os.urandom(20_000))])
            except (CapacityError, StoreError) as error:
                outcome.append(error)
                break
        assert outcome
        assert [item.seq for item in tier.drafts()] == stored
        assert read(tier, 1)
        os.remove(small / "ballast")
        tier = open_tier(small / "n")
        assert [item.seq for item in tier.drafts()] == stored
        assert all(read(tier, number, 1000) for number in range(2, len(stored) + 1))
        tier.forget_drafts(*stored)
        save(tier, "after", 99)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_the_state_directory_is_the_owners_alone(directory):
    directory.mkdir(mode=0o755)
    with pytest.raises(ReadOnlyError):
        open_tier(directory)


def test_invalid_arguments_are_refused(tier, directory):
    with pytest.raises(InvalidInputError):
        open_tier(directory.with_name("other"), budget=1000)
    with pytest.raises(InvalidInputError):
        tier.write(b"", b"", memoryview(b"x"))
    with pytest.raises(InvalidInputError):
        tier.write(b"n" * 34, b"", memoryview(b"x"))
    with pytest.raises(InvalidInputError):
        tier.write(b"n", b"m" * 901, memoryview(b"x"))


def test_a_tier_that_is_full_of_drafts_lists_those_below_a_directory(tier, directory):
    for path in ("run/a", "run/b/c", "runner", "run0", "run", "x/run/a"):
        tier.commit([draft(path, [])])
    reader = NvmeReader(directory)
    assert [item.path for item in reader.drafts_below("run")] == ["run/a", "run/b/c", "run"]
    assert len(reader.drafts_below("")) == 6
    conflict = reader.draft("run/a")
    tier.keep_as_conflict(conflict.seq, "somebody else")
    assert reader.draft("run/a") is None
    assert [item.path for item in reader.drafts_below("run")] == ["run/b/c", "run"]
    assert [item.note for item in reader.drafts_below("run", conflicts=True)] == ["somebody else", "", ""]
    usage = reader.usage()
    assert (usage.drafts, usage.conflicts, usage.budget_bytes) == (5, 1, BUDGET)
    assert usage.used_bytes == tier.usage().used_bytes


def test_the_newest_draft_of_a_path_is_the_one_that_is_found(tier, directory):
    tier.commit([EncodedDraft(b"1" * 16, "a", b"old", []), EncodedDraft(b"2" * 16, "a", b"new", [])])
    assert NvmeReader(directory).draft("a").data == b"new"
    assert NvmeReader(directory).draft("b") is None
