"""The ram tier of a host: lookups, the budget, eviction, and waiting for room."""

import contextlib
import errno
import itertools
import logging
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from support.forked import forked, in_child
from support.opened import descriptors, mappings
from support.waiting import HANG_S, until

from tierfs.clock import ManualClock, SystemClock
from tierfs.errors import CapacityError, InvalidInputError
from tierfs.host.host import Host
from tierfs.host.slab import pool, segment, segment_file
from tierfs.host.slab.budget import ASKED_FILE, RamBudget
from tierfs.host.slab.pool import next_layout
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.table import Layout, SlotKind, SlotState

STORE = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
KIB, MIB = 1 << 10, 1 << 20
BUDGET = 8 * MIB


@pytest.fixture
def shm():
    path = Path("/dev/shm") / f"tierfs-test-{uuid.uuid4().hex}"
    path.mkdir(mode=0o700)
    yield path
    subprocess.run(["rm", "-r", path], check=True)


@pytest.fixture
def host(tmp_path, shm):
    return Host(tmp_path / "state", shm)


@pytest.fixture
def open_tier(host):
    tiers = []

    def start(store=STORE, *, budget=BUDGET, clock=None, segment=MIB, on=host):
        tier = RamTier(on, store, budget_bytes=budget, clock=clock or SystemClock(), segment_bytes_max=segment)
        tiers.append(tier)
        return tier

    yield start
    for tier in tiers:
        tier.close()


@pytest.fixture
def tier(open_tier):
    return open_tier()


def put(tier, name, data=b"data", *, kind=SlotKind.CHUNK, clean=False, stamp_ns=None, timeout_s=0.0, length=None):
    slot = tier.take(kind, length or len(data), timeout_s=timeout_s)
    slot.segment.view(slot)[: len(data)] = data
    stamp_ns = time.monotonic_ns() if stamp_ns is None else stamp_ns
    sealed = slot.segment.seal(slot, name, b"", stamp_ns=stamp_ns)
    if clean:
        slot.segment.mark(sealed, SlotState.CLEAN)
    return sealed


def content(slot):
    out = bytearray(slot.length)
    slot.segment.read(slot, 0, memoryview(out))
    return bytes(out)


def killed(host, work, *, store=STORE, budget=BUDGET, segment=MIB):
    """Run ``work`` on a tier in another process and kill that process."""

    def child():
        work(RamTier(host, store, budget_bytes=budget, clock=SystemClock(), segment_bytes_max=segment))
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WIFSIGNALED(in_child(child))


def fill(tier, *, clean=False, stamp=int):
    """Fill the tier with slots of 256 KiB until no more fit. Return them. ``stamp`` gives each one's time of sealing."""
    slots = []
    with contextlib.suppress(CapacityError):
        while True:
            slots.append(put(tier, b"fill-%d" % len(slots), length=256 * KIB, stamp_ns=stamp(len(slots))))
    for slot in slots if clean else ():
        slot.segment.mark(slot, SlotState.CLEAN)
    return slots


def filling(tier):
    return sum(segment.sums().filling for segment in tier.own_segments())


def suffixes(host):
    return sorted(path.suffixes[-1] for path in host.segments.iterdir() if path.suffix)


# -- lookups -----------------------------------------------------------------------------------------------------------


def test_a_chunk_is_found_by_its_writer_and_by_other_processes(tier, open_tier):
    put(tier, b"a", b"bytes")
    assert content(tier.find(b"a")) == b"bytes"
    other = open_tier()
    assert content(other.find(b"a")) == b"bytes"
    put(tier, b"b", b"more")
    assert content(other.find(b"b")) == b"more"
    assert other.find(b"c") is None


def test_segments_that_come_and_go_are_noticed(tier, open_tier):
    put(tier, b"a")
    time.sleep(0.06)
    assert tier.find(b"a") is not None
    for turn in range(20):
        other = open_tier()
        put(other, b"b", b"%d" % turn, clean=True)
        assert content(tier.find(b"b")) == b"%d" % turn
        other.close()
        assert tier.find(b"b") is None


def test_a_segment_made_within_one_clock_tick_is_found(tier, open_tier, host):
    put(tier, b"a")
    now_ns = time.time_ns() + 1_000_000_000  # however long this takes, the folder may change within the same tick
    os.utime(host.segments, ns=(now_ns, now_ns))
    assert tier.find(b"b") is None
    other = open_tier()
    put(other, b"b")
    os.utime(host.segments, ns=(now_ns, now_ns))
    assert tier.find(b"b") is not None


def test_another_stores_chunks_are_not_found(tier, open_tier):
    put(tier, b"a")
    other = open_tier(OTHER)
    assert other.find(b"a") is None
    assert other.segments() == []
    alike = open_tier(STORE[:8] + "0" * 24)
    assert alike.segments() == []


def test_a_segment_is_found_by_its_id(tier, open_tier):
    slot = put(tier, b"a")
    assert open_tier().segment(slot.segment.id).find(b"a").serial == slot.serial
    assert tier.segment("0" * 32) is None


def test_drafts_come_in_the_order_they_were_sealed_in(tier, open_tier):
    other = open_tier()
    for number, writer in enumerate([tier, other, tier, other]):
        put(writer, b"%d" % number, kind=SlotKind.DRAFT, stamp_ns=10 - number)
    conflict = put(tier, b"conflict", kind=SlotKind.DRAFT, stamp_ns=99)
    conflict.segment.mark(conflict, SlotState.CONFLICT)
    put(tier, b"chunk")
    assert [slot.name for slot in other.drafts()] == [b"3", b"2", b"1", b"0"]
    assert [slot.name for slot in other.drafts((SlotState.CONFLICT,))] == [b"conflict"]


def test_only_sealed_slots_of_a_killed_process_are_found(tier, host):
    def work(other):
        put(other, b"a", b"whole")
        put(other, b"draft", kind=SlotKind.DRAFT)
        slot = other.take(SlotKind.CHUNK, 100_000, timeout_s=0)
        slot.segment.view(slot)[:] = bytes(100_000)

    killed(host, work)
    assert content(tier.find(b"a")) == b"whole"
    assert [slot.name for slot in tier.drafts()] == [b"draft"]
    needed = tier.find(b"a")
    assert tier.reclaim(lambda segment: {needed.index}) == 102400
    assert content(tier.find(b"a")) == b"whole"
    assert tier.reclaim(lambda segment: set()) == 4096
    assert tier.find(b"a") is None
    (draft,) = tier.drafts()
    draft.segment.mark(draft, SlotState.CLEAN)
    assert tier.reclaim(lambda segment: set()) == 0
    assert suffixes(host) == [".slab"]  # still clean: it serves as a cache until a process needs the room


