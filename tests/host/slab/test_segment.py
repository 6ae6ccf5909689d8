"""One segment: sealed slots are whole and found, released slots are reused, a killed process leaves no damage."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from support.forked import forked, in_child
from support.opened import descriptors, mappings
from support.waiting import HANG_S

from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, ReadOnlyError
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.segment_file import CHANGES_AT, Reservation, SegmentHeader
from tierfs.host.slab.table import Layout, SlotKind, SlotState, Table, changing

STORE = "0123456789abcdef0123456789abcdef"
OWNER = "00000000000000aa"
PAGE = 4096
DATA = bytes(range(256)) * 64


@pytest.fixture
def folder():
    path = Path("/dev/shm") / f"tierfs-test-{uuid.uuid4().hex}"
    path.mkdir(mode=0o700)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def make(folder, *, data=1 << 20, slots=64, number=1, owner=OWNER):
    header = SegmentHeader.new(Layout.for_data(data, slots=slots), store=STORE, owner=owner, number=number)
    reservation = Reservation(folder, header)
    segment = Segment.make(reservation)
    segment.path = reservation.finish()
    return segment


def take(segment, length, kind=SlotKind.CHUNK):
    (slots,) = segment.take_runs(kind, [[length]])
    return slots[0] if slots else None


@pytest.fixture
def segment(folder):
    segment = make(folder)
    yield segment
    segment.close()


@pytest.fixture
def reader(segment):
    reader = Segment.attach(segment.path)
    yield reader
    reader.close()


def put(segment, name, data=DATA, *, meta=b"meta", kind=SlotKind.CHUNK, stamp_ns=1, **options):
    slot = take(segment, len(data), kind)
    segment.view(slot)[:] = data
    return segment.seal(slot, name, meta, stamp_ns=stamp_ns, **options)


def table(segment):
    """The slot table, as any process can map it."""
    return Table(segment.whole(), segment.header.layout)


def content(slot):
    out = bytearray(slot.length)
    slot.segment.read(slot, 0, memoryview(out))
    return bytes(out)


def opened():
    return descriptors() + mappings("tierfs-test-")


# -- lookups and reads -------------------------------------------------------------------------------------------------


def test_a_sealed_slot_is_found_by_other_processes(segment, reader):
    put(segment, b"name" * 8, meta=b"m" * 900, stamp_ns=7_000_000_000)
    slot = reader.find(b"name" * 8)
    assert content(slot) == DATA
    assert reader.meta(slot) == b"m" * 900
    assert (slot.kind, slot.state, slot.stamp_ns, segment.used_s(slot)) == (
        SlotKind.CHUNK,
        SlotState.SEALED,
        7_000_000_000,
        7,
    )
    assert slot.offset % PAGE == 0


def test_a_part_is_read_into_the_given_memory(segment, reader):
    put(segment, b"a")
    out = bytearray(100)
    reader.read(reader.find(b"a"), 1000, memoryview(out))
    assert bytes(out) == DATA[1000:1100]
    with pytest.raises(InvalidInputError):
        reader.read(reader.find(b"a"), len(DATA) - 99, memoryview(out))


def test_a_filling_slot_is_not_found(segment, reader):
    slot = take(segment, 10)
    assert reader.find(b"") is None
    assert reader.slots(states={SlotState.SEALED, SlotState.CLEAN}) == []
    assert [found.index for found in reader.slots(states={SlotState.FILLING})] == [slot.index]


def test_a_draft_is_no_chunk(segment, reader):
    put(segment, b"a", kind=SlotKind.DRAFT)
    assert reader.find(b"a") is None
    assert [slot.name for slot in reader.slots(kind=SlotKind.DRAFT)] == [b"a"]
    assert reader.slot(0).name == b"a"
    assert reader.slot(1) is None


def test_names_that_differ_in_trailing_zeros_are_different(segment, reader):
    put(segment, b"a\0", b"one")
    put(segment, b"a\0\0", b"two")
    assert content(reader.find(b"a\0")) == b"one"
    assert content(reader.find(b"a\0\0")) == b"two"
    assert reader.find(b"a") is None


def test_either_slot_of_one_name_is_found(segment, reader):
    first, second = put(segment, b"a"), put(segment, b"a")
    assert reader.find(b"a").index == second.index
    segment.give(second)
    assert reader.find(b"a").index == first.index
    segment.give(first)
    assert reader.find(b"a") is None


def test_a_hidden_chunk_is_not_found_and_keeps_its_bytes(segment, reader):
    slot = put(segment, b"a")
    assert reader.hide(slot)
    assert segment.find(b"a") is None
    (found,) = reader.slots()
    assert found.hidden
    assert content(found) == DATA


def test_sealing_releases_the_rest_of_a_slot(segment):
    everything = take(segment, segment.data_bytes)
    assert take(segment, 1) is None
    sealed = segment.seal(everything, b"a", b"", length=10, stamp_ns=1)
    assert sealed.length == 10
    assert take(segment, segment.data_bytes - PAGE) is not None


def test_without_a_free_slot_nothing_is_taken(folder):
    segment = make(folder, slots=2)
    slots = [take(segment, 1) for _ in range(3)]
    assert slots[2] is None
    segment.give(slots[0])
    assert take(segment, 1) is not None


def test_an_oversized_seal_is_refused(segment):
    slot = take(segment, 10)
    for options in ({"name": b"n" * 34}, {"meta": b"m" * 901}, {"length": 11}):
        with pytest.raises(InvalidInputError, match="do not fit"):
            segment.seal(slot, **{"name": b"a", "meta": b"", "stamp_ns": 1, **options})
    segment.seal(slot, b"a", b"", stamp_ns=1)
    with pytest.raises(InvalidInputError, match="not being filled"):
        segment.seal(slot, b"a", b"", stamp_ns=1)


def test_only_the_owner_gets_a_writable_view(segment, reader):
    slot = take(segment, len(DATA))
    np.copyto(np.frombuffer(segment.view(slot), np.uint8), np.frombuffer(DATA, np.uint8))
    sealed = segment.seal(slot, b"a", b"", stamp_ns=1)
    assert segment.view(sealed).readonly
    assert reader.view(reader.find(b"a")).readonly
    assert reader.view(reader.find(b"a")) == DATA


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "done"),
    [
        ([SlotState.CLEAN], [True]),
        ([SlotState.CONFLICT, SlotState.SEALED, SlotState.CLEAN], [True, False, True]),
        ([SlotState.CONFLICT, SlotState.CLEAN], [True, True]),
        ([SlotState.CLEAN, SlotState.SEALED], [True, False]),
        ([SlotState.SEALED], [False]),
        ([SlotState.FREE], [False]),
        ([SlotState.FILLING], [False]),
    ],
)
def test_a_mark_follows_the_rules(segment, reader, steps, done):
    slot = put(segment, b"a")
    assert [reader.mark(slot, state) for state in steps] == done
    last = [state for state, was in zip(steps, done, strict=True) if was]
    assert segment.find(b"a").state == (last[-1] if last else SlotState.SEALED)


def test_a_slot_that_is_being_filled_is_not_marked(segment, reader):
    slot = take(segment, 1)
    assert not reader.mark(slot, SlotState.CLEAN)
    assert not reader.is_still(slot)


def test_a_reused_slot_is_not_what_it_was(segment, reader):
    put(segment, b"a")
    old = reader.find(b"a")
    assert reader.is_still(old)
    segment.give(segment.find(b"a"))
    assert not reader.is_still(old)
    new = put(segment, b"b")
    assert new.index == old.index
    assert not reader.is_still(old)
    assert not reader.mark(old, SlotState.CLEAN)
    assert not reader.hide(old)
    assert reader.meta(old) == b""
    reader.touch(old)
    found = reader.find(b"b")
    assert (found.state, found.hidden, reader.used_s(found)) == (SlotState.SEALED, False, 0)


def test_a_slot_is_freed_once_and_only_if_it_is_the_same(segment):
    old = put(segment, b"a")
    assert segment.give(old)
    assert not segment.give(old)
    put(segment, b"b")
    assert not segment.give(old)
    assert segment.find(b"b") is not None


def test_only_a_clean_slot_is_evicted(segment, reader):
    slot = put(segment, b"a")
    assert not segment.give(slot, only_clean=True)
    reader.mark(slot, SlotState.CONFLICT)
    assert not segment.give(slot, only_clean=True)
    reader.mark(slot, SlotState.CLEAN)
    assert segment.give(slot, only_clean=True)


def test_a_use_is_noted_by_any_reader(segment, reader):
    slot = put(segment, b"a")
    assert segment.used_s(slot) == 0
    reader.touch(slot)
    assert abs(segment.used_s(slot) - time.monotonic()) < 5


def test_only_the_owner_takes_seals_and_gives(segment, reader):
    slot = take(segment, 1)
    for attempt in (
        lambda: take(reader, 1),
        lambda: reader.seal(slot, b"a", b"", stamp_ns=1),
        lambda: reader.give(slot),
    ):
        with pytest.raises(ReadOnlyError, match="another process"):
            attempt()


def test_sums_are_of_whole_pages(segment):
    put(segment, b"a", b"x" * 5000)
    reader_slot = put(segment, b"b", b"x" * 4096)
    segment.mark(reader_slot, SlotState.CLEAN)
    take(segment, 1)
    assert segment.sums() == (4096, 8192, 4096)


# -- crashes -----------------------------------------------------------------------------------------------------------


def killed_after(folder, lines, number):
    """Write a slot beside another one in a process that dies after ``lines`` lines of tierfs.

    Return a reader that attached before the write, and whether the process finished first.
    """
    made, attached = os.pipe(), os.pipe()

    def work():
        segment = make(folder, data=1 << 16, slots=4, number=number)
        put(segment, b"before", b"before")
        os.write(made[1], b"1")
        os.read(attached[0], 1)
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            if "tierfs/host" not in frame.f_code.co_filename:
                return None
            count += event == "line"
            if count > lines:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        put(segment, b"a")
        sys.settrace(None)

    child = forked(work)
    os.read(made[0], 1)
    (path,) = folder.glob(f"*-{number}.slab")
    reader = Segment.attach(path)
    assert content(reader.find(b"before")) == b"before"
    os.write(attached[1], b"1")
    status = os.waitpid(child, 0)[1]
    for fd in (*made, *attached):
        os.close(fd)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status)
    return reader, os.WIFEXITED(status)


def kill_at_each_line(folder):
    """Write a slot in a child and kill the child at a line, once for each line."""
    outcomes = []
    ended, lines = False, 0
    while not ended:
        reader, ended = killed_after(folder, lines, lines + 1)
        late = Segment.attach(reader.path)
        assert (reader.find(b"a") is None) == (late.find(b"a") is None)
        found = reader.find(b"a")
        outcomes.append(found is not None)
        if found is not None:
            assert content(found) == DATA
            assert reader.meta(found) == b"meta"
        # Another process frees what the dead one left unsealed, and readers see its changes.
        late.free_unneeded([slot.index for slot in late.slots(states={SlotState.SEALED})])
        assert reader.slots(states={SlotState.FILLING}) == []
        assert late.mark(late.find(b"before"), SlotState.CLEAN)
        assert reader.find(b"before").state is SlotState.CLEAN
        assert content(reader.find(b"before")) == b"before"
        assert reader.changes % 2 == 0
        for closed in (reader, late):
            closed.close()
        reader.unlink()
        lines += 1
    assert len(outcomes) > 50
    assert outcomes == sorted(outcomes)  # once the slot is found it stays
    assert True in outcomes[:-1]  # also after a kill between the change of state and the end


def test_a_process_killed_at_any_line_leaves_a_whole_slot_or_none(folder):
    # In a process of its own: forking this one may be slow if it has grown large.
    code = f"import pathlib, sys; sys.path[:0] = {sys.path!r}; import test_segment; test_segment.kill_at_each_line(pathlib.Path({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_counter_of_changes_is_odd_during_a_change(segment):
    before = segment.changes
    with changing(table(segment)):
        assert segment.changes % 2
        during = segment.changes
    assert before < during < segment.changes
    assert not segment.changes % 2


def test_a_look_during_which_something_changes_does_not_count(segment, reader, monkeypatch):
    first, looks, row = put(segment, b"a", b"first"), [], Table.row

    def slow(self, index):
        found = row(self, index)
        looks.append(index)
        if len(looks) == 1:
            segment.give(first)
            put(segment, b"b", b"second")
        return found

    monkeypatch.setattr(Table, "row", slow)
    (slot,) = reader.slots()
    assert (slot.name, content(slot)) == (b"b", b"second")
    assert reader.is_still(slot)


def test_a_cached_look_is_renewed_after_the_writer_was_killed(segment, reader):
    assert reader.find(b"a") is None
    slot = put(segment, b"a")
    segment.give(slot)
    assert reader.find(b"a") is None
    # The state is written and the counter is odd, as if the writer had been killed in between.
    table(segment).changes[0] += 1
    table(segment).set_state(slot.index, SlotState.SEALED)
    assert reader.find(b"a") is not None
    assert reader.changes % 2 == 0


def test_unneeded_slots_of_the_dead_are_freed(folder):
    def work():
        segment = make(folder)
        for name in (b"needed", b"stray", b"clean", b"conflict"):
            put(segment, name)
        put(segment, b"draft", kind=SlotKind.DRAFT)
        take(segment, 5000)
        segment.mark(segment.find(b"clean"), SlotState.CLEAN)
        segment.mark(segment.find(b"conflict"), SlotState.CONFLICT)
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WIFSIGNALED(in_child(work))
    (path,) = folder.iterdir()
    reader = Segment.attach(path)
    freed = reader.free_unneeded([reader.find(b"needed").index])
    assert freed == 16384 + 8192
    assert {slot.name for slot in reader.slots()} == {b"needed", b"clean", b"conflict", b"draft"}
    assert reader.free_unneeded([reader.find(b"needed").index]) == 0
    reader.free_unneeded([])
    assert {slot.name for slot in reader.slots()} == {b"clean", b"conflict", b"draft"}


def test_a_reused_entry_has_a_higher_serial(segment):
    kept, given = put(segment, b"kept"), put(segment, b"given")
    segment.give(given)
    new = put(segment, b"new")
    assert new.index == given.index
    assert new.serial > given.serial > kept.serial


# -- races -------------------------------------------------------------------------------------------------------------


def test_readers_notice_that_a_slot_is_reused(folder):
    # One process reuses slots as fast as it can. Bytes that pass `is_still` must belong to the name.
    stop = folder / "stop"

    def work():
        mine = make(folder, data=1 << 18, slots=8)
        number = 0
        while not stop.exists():
            number = (number + 1) % 251
            slot = take(mine, 65536)
            if slot is None:
                for old in mine.slots():
                    mine.give(old)
                continue
            mine.view(slot)[:] = bytes([number]) * 65536
            mine.seal(slot, b"%03d" % number, bytes([number]), stamp_ns=number)

    child = forked(work)
    try:
        while not (paths := list(folder.glob("*.slab"))):
            time.sleep(0.01)
        reader = Segment.attach(paths[0])
        good = races = 0
        raced, given_up = time.monotonic() + 1.0, time.monotonic() + HANG_S
        out = bytearray(65536)
        # On a busy machine it takes a while until both processes run at the same time.
        while time.monotonic() < raced or (good <= 10 and time.monotonic() < given_up):
            for slot in reader.slots(states={SlotState.SEALED}):
                reader.read(slot, 0, memoryview(out))
                meta = reader.meta(slot)
                if reader.is_still(slot):
                    good += 1
                    assert set(out) == {int(slot.name)} == set(meta) == {slot.stamp_ns}
                else:
                    races += 1
        assert good > 10
    finally:
        stop.touch()
        os.waitpid(child, 0)


def test_marks_of_one_process_leave_reused_slots_alone(folder):
    segment = make(folder, data=1 << 16, slots=2)
    stop = folder / "stop"

    def work():
        reader = Segment.attach(segment.path)
        while not stop.exists():
            for slot in reader.slots(states={SlotState.SEALED}):
                reader.mark(slot, SlotState.CLEAN)

    child = forked(work)
    try:
        deadline = time.monotonic() + 0.7
        cleaned = 0
        states = table(segment).heads["state"]
        while time.monotonic() < deadline:
            slot = take(segment, 10)
            assert states[slot.index] == SlotState.FILLING
            sealed = segment.seal(slot, b"a", b"", stamp_ns=1)
            cleaned += segment.give(sealed, only_clean=True) or segment.give(sealed) * 0
            assert states[slot.index] == SlotState.FREE
        assert segment.changes % 2 == 0
    finally:
        stop.touch()
        os.waitpid(child, 0)


def test_threads_take_seal_and_give_at_once(segment):
    failures = []

    def work(number):
        try:
            for turn in range(60):
                name = b"%d-%d" % (number, turn)
                slot = put(segment, name, name * 100)
                assert content(segment.find(name)) == name * 100
                assert segment.give(slot)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert segment.slots() == []
    assert take(segment, segment.data_bytes) is not None


# -- files -------------------------------------------------------------------------------------------------------------


def test_an_unlinked_segment_is_read_to_the_end(segment, reader):
    put(segment, b"a")
    segment.unlink()
    segment.unlink()
    assert content(reader.find(b"a")) == DATA


def test_all_memory_is_there_from_the_beginning(folder):
    segment = make(folder, data=5 << 20)
    assert os.stat(segment.path).st_blocks * 512 >= segment.size
    assert os.stat(segment.path).st_mode & 0o777 == 0o600
    assert segment.path.name == f"{STORE[:8]}-{OWNER}-1.slab"


@pytest.mark.parametrize("at", [9, 16, 24, 50, 90, 110])
def test_a_damaged_header_is_refused(segment, at):
    fd = os.open(segment.path, os.O_RDWR)
    byte = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte[0] ^ 0x40]), at)
    os.close(fd)
    with pytest.raises(CorruptionError, match=r"header of .* is damaged"):
        Segment.attach(segment.path)


def test_a_file_that_is_no_segment_is_refused(segment, folder):
    (folder / "other").write_bytes(b"x" * 10)
    with pytest.raises(CorruptionError, match="not a tierfs segment"):
        Segment.attach(folder / "other")
    with pytest.raises(NotFoundError, match="no longer exists"):
        Segment.attach(folder / "none")
    os.truncate(segment.path, segment.size - PAGE)
    with pytest.raises(CorruptionError, match="bytes where its header says"):
        Segment.attach(segment.path)


def test_reading_a_truncated_file_is_an_error(segment, reader):
    put(segment, b"a")
    slot = reader.find(b"a")
    os.truncate(segment.path, slot.offset)
    with pytest.raises(CorruptionError, match="cut short"):
        content(slot)


def test_a_segment_of_an_earlier_run_of_the_kernel_is_refused(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tierfs.host.slab.segment_file.boot_id", lambda: "f" * 32)
        segment = make(folder)
    with pytest.raises(FormatError, match="before this host rebooted"):
        Segment.attach(segment.path)


def test_slots_that_make_no_sense_are_passed_over_with_a_warning(segment, caplog):
    put(segment, b"a")
    slots = [put(segment, b"%d" % number) for number in range(5)]
    heads = table(segment).heads
    heads["offset"][slots[0].index] = 1 << 60
    heads["length"][slots[1].index] = 1 << 60
    heads["name_length"][slots[2].index] = 200
    heads["kind"][slots[3].index] = 77
    heads["state"][slots[4].index] = 0x0A  # two bits from any state
    reader = Segment.attach(segment.path)
    assert [slot.name for slot in reader.slots()] == [b"a"]
    assert reader.find(b"1") is None
    assert len(caplog.records) == 1
    assert "5 slots" in caplog.text


@pytest.mark.parametrize("state", [SlotState.SEALED, SlotState.CLEAN])
def test_a_flipped_bit_of_a_state_is_corrected(segment, state):
    slot = put(segment, b"a")
    if state is SlotState.CLEAN:
        assert segment.mark(slot, state)
    heads = table(segment).heads
    for bit in range(8):
        heads["state"][slot.index] = state ^ 1 << bit
        assert [(each.name, each.state) for each in Segment.attach(segment.path).slots()] == [(b"a", state)]
        assert segment.is_still(slot)
        assert segment.is_dirty() is (state is SlotState.SEALED)


def test_a_closed_segment_holds_nothing_and_no_memory(folder):
    before = opened()
    segment = make(folder)
    reader = Segment.attach(segment.path)
    slot = put(segment, b"a")
    view = segment.view(slot)
    assert reader.view(reader.find(b"a")) == DATA
    for closed in (segment, reader):
        closed.close()
        closed.close()
        assert closed.find(b"a") is None
        assert closed.slots() == []
        assert not closed.is_still(slot)
        assert not closed.mark(slot, SlotState.CLEAN)
        assert closed.meta(slot) == b""
        with pytest.raises(NotFoundError, match="closed"):
            closed.read(slot, 0, memoryview(bytearray(1)))
    assert view == DATA
    del view, slot, segment, reader, closed
    assert opened() <= before


def test_an_unreferenced_segment_closes_without_the_collector(folder):
    gc.disable()
    try:
        before = opened()
        segment = make(folder)
        slot = put(segment, b"a")
        del segment
        assert content(slot) == DATA
        del slot
        assert opened() <= before
    finally:
        gc.enable()


# -- forks -------------------------------------------------------------------------------------------------------------


def test_a_forked_child_has_nothing_of_its_parents_segment(segment):
    slot = put(segment, b"a")
    filling = take(segment, 10)

    def work():
        assert not segment.owned
        assert not segment.memory_bytes
        assert segment.find(b"a") is None
        assert not segment.mark(slot, SlotState.CLEAN)
        with pytest.raises(ReadOnlyError):
            take(segment, 1)
        assert content(Segment.attach(segment.path).find(b"a")) == DATA

    with segment._lock.held():
        assert in_child(work) == 0
    assert segment.find(b"a").state is SlotState.SEALED
    segment.seal(filling, b"b", b"", stamp_ns=1)


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(segment):
    reading, writing = os.pipe()
    began, begin = os.pipe()

    def wait():
        os.close(writing)
        os.write(begin, b"!")
        os.read(reading, 1)

    def hold():
        with Segment.attach(segment.path)._lock.held():
            forked(wait)

    assert in_child(hold) == 0
    os.read(began, 1)
    with open(segment.path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for fd in (reading, writing, began, begin):
        os.close(fd)


# -- speed -------------------------------------------------------------------------------------------------------------


def test_a_name_is_found_in_less_than_50_us_among_4096_slots(folder):
    segment = make(folder, data=4096 * PAGE, slots=4096)
    for number in range(4096):
        put(segment, b"%033d" % number, b"x")
    reader = Segment.attach(segment.path)
    reader.find(b"")
    names = [b"%033d" % number for number in range(0, 4096, 8)]
    best = min(_seconds(reader, names) for _ in range(5))
    assert best / len(names) < 50e-6


def _seconds(reader, names):
    start = time.perf_counter()
    for name in names:
        assert reader.find(name) is not None
    return time.perf_counter() - start


def test_the_counter_of_changes_lies_where_it_always_lay(segment):
    put(segment, b"a")
    fd = os.open(segment.path, os.O_RDONLY)
    assert int.from_bytes(os.pread(fd, 8, CHANGES_AT), "little") == segment.changes > 0
    os.close(fd)
