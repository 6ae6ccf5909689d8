"""The nvme tier without failures: commits, dirty and clean chunks, and eviction when room is short."""

import contextlib
import errno
import os
import subprocess
import threading
from collections import deque

import pytest
from support.nvme_tools import (
    BUDGET,
    CHUNK,
    Steps,
    content_of,
    draft,
    drop_index,
    meta_of,
    open_tier,
    paths,
    read,
    save,
    write,
)

from tierfs.clock import ManualClock
from tierfs.errors import CapacityError, InvalidInputError, ReadOnlyError, StoreError
from tierfs.host.nvme.arena.extent_page import GRANULE, extent_bytes
from tierfs.host.nvme.commit import EncodedDraft
from tierfs.host.nvme.ledger import candidates
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.nvme.stored import ChunksGoneError


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "nvme"


@pytest.fixture
def tier(directory):
    tier = open_tier(directory)
    yield tier
    tier.close()


def index_of(points, point):
    return points.index(point)


def test_data_is_flushed_before_the_index_names_it_and_the_caller_hears_of_it(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    del steps.points[:]
    save(tier, "a", 1)
    assert steps.points == [
        f"{when} {step}"
        for step in ("arena.write", "arena.intents", "arena.write", "arena.sync", "index.commit")
        for when in ("before", "after")
    ]
    tier.close()


def test_an_extent_is_reused_only_after_the_commit_that_released_it(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    for number in range(9):
        write(tier, number, keep=False)
        tier.commit()
    del steps.points[:]
    write(tier, 9, keep=False)
    assert steps.points[:3] == ["before index.release", "after index.release", "before arena.write"]
    tier.close()


def test_the_header_of_a_published_draft_is_released_before_publish_returns_and_before_its_extent_is_free(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    seq = save(tier, "a", 1)
    del steps.points[:]
    tier.forget_drafts(seq)
    assert steps.points == [
        "before index.release",
        "after index.release",
        "before arena.release",
        "after arena.release",
    ]
    assert tier.drafts() == []
    assert tier.usage().dirty_bytes == 0
    tier.close()


def test_a_commit_survives_reopening(tier, directory):
    first, second = save(tier, "a", 1, 2), save(tier, "b", 2, 3)
    tier.keep_as_conflict(second, "changed on the store")
    before = tier.drafts()
    tier.close()
    again = open_tier(directory)
    assert again.drafts() == before
    assert [(item.seq, item.path, item.data, item.state) for item in before] == [
        (first, "a", b"manifest of a", "pending"),
        (second, "b", b"manifest of b", "conflict"),
    ]
    assert all(read(again, number) for number in (1, 2, 3))
    assert again.meta(content_of(1)[0]) == meta_of(content_of(1)[1])
    assert save(again, "c", 4) > second
    again.close()


def test_a_chunk_that_was_only_written_is_readable_here_but_not_kept(tier, directory):
    (name,) = write(tier, 1)
    assert tier.has(name)
    assert read(tier, 1)
    assert tier.meta(name)
    assert NvmeReader(directory).find(name) is None
    tier.close()
    again = open_tier(directory)
    assert not again.has(name)
    again.close()


def test_a_chunk_that_is_there_is_not_written_again(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    save(tier, "a", 1)
    written = steps.points.count("before arena.write")
    save(tier, "b", 1)
    assert steps.points.count("before arena.write") == written + 1  # the draft
    tier.close()


def test_a_draft_with_a_known_write_id_is_not_stored_again(tier):
    seq = save(tier, "a", 1)
    assert tier.commit(drafts=[draft("a", [])]) == [seq]
    assert len(tier.drafts()) == 1


def test_a_draft_that_needs_what_is_not_here_is_refused_unless_it_is_elsewhere(tier):
    (here,), (absent, _) = write(tier, 1), content_of(2)
    with pytest.raises(ChunksGoneError) as caught:
        tier.commit(drafts=[draft("a", [here, absent])])
    assert caught.value.names == (absent,)
    assert tier.drafts() == []
    tier.commit(drafts=[draft("a", [here, absent])], elsewhere=[absent])
    assert paths(tier) == ["a"]


def test_a_chunk_is_dirty_for_as_long_as_a_draft_or_a_holder_needs_it(tier):
    (name,) = write(tier, 1)
    first, second = tier.commit(drafts=[draft("a", [name]), draft("b", [name])], holds={"open:me:1": [name]})
    for drop in (
        lambda: tier.forget_drafts(first),
        lambda: tier.forget_drafts(second),
        lambda: tier.drop_hold("open:me:1"),
    ):
        assert tier.evict([name]) == 0
        assert tier.usage().clean_bytes == 0
        drop()
    assert tier.usage().dirty_bytes == 0
    assert tier.evict([name]) > 0
    assert not tier.has(name)


def test_holders_are_known_and_keep_what_they_need_over_a_restart(tier, directory):
    tier.commit(holds={"open:me:1": write(tier, 1), "open:you:2": write(tier, 2)})
    tier.close()
    again = open_tier(directory)
    assert again.holders() == ["open:me:1", "open:you:2"]
    assert again.evict() == 0
    again.drop_hold("open:me:1", "open:you:2")
    assert again.evict() > 0
    again.close()


def test_a_chunk_waits_for_its_draft_even_if_others_commit_before(directory):
    clock = ManualClock()
    tier = open_tier(directory, clock=clock)
    (mine,) = write(tier, 1)
    save(tier, "other", 2)
    assert tier.evict() == 0
    tier.commit(drafts=[draft("a", [mine])])
    (never,) = write(tier, 3)
    tier.commit()
    clock.sleep(61)
    assert tier.evict() > 0
    assert not tier.has(never)
    assert tier.has(mine)
    tier.close()


def test_clean_chunks_go_when_room_is_short_the_least_recently_used_first(directory):
    clock = ManualClock()
    tier = open_tier(directory, clock=clock)
    reader = NvmeReader(directory, clock=clock)
    for number in range(9):
        write(tier, number, keep=False)
        tier.commit()
        clock.sleep(10)
    assert read(reader, 0)
    assert read(tier, 1)
    clock.sleep(10)
    write(tier, 9, 10, keep=False)
    tier.commit()
    assert [read(tier, number) is not None for number in (0, 1, 2)] == [True, True, False]
    usage = tier.usage()
    assert usage.evicted_bytes > 0
    assert usage.used_bytes <= BUDGET
    tier.close()


def chunks(count):
    """Return names and lengths of chunks that were not written yet."""
    return {content_of(number)[0]: CHUNK for number in range(1000, 1000 + count)}


def filled(directory, steps):
    tier = open_tier(directory, faults=steps)
    for number in range(100):
        write(tier, number, keep=False)
        tier.commit()
        if tier.usage().evicted_bytes:
            break
    steps.points.clear()
    return tier


def test_room_for_many_chunks_is_made_by_one_commit_and_for_no_more_than_they_take(directory):
    steps = Steps()
    tier = filled(directory, steps)
    before, used = tier.usage().evicted_bytes, tier.usage().used_bytes
    tier.make_room(chunks(6))
    assert steps.points.count("before index.release") == 1
    evicted = tier.usage().evicted_bytes - before
    extent, capacity = extent_bytes(CHUNK), BUDGET - GRANULE
    assert 0 <= int(0.85 * capacity) - (used - evicted + 6 * extent) < extent
    write(tier, *range(200, 206))
    assert steps.points.count("before index.release") == 1
    tier.make_room({})
    assert steps.points.count("before index.release") == 1
    tier.close()


def test_no_room_is_made_while_there_is_some(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    write(tier, *range(8), keep=False)
    tier.commit()
    tier.make_room(chunks(1))
    assert "before index.release" not in steps.points
    tier.make_room(chunks(2))
    assert "before index.release" in steps.points
    tier.close()


def test_room_is_not_made_of_what_it_is_made_for(directory):
    clock = ManualClock()
    tier = open_tier(directory, clock=clock)
    for number in range(9):
        write(tier, number, keep=False)
        tier.commit()
        clock.sleep(10)
    unchanged = {content_of(number)[0]: CHUNK for number in range(4)}
    clock.sleep(600)
    tier.make_room({**unchanged, **chunks(3)})
    assert all(map(tier.has, unchanged))
    assert tier.usage().evicted_bytes == 4 * extent_bytes(CHUNK)
    tier.close()


def test_chunks_are_put_in_order_once_for_many_evictions_and_without_the_tables_lock(directory, monkeypatch):
    clock, orders, free = ManualClock(), [], []
    tier = open_tier(directory, clock=clock)

    def watched(rows, used):
        def take():
            free.append(tier._state.tables.acquire(timeout=5))
            tier._state.tables.release()

        other = threading.Thread(target=take)
        other.start()
        other.join()
        found = candidates(rows, used)
        orders.append(len(found))
        return found

    monkeypatch.setattr("tierfs.host.nvme.state.candidates", watched)
    monkeypatch.setattr("tierfs.host.nvme.ledger.LOW_WATERMARK", 0.95)  # so that each eviction frees almost nothing
    number = 0
    while not tier.usage().evicted_bytes:
        write(tier, number, keep=False)
        tier.commit()
        clock.sleep(100)
        number += 1
    assert orders == [number - 1]
    assert read(tier, 2)  # marks it as used: it was the next but one to be evicted
    clock.sleep(100)
    for more in range(number, number + 3):
        write(tier, more, keep=False)
        tier.commit()
        clock.sleep(100)
    assert len(orders) == 1
    assert all(free)
    assert [read(tier, each) is not None for each in range(6)] == [False, False, True, False, False, True]
    tier.close()


def test_a_chunk_that_is_asked_for_while_others_are_put_in_order_stays(directory, monkeypatch):
    tier = open_tier(directory, clock=(clock := ManualClock()))
    number = 0
    while not tier.usage().evicted_bytes:
        write(tier, number, keep=False)
        tier.commit()
        clock.sleep(100)
        number += 1
    state = tier._state
    asked = state._candidates[0].name
    (again,) = (each for each in range(number) if content_of(each)[0] == asked)
    state._candidates = deque([state._candidates[0]])

    def watched(rows, used):
        other = threading.Thread(target=write, args=(tier, again))
        other.start()
        other.join()
        return candidates(rows, used)

    monkeypatch.setattr("tierfs.host.nvme.state.candidates", watched)
    tier.make_room({content_of(1000 + each)[0]: CHUNK for each in range(4)})
    assert tier.has(asked)
    save(tier, "a", again)
    tier.close()


def test_threads_that_find_no_room_at_once_evict_once_for_all(directory):
    steps = Steps()
    tier = filled(directory, steps)
    waiting, number = threading.Barrier(3), 300
    while not steps.points.count("before index.release"):
        # A thread that finds no room waits until the others have found none either.
        threads = [
            threading.Thread(target=lambda at=at: (waiting.wait(), write(tier, at, keep=False)))
            for at in range(number, number + 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        number += 3
    assert steps.points.count("before index.release") == 1
    tier.close()


def test_room_is_made_of_what_may_go_and_no_more(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    save(tier, "needed", *range(10))
    tier.make_room(chunks(6))
    assert all(read(tier, number) for number in range(10))
    assert not tier.usage().evicted_bytes
    tier.close()


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


def test_an_extent_freed_by_eviction_holds_the_new_chunk_and_not_the_old(tier):
    for number in range(60):
        write(tier, number, keep=False)
        tier.commit()
        assert read(tier, number)
        for old in range(max(0, number - 15), number):
            read(tier, old)  # absent or correct, never wrong


def test_a_budget_that_grew_grows_the_arena_and_one_that_shrank_shrinks_it_as_far_as_it_is_free(directory):
    tier = open_tier(directory, budget=BUDGET)
    save(tier, "a", 1)
    tier.close()
    tier = open_tier(directory, budget=2 * BUDGET)
    assert os.path.getsize(directory / "nvme.arena") == 2 * BUDGET
    write(tier, *range(2, 18))
    tier.commit(drafts=[draft("late", write(tier, 18))])
    tier.close()
    tier = open_tier(directory, budget=BUDGET // 2)
    assert BUDGET < os.path.getsize(directory / "nvme.arena") < 2 * BUDGET
    assert read(tier, 18)
    with pytest.raises(CapacityError):
        write(tier, *range(30, 40), length=CHUNK * 2)
    tier.forget_drafts(*(item.seq for item in tier.drafts()))
    tier.evict()
    tier.close()
    tier = open_tier(directory, budget=BUDGET // 2)
    assert os.path.getsize(directory / "nvme.arena") == BUDGET // 2
    tier.close()


def test_an_arena_that_may_not_grow_is_used_as_it_is(directory, monkeypatch):
    tier = open_tier(directory)
    save(tier, "a", 1)
    tier.close()

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tier = open_tier(directory, budget=4 * BUDGET)
    assert tier.usage().fallbacks["not_grown"] == 1
    assert read(tier, 1)
    save(tier, "b", 2)
    tier.close()


def test_a_bad_copy_is_forgotten(tier):
    write(tier, 1, keep=False)
    tier.commit()
    (name, _) = content_of(1)
    tier.quarantine(name)
    assert not tier.has(name)
    assert tier.meta(name) is None
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
    assert not tier.has(name)
    reader = NvmeReader(directory)
    assert read(reader, 1) is None
    assert reader.draft("a").state == "damaged"
    assert tier.usage().damaged == 1
    tier.write(name, meta_of(data), memoryview(data))
    tier.commit()
    assert [item.state for item in tier.drafts()] == ["pending"]
    assert read(reader, 1)
    used = tier.usage().used_bytes
    tier.forget_drafts(seq)
    tier.evict()
    assert tier.usage().used_bytes == 0
    assert used > 0


def test_a_chunk_found_wrong_after_writing_is_absent(tier, directory):
    name, data = content_of(1)
    tier.write(name, meta_of(data), memoryview(data), is_sound=lambda: False)
    assert not tier.has(name)
    assert tier.usage().used_bytes == 0
    tier.close()
    drop_index(directory)
    tier = open_tier(directory)
    assert not tier.has(name)
    tier.close()


def test_a_sound_copy_is_not_taken_back_because_another_one_would_have_been_wrong(tier):
    # The slot was reused in the meantime, but the tier already had the chunk.
    save(tier, "a", 1)
    name, data = content_of(1)
    tier.write(name, meta_of(data), memoryview(bytearray(len(data))), is_sound=lambda: False)
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
    tier.commit()
    assert tier.usage().dirty_bytes == 0
    tier.close()
    again = open_tier(directory, budget=8 << 20)
    for number in range(6):
        for turn in range(12):
            read(again, 100 * number + turn)
    again.close()


def test_two_threads_write_one_chunk_once(directory):
    steps = Steps()
    tier = open_tier(directory, faults=steps)
    threads = [threading.Thread(target=write, args=(tier, 1)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps.points.count("after arena.write") == 1
    tier.close()


def test_different_chunks_are_written_at_the_same_time(directory):
    meeting = threading.Barrier(4, timeout=20)

    def meet(point):
        if point == "before arena.write":
            meeting.wait()

    tier = open_tier(directory, faults=meet)
    threads = [threading.Thread(target=write, args=(tier, number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not meeting.broken
    assert all(read(tier, number) for number in range(4))
    tier.close()


def test_writes_go_on_while_a_commit_waits_for_the_disk(directory):
    waiting, go_on = threading.Event(), threading.Event()

    def wait(point):
        if point == "before arena.sync":
            waiting.set()
            assert go_on.wait(20)

    tier = open_tier(directory, faults=wait)
    write(tier, 1)
    thread = threading.Thread(target=tier.commit)
    thread.start()
    assert waiting.wait(20)
    (late,) = write(tier, 2)
    go_on.set()
    thread.join()
    reader = NvmeReader(directory)
    assert reader.find(content_of(1)[0])
    assert reader.find(late) is None  # the flush may not have included it
    tier.commit()
    assert reader.find(late)
    tier.close()


def test_a_flush_that_fails_is_not_believed_the_second_time(tier, monkeypatch):
    save(tier, "before", 1)
    names = write(tier, 2)
    real, failing = os.fdatasync, [True]

    def sync(fd):
        if failing:
            failing.pop()
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    with pytest.raises(StoreError, match="Input/output"):
        tier.commit(drafts=[draft("a", names)])
    with pytest.raises(ChunksGoneError):
        tier.commit(drafts=[draft("a", names)])
    save(tier, "a", 2)
    assert paths(tier) == ["before", "a"]
    assert read(tier, 2)


def test_a_commit_that_the_disk_has_no_room_for_changes_nothing(directory):
    failing = []

    def full(point):
        if point in failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    tier = open_tier(directory, faults=full)
    save(tier, "a", 1)
    used = tier.usage().used_bytes
    for point in ("before arena.write", "before arena.intents", "before index.commit"):
        failing[:] = [point]
        with pytest.raises(OSError):
            save(tier, "b", 2)
        failing.clear()
        assert paths(tier) == ["a"]
        assert read(tier, 1)
        tier.quarantine(content_of(2)[0])
        assert tier.usage().used_bytes == used, point
    save(tier, "b", 2)
    assert paths(tier) == ["a", "b"]
    tier.close()


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
                # Manifests of this size need new pages in the database.
                names = write(tier, number, length=1000)
                stored += tier.commit(drafts=[draft(f"b{number}", names, os.urandom(20_000))])
            except (CapacityError, StoreError) as error:
                outcome.append(error)
                break
        assert outcome
        assert [item.seq for item in tier.drafts()] == stored
        assert read(tier, 1)
        tier.close()
        os.remove(small / "ballast")
        tier = open_tier(small / "n")
        assert [item.seq for item in tier.drafts()] == stored
        assert all(read(tier, number, 1000) for number in range(2, len(stored) + 1))
        tier.forget_drafts(*stored)
        save(tier, "after", 99)
        tier.close()
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
    with pytest.raises(InvalidInputError):
        tier.commit(drafts=[draft(f"f{number}", []) for number in range(201)])


def test_opening_writes_and_needs_no_data_to_be_read(directory, monkeypatch):
    tier = open_tier(directory, budget=512 << 20)
    save(tier, "a", 1)
    tier.close()
    preadv, read = os.preadv, []

    def note_and_read(*arguments):
        read.append(preadv(*arguments))
        return read[-1]

    monkeypatch.setattr(os, "preadv", note_and_read)
    open_tier(directory, budget=512 << 20).close()
    assert 0 < sum(read) < 64 << 10


def test_a_tier_that_is_full_of_drafts_lists_those_below_a_directory(tier, directory):
    for path in ("run/a", "run/b/c", "runner", "run0", "run", "x/run/a"):
        tier.commit(drafts=[draft(path, [])])
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
    tier.commit(drafts=[EncodedDraft(b"1" * 16, "a", b"old", []), EncodedDraft(b"2" * 16, "a", b"new", [])])
    assert NvmeReader(directory).draft("a").data == b"new"
    assert NvmeReader(directory).draft("b") is None