def test_an_empty_segment_of_a_dead_process_stays_until_room_is_needed(tier, open_tier, host):
    killed(host, lambda other: other.take(SlotKind.CHUNK, 10, timeout_s=0))
    assert tier.reclaim(lambda segment: set()) == 4096
    assert suffixes(host) == [".slab"]
    tier.reap()
    assert suffixes(host) == []


def test_slots_of_a_live_process_are_not_reclaimed(tier, open_tier):
    put(tier, b"a")
    tier.take(SlotKind.CHUNK, 10, timeout_s=0)
    assert open_tier().reclaim(lambda segment: pytest.fail("asked")) == 0


def test_a_damaged_segment_is_ignored_with_one_warning(tier, host, caplog):
    put(tier, b"a")
    damaged = host.segments / f"{STORE[:8]}-{'0' * 16}-7.slab"
    damaged.write_bytes(tier.own_segments()[0].path.read_bytes()[:4096].replace(b"TFSSLAB1", b"TFSSLAB9"))
    assert tier.find(b"b") is None
    assert tier.find(b"a") is not None
    damaged.with_name(damaged.name.replace("-7", "-8")).write_bytes(b"")
    tier.find(b"b")
    time.sleep(0.06)
    tier.find(b"b")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    fill(tier)
    assert damaged.exists()


# -- the budget --------------------------------------------------------------------------------------------------------


def layout_of(length, *, held=0, room=4 << 30):
    return next_layout(length, length, held=held, room=room, data_bytes_max=1 << 30)


def test_a_store_that_holds_little_takes_at_most_4_mib():
    assert layout_of(100 * KIB).size < 3 * MIB
    assert layout_of(100 * KIB).size + layout_of(100 * KIB, held=2 * MIB).size < 5 * MIB


def test_a_next_segment_holds_what_is_asked_and_fits():
    for room, length in itertools.product([100, MIB, 33 * MIB], [0, 4096, 16 * MIB]):
        layout = layout_of(length, room=room)
        if layout is None:
            assert Layout.for_data(max(length, 1)).size > room
        else:
            assert layout.size <= room
            assert layout.data_bytes >= max(length, 1)


def test_memory_that_grows_little_by_little_comes_in_few_segments(open_tier):
    # Each segment needs descriptors in every process of the host that reads the store.
    tier = open_tier(budget=1 << 30, segment=1 << 30)
    for number in range(64):
        put(tier, b"%d" % number, length=MIB)
        if (growing := tier.grow_ahead()) is not None:
            growing.join()
    sizes = [segment.data_bytes for segment in tier.own_segments()]
    assert len(sizes) < 32
    assert 64 * MIB <= sum(sizes) < 90 * MIB


def test_runs_are_allocated_together_or_not_at_all(open_tier):
    tier = open_tier(budget=8 * MIB, segment=4 * MIB)
    runs = tier.take_runs(SlotKind.CHUNK, [[MIB, MIB], [MIB], [10]], timeout_s=0)
    assert [[slot.length for slot in run] for run in runs] == [[MIB, MIB], [MIB], [10]]
    assert len({slot.segment.id for run in runs for slot in run}) == 1
    before = filling(tier)
    with pytest.raises(CapacityError, match="no room for 6 MiB"):
        tier.take_runs(SlotKind.CHUNK, [[MIB], [4 * MIB], [MIB]], timeout_s=0)
    assert filling(tier) == before
    assert tier.take_runs(SlotKind.CHUNK, [[MIB]], timeout_s=0)


@pytest.mark.parametrize(("budget", "chunks"), [(50, 3), (66, 4), (100, 6)])
def test_room_for_what_is_small_costs_a_small_budget_no_chunk(open_tier, budget, chunks):
    tier = open_tier(budget=budget * MIB, segment=1 << 30)
    for _ in range(chunks):
        tier.take(SlotKind.CHUNK, 16 * MIB, timeout_s=0)
    with pytest.raises(CapacityError):
        tier.take(SlotKind.CHUNK, 16 * MIB, timeout_s=0)


def test_small_slots_leave_room_for_chunks(open_tier):
    # A chunk needs contiguous bytes, in whatever order slots are released.
    tier = open_tier(budget=160 * MIB, segment=64 * MIB)
    chunks, small = [], []
    for _ in range(4):
        chunks.append(tier.take(SlotKind.CHUNK, 16 * MIB, timeout_s=0))
        small.append(tier.take(SlotKind.DRAFT, 100 * KIB, timeout_s=0))
    assert len({slot.segment.id for slot in (*chunks, *small)}) == 1
    for slot in chunks:
        slot.segment.give(slot)
    assert tier.take_runs(SlotKind.CHUNK, [[16 * MIB] * 4], timeout_s=0)
    assert len(tier.own_segments()) == 1


def test_an_interrupted_wait_leaves_nothing_allocated(open_tier):
    tier = open_tier(budget=8 * MIB, segment=4 * MIB)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tier.take_runs(SlotKind.CHUNK, [[MIB]] * 12, timeout_s=5, on_wait=interrupt)
    assert filling(tier) == 0


def test_a_slot_too_large_for_any_segment_is_refused(open_tier):
    tier = open_tier(budget=8 * MIB, segment=MIB)
    with pytest.raises(CapacityError, match=r"more than the ram tier can hold in one piece.*TIERFS_RAM"):
        tier.take(SlotKind.CHUNK, MIB + 1, timeout_s=None)
    tier.take(SlotKind.CHUNK, MIB, timeout_s=0)
    with pytest.raises(CapacityError, match="one piece"):
        open_tier(budget=0).take(SlotKind.CHUNK, 1, timeout_s=None)


