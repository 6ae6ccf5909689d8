"""Files that are written in place before they have a name."""

import gc
import threading

import numpy as np
import pytest
from support.forked import in_child
from support.tiered import MIB, content
from support.waiting import HANG_S, until

from tierfs.errors import StoreError
from tierfs.host.pending.levels import Level
from tierfs.host.slab.table import SlotKind, SlotState
from tierfs.store import Writer, find, load, status, wait
from tierfs.store.write import in_place
from tierfs.store.write.in_place import StagedFile


def states(host):
    slots = [slot for segment in host.tiers.ram.segments() for slot in segment.slots(kind=SlotKind.CHUNK)]
    return {slot.state for slot in slots}


def becomes_empty(host):
    """Wait until the thread that releases discarded slots has done so."""
    until(lambda: not states(host))


def fill(run, data):
    run.view[:] = data


LENGTHS = ([100], [16 * MIB, 16 * MIB, 5 * MIB + 3], [2 * MIB], [1])


@pytest.mark.parametrize("level", Level, ids=lambda level: level.label)
def test_runs_written_in_place_form_the_file(any_host, level):
    if level is Level.NONE or (level is Level.LOCAL and not any_host.settings.nvme_bytes):
        pytest.skip("not a level that a save can have here")
    staged = StagedFile(any_host.store)
    runs = staged.add_runs(LENGTHS)
    parts = [content(sum(lengths)) for lengths in LENGTHS]
    assert [len(run.view) for run in runs] == [len(part) for part in parts]
    for run, part in zip(runs, parts, strict=True):
        fill(run, part)
    order = [2, 0, 1, 3]
    staged.seal(runs)
    manifest = staged.commit("run/a", [runs[number] for number in order], level=level, metadata={"step": 7})
    expected = b"".join(parts[number] for number in order)
    assert load(any_host.store, "run/a") == expected
    assert [row.raw_length for row in manifest.rows] == [length for number in order for length in LENGTHS[number]]
    wait(any_host.store, "", Level.OBJECT)
    assert load(any_host.plain(), "run/a") == expected
    assert status(any_host.store)["tiers"]["ram"]["dirty_bytes"] == 0


def test_a_store_without_local_tiers_that_fails_may_be_tried_again(host):
    store = host.plain()
    staged = StagedFile(store)
    runs = staged.add_runs([[MIB, 10], [5]])
    data = content(MIB + 15)
    fill(runs[0], data[: MIB + 10])
    fill(runs[1], data[MIB + 10 :])
    staged.seal(runs)
    with host.held(), pytest.raises(StoreError, match="down"):
        staged.commit("a", runs)
    staged.commit("a", runs)
    assert load(host.plain(), "a") == data


def test_a_run_lies_side_by_side_in_memory(host):
    run = StagedFile(host.store).add_runs([[16 * MIB, 16 * MIB, 7]])[0]
    array = np.frombuffer(run.view, np.uint8)
    assert array.shape == (32 * MIB + 7,)
    assert array.flags.c_contiguous
    assert array.ctypes.data % 4096 == 0


def test_slots_outside_the_files_runs_are_freed(host):
    staged = StagedFile(host.store)
    runs = staged.add_runs([[MIB]] * 3)
    for run in runs:
        fill(run, content(MIB))
    staged.seal(runs)
    with host.held():
        staged.commit("a", runs[1:2])
        slots = [slot for segment in host.tiers.ram.segments() for slot in segment.slots(kind=SlotKind.CHUNK)]
        assert len(slots) == 1
    wait(host.store, "", Level.OBJECT)


@pytest.mark.parametrize("how", ["abort", "forget"])
def test_an_aborted_file_leaves_nothing(host, how):
    staged = StagedFile(host.store)
    runs = staged.add_runs([[MIB, MIB], [10]])
    staged.seal(runs[:1])
    assert states(host) == {SlotState.SEALED, SlotState.FILLING}
    if how == "abort":
        staged.abort()
        staged.abort()
        with pytest.raises(StoreError, match="stage it again"):
            staged.commit("a", runs[:1])
    del staged, runs
    gc.collect()
    becomes_empty(host)
    assert find(host.store, "") == []


def test_an_abort_during_a_commit_keeps_the_file(host, monkeypatch):
    class Late(Writer):
        def commit(self):
            staged.abort()
            return super().commit()

    monkeypatch.setattr(in_place, "Writer", Late)
    staged = StagedFile(host.store)
    runs = staged.add_runs([[MIB, MIB], [10]])
    data = content(2 * MIB)
    fill(runs[0], data)
    staged.seal(runs)
    with host.held():
        staged.commit("a", runs[:1], level=Level.STAGED)
        staged.abort()
        assert load(host.store, "a") == data
    wait(host.store, "", Level.OBJECT)


def test_a_failed_commit_can_be_aborted(host, monkeypatch):
    class Failing(Writer):
        def commit(self):
            raise StoreError("full")

    monkeypatch.setattr(in_place, "Writer", Failing)
    staged = StagedFile(host.store)
    runs = staged.add_runs([[MIB]])
    staged.seal(runs)
    with pytest.raises(StoreError, match="full"):
        staged.commit("a", runs)
    staged.abort()
    assert states(host) == set()


def test_garbage_may_be_collected_under_the_lock_of_a_segment(host):
    kept = StagedFile(host.store)
    kept.add_runs([[MIB]])
    (segment,) = kept.segments()

    def drop():
        staged = StagedFile(host.store)
        staged.add_runs([[MIB]])
        staged.itself = staged
        with segment._lock.held():
            del staged
            gc.collect()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    kept.abort()
    becomes_empty(host)


def test_a_forked_child_gives_back_nothing_of_its_parents(host):
    staged = StagedFile(host.store)
    runs = staged.add_runs([[MIB]])
    fill(runs[0], content(MIB))
    staged.seal(runs)
    in_child(staged.abort)
    assert states(host) == {SlotState.SEALED}
    staged.commit("a", runs)
    assert len(load(host.store, "a")) == MIB


def test_what_the_ram_tier_cannot_hold_in_one_piece_lies_on_the_disk(host):
    staged = StagedFile(host.store)
    staged.add_runs([[16 * MIB] * 20])
    assert {segment.path.parent for segment in staged.segments()} == {host.tiers.ram.host.overflow}
    staged.abort()
    assert states(host) == set()