def test_a_budget_of_one_process_is_used_to_nine_tenths(open_tier, host):
    tier = open_tier(budget=32 * MIB, segment=16 * MIB)
    slots = fill(tier)
    assert len(slots) * 256 * KIB > 0.9 * 32 * MIB
    usage = tier.usage()
    assert usage.host_bytes == usage.store_bytes <= usage.budget_bytes == 32 * MIB
    assert usage.dirty_bytes == usage.used_bytes == len(slots) * 256 * KIB
    assert usage.host_bytes == sum(path.stat().st_size for path in host.segments.glob("*.slab"))


WRITER = """
import sys, time
from pathlib import Path
from tierfs.clock import SystemClock
from tierfs.errors import CapacityError
from tierfs.host.host import Host
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.budget import ASKED_FILE, RamBudget
from tierfs.host.slab.segment import SlotKind
# Long enough for others to come in between looking and making, if they could.
RamBudget.free_bytes = lambda self, folder, files: time.sleep(0.01) or 1 << 40
tier = RamTier(Host(Path(sys.argv[1]), Path(sys.argv[2])), sys.argv[3], budget_bytes=24 << 20, clock=SystemClock(), segment_bytes_max=4 << 20)
print("ready", flush=True)
sys.stdin.readline()
count = 0
try:
    while True:
        slot = tier.take(SlotKind.CHUNK, 100_000, timeout_s=0)
        slot.segment.view(slot)[:5] = b"dirty"
        slot.segment.seal(slot, b"%d" % count, b"", stamp_ns=1)
        count += 1
except CapacityError:
    pass
print(count, flush=True)
sys.stdin.readline()
"""


def test_the_budget_holds_when_processes_start_at_once(host, shm):
    writers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, host.directory, shm, [STORE, OTHER][number % 2]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    counts, most, done = [], 0, threading.Event()

    def watch():
        nonlocal most
        while not done.is_set():
            with host.locked("ram"):  # while files are renamed, a listing without the lock may show one twice
                taken = sum(path.stat().st_size for path in host.segments.iterdir())
            most = max(most, taken)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        counts = [int(writer.stdout.readline()) for writer in writers]
    finally:
        done.set()
        watcher.join()
        for writer in writers:
            writer.communicate("\n")
    assert 20 * MIB < most <= (24 << 20) + 100  # the folder has a small file that names its owner
    assert sum(counts) * 100_000 > 15 * MIB
    assert [writer.returncode for writer in writers] == [0] * 4


# -- eviction ----------------------------------------------------------------------------------------------------------


def test_clean_slots_go_as_they_were_used_and_hidden_ones_first(open_tier):
    tier = open_tier(budget=5 * MIB)
    slots = fill(tier, clean=True, stamp=lambda number: (100 + number * 7 % 31) * 10**9)
    order = sorted(slots, key=lambda slot: slot.stamp_ns)
    assert 10 < len(order) < 31
    order[-1].segment.hide(order[-1])
    put(tier, b"new", length=256 * KIB)
    left = {slot.name for segment in tier.segments() for slot in segment.slots()}
    gone = [slot for slot in order if slot.name not in left]
    assert gone == [*order[: len(gone) - 1], order[-1]]
    assert 0 < len(gone) < len(slots) // 3
    assert tier.usage().evicted_bytes == len(gone) * 256 * KIB


def test_dirty_and_filling_slots_are_never_evicted(open_tier):
    tier = open_tier(budget=5 * MIB, clock=ManualClock())
    slots = fill(tier, clean=False)
    for slot in slots[::3]:
        slot.segment.mark(slot, SlotState.CONFLICT)
        slot.segment.hide(slot)
    for slot in slots[1::3]:
        slot.segment.hide(slot)
    with pytest.raises(CapacityError):
        tier.take(SlotKind.CHUNK, 256 * KIB, timeout_s=1)
    assert all(slot.segment.is_still(slot) for slot in slots)
    assert tier.usage().evicted_bytes == 0


def test_a_save_reuses_the_memory_of_those_before(open_tier):
    clock = ManualClock()
    tier = open_tier(budget=1 << 30, segment=64 * MIB, clock=clock)
    for number in range(6):
        save_of(tier, number, clock, parts=15, length=4 * MIB)
        assert kept(tier, number, 15) == 15
    assert tier.usage().host_bytes < 140 * MIB, "two saves of 60 MiB"


def test_copies_of_single_files_take_a_bounded_part_of_the_budget(open_tier, monkeypatch):
    monkeypatch.setattr(pool, "KEPT_BYTES", 8 * MIB)
    tier = open_tier(budget=64 * MIB, segment=4 * MIB)
    for number in range(100):
        put(tier, b"%d" % number, length=256 * KIB, clean=True)
    assert tier.usage().host_bytes < 13 * MIB


def save_of(tier, number, clock, parts=4, length=256 * KIB):
    """Take the slots of one save at once, and mark them clean soon after."""
    slots = [run[0] for run in tier.take_runs(SlotKind.CHUNK, [[length]] * parts, timeout_s=0)]
    clock.sleep(0.125)
    for part, slot in enumerate(slots):
        stamp_ns = int(clock.monotonic() * 1e9)
        sealed = slot.segment.seal(slot, b"%d-%d" % (number, part), b"", stamp_ns=stamp_ns)
        slot.segment.mark(sealed, SlotState.CLEAN)
    clock.sleep(10.25)


def kept(tier, number, parts=4):
    return sum(tier.find(b"%d-%d" % (number, part)) is not None for part in range(parts))


@pytest.mark.parametrize("begins_s", [0, 0.375, 0.75])
def test_a_save_that_needs_more_memory_leaves_the_last_one_whole(open_tier, begins_s):
    clock = ManualClock()
    clock.sleep(10 + begins_s)
    tier = open_tier(budget=64 * MIB, segment=4 * MIB, clock=clock)
    save_of(tier, 0, clock)
    save_of(tier, 1, clock, parts=8)
    assert kept(tier, 0) == 4
    assert kept(tier, 1, 8) == 8


def test_copies_replace_others_when_the_budget_is_used_up(open_tier):
    tier = open_tier(budget=16 * MIB, segment=4 * MIB)
    names = []
    while not tier.usage().evicted_bytes:
        assert len(names) < 100
        names.append(b"%d" % len(names))
        slot = tier.take(SlotKind.CHUNK, 256 * KIB, timeout_s=0, spares_copies=True)
        slot.segment.seal(slot, names[-1], b"", state=SlotState.CLEAN, stamp_ns=len(names))
    assert len(names) * 256 * KIB > 0.8 * tier.budget_bytes
    left = sum(tier.find(name) is not None for name in names)
    assert 0.7 * len(names) < left < len(names)


def test_room_in_pieces_is_made_whole_by_evicting_what_lies_between(open_tier):
    tier = open_tier(budget=int(2.2 * MIB), segment=MIB)
    fill(tier, clean=True)
    slot = tier.take(SlotKind.CHUNK, 900 * KIB, timeout_s=0)
    assert slot.length == 900 * KIB


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_writer_waits_until_another_process_has_cleaned_something(open_tier, host):
    tier = open_tier(budget=2 * MIB)
    slots = fill(tier)
    asked = threading.Event()

    def flush():
        flusher = RamTier(host, STORE, budget_bytes=BUDGET, clock=SystemClock())
        time.sleep(0.2)
        slot = flusher.find(slots[0].name)
        assert flusher.segment(slot.segment.id).mark(slot, SlotState.CLEAN)

    child = forked(flush)
    start = time.monotonic()
    slot = tier.take(SlotKind.CHUNK, 256 * KIB, timeout_s=HANG_S, on_wait=asked.set)
    assert time.monotonic() - start > 0.1
    assert os.waitpid(child, 0)[1] == 0
    assert asked.is_set()
    usage = tier.usage()
    assert usage.waits == 1
    assert usage.waited_s > 0.1
    assert (slot.segment, slot.index) == (slots[0].segment, slots[0].index)


def test_a_writer_gives_up_after_its_timeout_and_says_what_to_do(open_tier):
    clock = ManualClock()
    tier = open_tier(budget=2 * MIB, clock=clock)
    slots = fill(tier)
    before = clock.monotonic()
    asked = []
    with pytest.raises(CapacityError, match=r"within 3 s.* dirty, waiting for the flusher; raise ram= \(TIERFS_RAM\)"):
        tier.take(SlotKind.CHUNK, 256 * KIB, timeout_s=3, on_wait=lambda: asked.append(1))
    assert clock.monotonic() - before == pytest.approx(3)
    assert asked == [1]
    assert tier.usage().waited_s == pytest.approx(3)
    assert all(slot.segment.is_still(slot) for slot in slots)


def test_a_folder_full_of_files_is_named_in_the_error(open_tier, monkeypatch):
    opened, tried = os.open, []

    def refuse(path, flags, *mode):
        if flags & os.O_CREAT and str(path).endswith(".slab.new") and len(tried) < limit:
            tried.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, flags, *mode)

    monkeypatch.setattr("os.open", refuse)
    tier, limit = open_tier(), 1 << 20
    with pytest.raises(
        CapacityError, match=r"within 0\.05 s: .*\.slab\.new cannot be made: No space .*: free some room"
    ):
        put(tier, b"a", timeout_s=0.05)
    limit = len(tried) + 4
    assert content(put(tier, b"a", timeout_s=HANG_S)) == b"data"
    assert len(tried) == limit


def test_a_process_gives_clean_memory_to_those_who_wait(open_tier, host):
    # Its slots are clean, and it has no reason of its own to release them.
    first = open_tier()
    fill(first, clean=True)
    assert first.give_back() == 0

    def work():
        second = RamTier(host, STORE, budget_bytes=BUDGET, clock=SystemClock(), segment_bytes_max=MIB)
        for number in range(8):
            put(second, b"second-%d" % number, length=256 * KIB, timeout_s=HANG_S)
        put(second, b"draft", kind=SlotKind.DRAFT, timeout_s=HANG_S)

    child = forked(work)
    until(lambda: (first.give_back(), os.waitpid(child, os.WNOHANG))[1] != (0, 0), every_s=0.01)
    assert first.find(b"second-7") is not None
    assert first.usage().host_bytes <= BUDGET


def test_a_process_gives_nothing_back_for_its_own_request(open_tier):
    tier = open_tier(budget=2 * MIB)
    fill(tier)
    with pytest.raises(CapacityError):
        tier.take(SlotKind.CHUNK, MIB // 2, timeout_s=0.1)
    assert tier.give_back() == 0


def test_a_process_that_gives_memory_back_keeps_what_is_dirty(open_tier, host):
    first = open_tier(budget=4 * MIB)
    slots = fill(first)
    free = slots.pop()
    free.segment.give(free)
    RamBudget(host).ask_for_room()
    assert 256 * KIB <= first.give_back() < MIB
    assert all(content(slot)[:4] == b"data" for slot in slots)
    assert put(first, b"new", length=4 * KIB).segment is not free.segment
    assert first.grow_ahead() is None, "the room is for those who wait"
    for slot in slots:
        slot.segment.mark(slot, SlotState.CLEAN)
    assert first.give_back() > 0
    assert not free.segment.path.exists()


def test_processes_that_wait_for_each_other_hold_nothing(open_tier, host):
    # Each request needs more than half of the budget.
    tiers = [open_tier(budget=6 * MIB, segment=2 * MIB) for _ in range(2)]

    def save(tier):
        for _ in range(5):
            for slots in tier.take_runs(SlotKind.CHUNK, [[900 * KIB]] * 4, timeout_s=HANG_S):
                slots[0].segment.give(slots[0])
            tier.give_back()

    threads = [threading.Thread(target=save, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for tier in tiers:
            tier.give_back()
        time.sleep(0.01)
    assert not sum(map(filling, tiers))


class SharedClock(ManualClock):
    """A clock that all tiers share. When time passes, each tier releases claimed memory."""

    def __init__(self):
        super().__init__()
        self.tiers = []

    def sleep(self, seconds):
        super().sleep(seconds)
        for tier in self.tiers:
            tier.give_back()


@pytest.mark.parametrize("how", ["killed", "closed", "idle"])
def test_a_little_dirty_data_keeps_only_its_own_memory(open_tier, host, how):
    clock = SharedClock()

    def put_little(tier):
        slot = tier.take(SlotKind.CHUNK, 9 * MIB, timeout_s=HANG_S)
        slot = slot.segment.seal(slot, b"a", b"", length=100, stamp_ns=1)
        slot.segment.mark(slot, SlotState.CONFLICT)
        return slot

    for number in range(8):
        store = f"{number:08x}" + STORE[8:]
        if how == "killed":
            killed(host, put_little, store=store, budget=20 * MIB, segment=16 * MIB)
            continue
        own = Host(host.directory, host.segments.parent)
        tier = open_tier(store, on=own, budget=20 * MIB, segment=16 * MIB, clock=clock)
        slot = put_little(tier)
        assert tier.usage().host_bytes <= 20 * MIB
        if how == "closed":
            tier.close()
        else:
            clock.tiers.append(tier)
            assert len(content(slot)) == 100


def test_a_shed_segment_keeps_used_memory(open_tier, host):
    generator = random.Random(7)
    tier = open_tier(budget=64 * MIB, segment=16 * MIB)
    slots = []
    for number in range(150):
        data = generator.randbytes(generator.choice([1, 4096, 5000, 60_000]))
        slot = tier.take(SlotKind.CHUNK, len(data), timeout_s=0)
        slot.segment.view(slot)[:] = data
        state = generator.choice([SlotState.CLEAN, SlotState.SEALED])
        slots.append((slot.segment.seal(slot, b"%d" % number, data[:900], state=state, stamp_ns=1), data))
    filling = tier.take(SlotKind.CHUNK, MIB, timeout_s=0)
    view = filling.segment.view(filling)
    view[:] = generator.randbytes(MIB)
    before = bytes(view)
    for each in tier.own_segments():
        each.shed()
    for slot, data in slots:
        if slot.state is SlotState.CLEAN:
            assert slot.segment.find(slot.name) is None
        else:
            assert content(slot.segment.find(slot.name)) == data
            assert slot.segment.meta(slot) == data[:900]
    assert view == before
    used = sum(slot.length + 8192 for slot, _ in slots if slot.state is SlotState.SEALED) + MIB
    assert tier.usage().host_bytes < used + 150 * KIB
    assert tier.usage().store_bytes == tier.usage().host_bytes


def test_a_conflict_in_a_small_segment_does_not_block_a_large_slot(open_tier):
    tier = open_tier(budget=10 * MIB, segment=8 * MIB)
    first = put(tier, b"a", length=100)
    assert first.segment.data_bytes < 7 * MIB
    first.segment.mark(first, SlotState.CONFLICT)
    assert tier.take(SlotKind.CHUNK, 7 * MIB, timeout_s=0)
    assert content(first)[:4] == b"data"


def test_a_caller_does_not_wait_for_its_own_slots(open_tier):
    # Regression: a save almost as large as the budget blocked training until the timeout.
    clock = ManualClock()
    tier = open_tier(budget=6 * MIB, segment=6 * MIB, clock=clock)
    runs, before = [[2 * MIB]] * 3, clock.monotonic()
    with pytest.raises(CapacityError, match="waiting will not free any"):
        tier.take_runs(SlotKind.CHUNK, runs, timeout_s=600)
    assert clock.monotonic() - before < 1
    assert not tier.usage().used_bytes


def test_slots_of_other_threads_are_waited_for(open_tier, monkeypatch):
    clock = ManualClock()
    tier = open_tier(budget=6 * MIB, segment=6 * MIB, clock=clock)
    ((other,),) = tier.take_runs(SlotKind.CHUNK, [[2 * MIB]], timeout_s=0)
    given = []

    def sleep(_seconds):
        if not given:
            given.append(other.segment.give(other))

    monkeypatch.setattr(clock, "sleep", sleep)
    assert len(tier.take_runs(SlotKind.CHUNK, [[2 * MIB]] * 2, timeout_s=600)) == 2
    assert given


@pytest.mark.parametrize("timeout_s", [600, None])
def test_a_hopeless_request_does_not_wait(open_tier, timeout_s):
    clock = ManualClock()
    tier = open_tier(budget=4 * MIB, segment=4 * MIB, clock=clock)
    for slot in fill(tier):
        slot.segment.mark(slot, SlotState.CONFLICT)
    before = clock.monotonic()
    with pytest.raises(CapacityError, match="waiting will not free any") as raised:
        tier.take(SlotKind.CHUNK, 2 * MIB, timeout_s=timeout_s)
    assert clock.monotonic() - before < 1
    assert f"MiB of store {STORE[:8]}" in str(raised.value)


def test_memory_of_other_processes_is_waited_for(open_tier, host):
    clock = ManualClock()
    put(open_tier(OTHER, budget=4 * MIB, on=Host(host.directory, host.segments.parent)), b"a")
    tier = open_tier(budget=4 * MIB, segment=4 * MIB, clock=clock)
    before = clock.monotonic()
    with pytest.raises(CapacityError, match="within 5 s"):
        tier.take(SlotKind.CHUNK, 3 * MIB, timeout_s=5)
    assert clock.monotonic() - before == pytest.approx(5)


# -- memory of dead processes ------------------------------------------------------------------------------------------


def test_clean_data_of_dead_processes_makes_room(open_tier, host):
    killed(host, lambda other: fill(other, clean=True), store=OTHER, budget=2 * MIB)
    assert len(fill(open_tier(budget=2 * MIB))) > 4
    killed(host, fill, store=OTHER, budget=4 * MIB)
    dirty = open_tier(OTHER, budget=4 * MIB)
    kept = {slot.name for segment in dirty.segments() for slot in segment.slots()}
    fill(open_tier(budget=4 * MIB))
    assert {slot.name for segment in dirty.segments() for slot in segment.slots()} == kept


def left_by_a_dead_process(host, *, count=4, clean=True):
    """Let a process die that has put 256 KiB slots into segments. Return the inodes of their files."""

    def work(other):
        for number in range(count):
            put(other, b"old-%d" % number, b"old %d" % number, length=256 * KIB, clean=clean)
        other.take(SlotKind.CHUNK, 100, timeout_s=0)  # is being filled

    killed(host, work)
    return {path.stat().st_ino for path in host.segments.glob("*.slab")}


def test_the_memory_of_a_dead_process_is_taken_over_and_its_copies_stay(open_tier, host):
    inodes = left_by_a_dead_process(host)
    reader, tier = open_tier(), open_tier()
    assert content(reader.find(b"old-1"))[:5] == b"old 1"
    put(tier, b"new", b"few bytes", length=4096)
    assert {os.fstat(one._fd.number).st_ino for one in tier.own_segments()} <= inodes  # no other seam shows the file
    assert all(one.owner == host.owner() for one in tier.own_segments())
    assert filling(tier) == 0
    for each in (reader, tier):
        assert content(each.find(b"old-1"))[:5] == b"old 1"
        assert content(each.find(b"new"))[:9] == b"few bytes"
    slots = fill(tier)  # evicts the copies
    assert len({slot.offset for slot in slots if slot.segment is slots[0].segment}) > 1
    assert tier.find(b"old-1") is None
    assert content(tier.find(b"new"))[:9] == b"few bytes"
    assert all(content(tier.find(slot.name)) == content(slot) for slot in slots)


def test_dirty_data_of_a_dead_process_is_left_where_it_is(open_tier, host):
    left_by_a_dead_process(host, clean=False)
    tier = open_tier()
    fill(tier)
    assert not any(tier.find(b"old-%d" % number).segment.owned for number in range(4))
    assert content(tier.find(b"old-1"))[:5] == b"old 1"


def test_copies_of_what_is_read_take_no_memory_over(open_tier, host):
    inodes = left_by_a_dead_process(host)
    tier = open_tier()
    tier.take(SlotKind.CHUNK, 100, timeout_s=0, spares_copies=True)
    assert not {one.path.stat().st_ino for one in tier.own_segments()} & inodes


def test_two_heirs_share_what_a_dead_process_left(open_tier, host):
    left_by_a_dead_process(host, count=12)
    heirs = [open_tier(), open_tier()]
    for number in range(6):
        for heir, tier in enumerate(heirs):
            put(tier, b"%d-%d" % (heir, number), b"%d" % heir, length=256 * KIB)
    own = [{one.id for one in tier.own_segments()} for tier in heirs]
    assert all(own)
    assert not own[0] & own[1]
    for number in range(6):
        for heir in range(2):
            assert content(heirs[0].find(b"%d-%d" % (heir, number)))[:1] == b"%d" % heir


@pytest.mark.parametrize("point", ["claimed", "resumed"])
def test_a_heir_that_dies_during_the_take_over_has_a_heir_itself(open_tier, host, monkeypatch, point):
    inodes = left_by_a_dead_process(host)

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def work(other):
        if point == "claimed":
            monkeypatch.setattr(segment.Segment, "resume", die)
        put(other, b"late", b"late", clean=True)

    killed(host, work)
    tier = open_tier()
    assert content(tier.find(b"old-1"))[:5] == b"old 1"
    put(tier, b"new", b"few bytes", length=4096)
    assert {one.path.stat().st_ino for one in tier.own_segments()} <= inodes
    assert content(tier.find(b"old-1"))[:5] == b"old 1"


@pytest.mark.parametrize("damage", ["state", "offset"])
def test_a_segment_with_a_damaged_table_is_not_taken_over(open_tier, host, damage):
    left_by_a_dead_process(host, count=2)
    (path,) = host.segments.glob("*.slab")
    found = segment.Segment.attach(path)
    head = found._table.heads[found.find(b"old-1").index : found.find(b"old-1").index + 1]  # as a flipped bit would
    head[damage] = 0x77 if damage == "state" else 1 << 50
    found.close()
    tier = open_tier()
    put(tier, b"new", b"few bytes")
    assert path not in {one.path for one in tier.own_segments()}
    assert content(tier.find(b"old-0"))[:5] == b"old 0"


def test_a_segment_of_another_version_is_not_taken_over(open_tier, host, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(segment_file, "VERSION", segment_file.VERSION + 1)
        inodes = left_by_a_dead_process(host)
    tier = open_tier()
    put(tier, b"new", b"few bytes")
    assert not {one.path.stat().st_ino for one in tier.own_segments()} & inodes


def test_the_flusher_frees_nothing_of_a_segment_that_was_taken_over_meanwhile(open_tier, host):
    left_by_a_dead_process(host)
    flusher, tier = open_tier(), open_tier()
    taken = []

    def needed(_segment):
        taken.append(tier.take(SlotKind.CHUNK, 4096, timeout_s=0))
        return ()

    flusher.reclaim(needed)
    assert taken
    assert filling(tier) == 4096 * len(taken)


def test_an_unfinished_segment_of_a_killed_process_is_removed(open_tier, host, monkeypatch):
    def work(other):
        monkeypatch.setattr(segment, "allocate", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        other.take(SlotKind.CHUNK, MIB, timeout_s=0)

    killed(host, work, budget=int(2.2 * MIB))
    assert suffixes(host) == [".new"]
    tier = open_tier(budget=int(1.3 * MIB))
    assert tier.take(SlotKind.CHUNK, MIB, timeout_s=0)
    assert suffixes(host) == [".slab"]


def test_segments_of_an_earlier_run_of_the_kernel_are_removed(open_tier, host, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(segment_file, "boot_id", lambda: "f" * 32)
        killed(host, fill, budget=2 * MIB)
    assert suffixes(host)
    tier = open_tier(budget=2 * MIB)
    assert tier.find(b"fill-0") is None
    assert not suffixes(host)
    assert len(fill(tier)) > 4


def test_close_keeps_dirty_slots_and_frees_copies(open_tier, host):
    first, second = open_tier(), open_tier()
    put(first, b"a", b"dirty")
    put(second, b"b", b"a copy", clean=True)
    first.close()
    second.close()
    assert suffixes(host) == [".slab"]
    third = open_tier()
    assert third.find(b"b") is None
    slot = third.find(b"a")
    assert content(slot) == b"dirty"
    assert slot.segment.owner == "0" * 16
    third.reclaim(lambda _: {slot.index})
    assert suffixes(host) == [".slab"]
    slot.segment.mark(slot, SlotState.CLEAN)
    third.reclaim(lambda _: set())
    assert suffixes(host) == []


def test_a_tier_never_takes_the_last_of_the_machine_s_memory(open_tier, monkeypatch):
    tier = open_tier()
    monkeypatch.setattr(pool, "memory_available", lambda: 10 * MIB)
    monkeypatch.setattr(pool, "memory_limit", lambda: 320 * MIB)  # 20 MiB of it are kept free
    with pytest.raises(CapacityError):
        tier.take(SlotKind.CHUNK, MIB, timeout_s=0)
    monkeypatch.setattr(pool, "memory_available", lambda: 1 << 40)
    assert tier.take(SlotKind.CHUNK, MIB, timeout_s=0)


def test_reap_frees_clean_slots_of_the_dead(open_tier, host):
    killed(host, lambda other: put(other, b"a", b"a copy", clean=True))
    tier = open_tier()
    assert tier.find(b"a")
    assert tier.reap() == len(b"a copy")
    assert tier.find(b"a") is None
    killed(host, lambda other: put(other, b"b", b"dirty"))
    assert tier.reap() == 0
    assert content(tier.find(b"b")) == b"dirty"


def test_a_closed_tier_says_so(open_tier):
    first = open_tier()
    first.close()
    with pytest.raises(InvalidInputError, match="closed"):
        first.take(SlotKind.CHUNK, 1, timeout_s=0)


# -- growing ahead -----------------------------------------------------------------------------------------------------


def test_memory_for_a_second_save_is_made_ahead(open_tier):
    tier = open_tier(budget=64 * MIB, segment=16 * MIB)
    assert tier.grow_ahead() is None, "before anything is saved"
    for slots in tier.take_runs(SlotKind.CHUNK, [[MIB]] * 8, timeout_s=0):
        slots[0].segment.seal(slots[0], b"%d" % slots[0].index, b"", stamp_ns=1)
    tier.grow_ahead().join()
    assert 16 * MIB <= tier.usage().host_bytes < 20 * MIB
    assert tier.grow_ahead() is None


def test_memory_is_made_ahead_once_after_a_save_that_is_clean(open_tier, host):
    tier = open_tier(budget=8 * MIB)
    put(tier, b"a", length=800 * KIB, clean=True)
    tier.grow_ahead().join()
    assert len(tier.own_segments()) == 2
    RamBudget(host).ask_for_room()
    tier.give_back()
    assert len(tier.own_segments()) == 1, "another process waits for room"
    os.utime(host.directory / ASKED_FILE, (0, 0))  # long ago
    assert tier.grow_ahead() is None, "others may want the memory"


def test_copies_of_chunks_cause_no_growth_ahead(open_tier):
    tier = open_tier(budget=2 * MIB)
    slot = tier.take(SlotKind.CHUNK, 800 * KIB, timeout_s=0, spares_copies=True)
    slot.segment.seal(slot, b"a", b"", state=SlotState.CLEAN, stamp_ns=1)
    assert tier.grow_ahead() is None
    assert len(tier.own_segments()) == 1


def test_closing_removes_what_is_being_made_ahead(open_tier, host):
    tier = open_tier()
    slot = put(tier, b"a", length=800 * KIB)
    growing = tier.grow_ahead()
    slot.segment.mark(slot, SlotState.CLEAN)
    tier.close()
    assert not growing.is_alive()
    assert suffixes(host) == []


def prepared(tier, wanted, *, share=1 << 40):
    """Say what is coming, and wait until its memory is made."""
    tier.prepare(wanted, MIB, share)
    until(lambda: tier.grow_ahead() is None and "tierfs-ram-ahead" not in {each.name for each in threading.enumerate()})
    return sum(segment.data_bytes for segment in tier.own_segments())


def test_a_request_waits_for_memory_that_is_nearly_made_ahead(open_tier, monkeypatch):
    make, is_mapped = segment.Segment.make, threading.Event()

    def make_slowly(reservation, **how):
        if threading.current_thread().name == "tierfs-ram-ahead":
            is_mapped.set()
            time.sleep(0.1)
        return make(reservation, **how)

    monkeypatch.setattr(segment.Segment, "make", make_slowly)  # a busy machine does it, at some time
    tier = open_tier(budget=24 * MIB, segment=32 * MIB)
    tier.prepare(48 * MIB, MIB, 1 << 40)  # all of the budget
    assert is_mapped.wait(HANG_S)
    assert tier.take(SlotKind.CHUNK, MIB, timeout_s=0).segment in tier.own_segments()


@pytest.fixture
def no_processor(tmp_path, monkeypatch):
    """Let the process that makes memory ahead get no processor: it sleeps instead."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))  # a machine cannot be made busy enough


def begun(tier, host):
    """Begin to make memory that takes a process of its own, and wait until its file is there."""
    tier.prepare(128 * MIB, MIB, 1 << 40)
    until(lambda: suffixes(host) == [".new"])


def test_memory_for_two_saves_is_made_before_the_first(open_tier):
    tier = open_tier(budget=512 * MIB, segment=1 << 30)
    assert 160 * MIB <= prepared(tier, 80 * MIB) < 190 * MIB
    before = tier.own_segments()
    for _ in range(2):
        tier.take_runs(SlotKind.CHUNK, [[MIB]] * 80, timeout_s=0)
    assert tier.own_segments() == before


def test_no_more_is_made_ahead_than_the_share_of_a_process(open_tier):
    tier = open_tier(budget=64 * MIB)
    assert prepared(tier, 4 * MIB, share=6 * MIB) < 7 * MIB
    assert prepared(open_tier(OTHER, budget=64 * MIB), 7 * MIB, share=6 * MIB) == 0, "such saves go to the disk"


def test_memory_that_is_made_ahead_never_exceeds_the_budget(open_tier):
    tier = open_tier(budget=4 * MIB)
    assert prepared(tier, 3 * MIB) > 2 * MIB
    assert tier.usage().host_bytes <= 4 * MIB


@pytest.mark.usefixtures("no_processor")
def test_a_save_does_not_wait_for_memory_that_is_made_ahead(open_tier, host):
    tier = open_tier(budget=192 * MIB, segment=1 << 30)
    begun(tier, host)
    assert tier.take_runs(SlotKind.CHUNK, [[MIB]] * 128, timeout_s=0)
    assert tier.usage().host_bytes <= 192 * MIB


@pytest.mark.usefixtures("no_processor")
def test_memory_being_made_ahead_goes_when_another_process_waits(open_tier, host):
    begun(open_tier(budget=1 << 30, segment=1 << 30), host)
    RamBudget(host).ask_for_room()
    until(lambda: not suffixes(host))


@pytest.mark.usefixtures("no_processor")
def test_closing_ends_what_makes_memory_ahead(open_tier, host):
    tier = open_tier(budget=1 << 30, segment=1 << 30)
    begun(tier, host)
    tier.close()
    assert suffixes(host) == []
    assert "tierfs-ram-ahead" not in {each.name for each in threading.enumerate()}


def test_a_process_killed_while_it_makes_memory_leaves_nothing(open_tier, host):
    def work(tier):
        tier.prepare(900 * MIB, MIB, 1 << 40)
        until(lambda: suffixes(host) == [".new"])

    killed(host, work, budget=1 << 30, segment=1 << 30)
    tier = open_tier(budget=64 * MIB)
    assert tier.take(SlotKind.CHUNK, MIB, timeout_s=0)
    assert suffixes(host) == [".slab"]


# -- too little shared memory ------------------------------------------------------------------------------------------


def test_small_shared_memory_moves_segments_to_disk(open_tier, tmp_path, small_shm, caplog):
    host = Host(tmp_path / "other-state", small_shm)
    tier = open_tier(budget=256 * MIB, segment=64 * MIB, on=host)
    put(tier, b"0", b"bytes")
    for number in range(1, 9):
        put(tier, b"%d" % number, b"bytes", length=16 * MIB)
    usage = tier.usage()
    assert (usage.segments, usage.disk_segments) == (3, 2)
    assert usage.host_bytes == usage.store_bytes > 128 * MIB
    assert caplog.text.count("Shared memory is too small") == 1
    assert suffixes(host) == [".slab"]  # the small segment fits into shared memory
    other = open_tier(budget=256 * MIB, on=Host(host.directory, small_shm))
    assert [content(other.find(b"%d" % number))[:5] for number in range(9)] == [b"bytes"] * 9
    assert other.usage().disk_segments == 2
    tier.close()
    assert len(list(host.fallback.iterdir())) == 2, "what is dirty stays"


def test_a_file_system_that_fills_up_meanwhile_is_no_failure(open_tier, tmp_path, small_shm, monkeypatch, caplog):
    host = Host(tmp_path / "other-state", small_shm)
    tier = open_tier(budget=256 * MIB, segment=64 * MIB, on=host)
    monkeypatch.setattr("tierfs.host.slab.budget.RamBudget.free_bytes", lambda *_: 1 << 40)
    put(tier, b"a", length=16 * MIB)
    assert tier.usage().disk_segments == 1
    assert suffixes(host) == []
    assert "Shared memory is too small" in caplog.text


def test_a_state_directory_without_room_for_a_segment_is_left_alone(open_tier, tmp_path, small_shm, monkeypatch):
    shm = tmp_path / "none"
    (small_shm / "state").mkdir(mode=0o700)
    tier = open_tier(budget=256 * MIB, segment=64 * MIB, on=Host(small_shm / "state", shm))
    with pytest.raises(CapacityError, match="segments has no room for a segment of"):
        put(tier, b"a", length=60 * MIB)


def test_missing_shared_memory_moves_segments_to_disk(open_tier, tmp_path):
    host = Host(tmp_path / "other-state", tmp_path / "none")
    assert host.segments == host.fallback
    tier = open_tier(budget=2 * MIB, on=host)
    slots = fill(tier)
    assert 0 < len(slots) * 256 * KIB <= tier.usage().host_bytes <= 2 * MIB
    assert {slot.segment.path.parent for slot in slots} == {host.directory / "segments"}


# -- forks and leaks ---------------------------------------------------------------------------------------------------


def test_a_tier_that_was_closed_leaves_no_descriptor_and_no_mapping(host, open_tier):
    def opened():
        return descriptors() + mappings("tierfs-test-")

    host.owner()
    before = opened()
    first = RamTier(host, STORE, budget_bytes=BUDGET, clock=SystemClock(), segment_bytes_max=MIB)
    second = RamTier(host, STORE, budget_bytes=BUDGET, clock=SystemClock(), segment_bytes_max=MIB)
    put(second, b"a", clean=True)
    slots = fill(first, clean=True)
    assert second.find(b"fill-0")
    first.close()
    second.close()
    del slots
    assert opened() <= before


def test_threads_write_at_once_into_a_tier_that_is_too_small_for_all(open_tier):
    tier = open_tier(budget=3 * MIB)
    failures = []

    def work(number):
        try:
            for turn in range(25):
                name = b"%d-%d" % (number, turn)
                slot = put(tier, name, name * 20, length=200 * KIB, timeout_s=HANG_S)
                assert content(slot).startswith(name * 20)
                slot.segment.mark(slot, SlotState.CLEAN)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tier.usage().host_bytes <= 3 * MIB
    assert tier.usage().evicted_bytes > 15 * MIB


def test_a_clean_segment_that_is_too_small_is_replaced(open_tier):
    tier = open_tier(budget=16 * MIB, segment=16 * MIB)
    put(tier, b"small", clean=True)
    assert tier.own_segments()[0].data_bytes < 12 * MIB
    tier.take(SlotKind.CHUNK, 12 * MIB, timeout_s=0)
    dirty = open_tier(store="0" * 32, budget=64 * MIB, segment=64 * MIB)
    put(dirty, b"dirty")
    with pytest.raises(CapacityError):
        dirty.take(SlotKind.CHUNK, 56 * MIB, timeout_s=0)
    assert dirty.find(b"dirty")


def test_threads_that_take_what_others_give_back_wait_for_it(open_tier):
    # All of the memory may be free at one moment, and taken by another thread at the next.
    tier = open_tier(segment=8 * MIB)
    sealed, errors, ends = queue.SimpleQueue(), [], time.monotonic() + 2

    def flush():
        while (slot := sealed.get()) is not None:
            slot.segment.mark(slot, SlotState.CLEAN)

    def write(thread):
        for number in itertools.count():
            if time.monotonic() > ends:
                return
            try:
                sealed.put(put(tier, b"%d-%d" % (thread, number), timeout_s=HANG_S, length=2 * MIB))
            except CapacityError as error:
                errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    flusher = threading.Thread(target=flush)
    for thread in (flusher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    sealed.put(None)
    flusher.join()
    assert errors == []


@pytest.mark.parametrize("state", [SlotState.FILLING, SlotState.SEALED])
def test_soon_free_slots_keep_their_memory(open_tier, state):
    tier = open_tier(budget=5 * MIB, segment=4 * MIB)
    slot = tier.take(SlotKind.CHUNK, MIB, timeout_s=0) if state is SlotState.FILLING else put(tier, b"a", length=MIB)
    with pytest.raises(CapacityError):
        tier.take(SlotKind.CHUNK, 4 * MIB - 64 * KIB, timeout_s=0)
    assert not slot.segment.retired
    assert slot.segment.memory_bytes == slot.segment.size
