"""SIGKILL at some of the steps of a trainer and a flusher. ``integration/test_tier_kills.py`` covers all of them."""

import os
import signal
import time

import pytest
from support.killing import (
    HOLD,
    MIB,
    Case,
    Life,
    Mode,
    Zygote,
    dry_run,
    kill_both,
    kill_flusher,
    kill_trainer,
    kill_while_making,
    kill_while_opening,
    points_of,
    write,
)

from tierfs.store import Store, save

SMALL = [
    write("run/1/a", MIB + 1, "local"),
    write("run/tmp", 1000, "staged"),
    ["rename", "run/tmp", "run/1/b", "staged"],
    write("run/junk", 70_000, "staged"),
    ["delete", "run/junk", "staged"],
    write("latest", 10, "local"),
]
WITH_NVME = Mode(SMALL, ram=40 * MIB, nvme=8 * MIB)
# Without an nvme tier the writer itself publishes everything that must be safer than `staged`.
WITHOUT = Mode([[*one[:-1], "staged"] for one in SMALL], ram=40 * MIB, nvme=0)
# The first file is in the object tier before the others are written, which get to the nvme tier.
FILLED = Mode(
    [
        write("run/1/a", 70_000, "object"),
        ["await", "go"],
        write("run/2/a", MIB + 1, "staged"),
        write("latest", 10, "local"),
    ],
    ram=40 * MIB,
    nvme=8 * MIB,
)
NO_SHM = Mode(
    [write("run/a", MIB, "local"), write("run/b", 24 * MIB, "local")], ram=100 * MIB, nvme=96 * MIB, shm_room=0
)
SMALL_SHM = Mode(
    [write("run/a", 30 * MIB, "local"), write("run/b", 30 * MIB, "local"), write("latest", 10, "local")],
    ram=70 * MIB,
    nvme=96 * MIB,
    shm_room=40 * MIB,
)
OVERFLOWING = Mode([write("run/a", 70 * MIB, "staged")], ram=40 * MIB, nvme=20 * MIB, piece=70 * MIB)


@pytest.fixture(scope="module")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def case(zygote):
    """A function that creates cases in memory."""
    cases = []

    def make(mode):
        cases.append(Case(zygote, mode, os.environ["TIERFS_SHM_DIR"], os.environ["TIERFS_SHM_DIR"]))
        return cases[-1]

    yield make
    for one in cases:
        one.__exit__(None)


def test_without_a_kill_everything_goes_down_and_nothing_is_left_over(case):
    writer, flusher = dry_run(case(WITH_NVME))
    assert {point for point, _ in writer} >= {"before chunk.seal", "after draft.seal", "after announce", "after wait"}
    assert {point for point, _ in flusher} >= {"after settle.commit", "after publish.record", "after batch.finish"}


@pytest.mark.parametrize(
    ("step", "number"),
    [
        ("after chunk.write", 1),
        ("after settle.commit", 1),
        ("before release.draft", 2),
        ("after upload.chunk", 1),
        ("after publish.record", 3),
        ("after chunks.sync", 1),
        ("after batch.rename", 1),
        ("before batch.finish", 2),
    ],
)
def test_a_flusher_that_is_killed_is_replaced_and_nothing_acknowledged_is_lost(case, step, number):
    kill_flusher(case(WITH_NVME), (step, number))


@pytest.mark.parametrize(("step", "number"), [("after publish.record", 2), ("before release.draft", 1)])
def test_a_killed_flusher_without_an_nvme_tier_loses_nothing_either(case, step, number):
    kill_flusher(case(WITHOUT), (step, number))


@pytest.mark.parametrize(
    ("step", "number"), [("after chunk.seal", 1), ("before draft.seal", 4), ("after draft.seal", 5)]
)
def test_closed_files_of_a_killed_trainer_are_flushed(case, step, number):
    assert kill_trainer(case(WITHOUT), (step, number), held=True)


def test_both_killed_at_once_lose_nothing_that_was_acknowledged(case):
    kill_both(case(WITH_NVME), ("after batch.sync", 2))


@pytest.mark.parametrize("forget", [True, False], ids=["shared memory lost", "shared memory there"])
@pytest.mark.parametrize(
    "lives",
    [
        [Life("overwrite", kill=("after tier.make", 1)), Life(kill=("after tier.scan", 1))],
        [Life(nvme=16 * MIB, kill=("before tier.scan", 1)), Life("lose", 4 * MIB, ("after tier.scan", 1))],
    ],
    ids=["a damaged head", "other budgets"],
)
def test_two_flushers_that_die_while_they_open_the_nvme_tier_lose_nothing_that_was_local(case, lives, forget):
    assert kill_while_opening(case(FILLED), lives, forget=forget) == 2


def test_flushers_that_die_while_they_make_the_nvme_tier_are_replaced(case):
    assert kill_while_making(case(WITH_NVME), [("before tier.make", 1), ("before tier.scan", 1)]) == 2


@pytest.mark.parametrize("step", ["before draft.seal", "before wait"])
def test_a_trainer_without_shared_memory_never_leaves_a_draft_without_its_chunks(case, step):
    assert kill_trainer(case(NO_SHM), (step, 2))


@pytest.mark.parametrize("mode", [NO_SHM, SMALL_SHM], ids=["no shared memory", "too little"])
def test_a_flusher_is_replaced_where_shared_memory_is_too_small(case, mode):
    assert kill_flusher(case(mode), ("before settle.commit", 2))


def test_a_flusher_that_dies_while_it_takes_down_segments_on_disk_is_replaced(case):
    mode = Mode([write("run/a", 50 * MIB, "staged")], ram=40 * MIB, nvme=96 * MIB, piece=50 * MIB, shm_room=0)
    assert kill_flusher(case(mode), ("after upload.chunk", 2))


def test_segments_on_disk_survive_both(case):
    assert kill_both(case(NO_SHM), ("before wait", 2), first="trainer")


@pytest.mark.parametrize("step", ["after chunk.copy", "before chunk.seal"])
def test_a_trainer_that_dies_while_several_threads_copy_one_write_leaves_nothing_of_it(case, step):
    assert kill_trainer(
        case(Mode([write("run/a", 50 * MIB, "staged")], ram=120 * MIB, nvme=96 * MIB, piece=50 * MIB)), (step, 3)
    )


@pytest.mark.parametrize("step", ["after chunk.seal", "before draft.seal"])
def test_a_trainer_that_dies_while_its_file_overflows_to_the_disk_leaves_none_there(case, step):
    case = case(OVERFLOWING)
    assert kill_trainer(case, (step, 5 if "chunk" in step else 1))
    assert not list((case.directory / "state/overflow").rglob("*"))


def test_a_flusher_that_dies_while_it_uploads_from_the_disk_is_replaced(case):
    assert kill_flusher(case(OVERFLOWING), ("after upload.chunk", 2))


@pytest.mark.parametrize("lost", ["the flusher", "shared memory"])
def test_a_file_too_large_for_nvme_keeps_its_place_in_order(case, lost):
    # The large file stays in memory. Later files could reach the nvme tier and would then count as older.
    operations = [write("run/a", MIB, "staged"), write("run/large", 5 * MIB, "staged"), write("latest", 10, "staged")]
    case = case(Mode(operations, ram=120 * MIB, nvme=8 * MIB))
    case.file("held").touch()
    first = case.start("flusher", hold=["before upload.chunk"], held_while=str(case.file("held")))
    trainer = case.start("trainer", leave=str(case.file("leave")))
    case.await_done(trainer)
    deadline = time.monotonic() + 1
    while ("after release.draft", 2) not in points_of(first) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    if lost == "shared memory":
        trainer.kill()
        for path in case.shm.rglob("*.slab"):
            path.unlink()
    for number in (1, 2):
        second = case.start("flusher", kill=("after publish.record", number))
        second.has_ended(1)
        second.kill()
        case.check_right_now(trainer)
    case.start("flusher")
    case.file("leave").touch()
    trainer.wait()


def test_a_conflict_that_is_kept_in_memory_outlives_flusher_and_trainer(case):
    case = case(Mode([write("run/x", MIB, "staged"), write("run/y", MIB, "staged")], ram=120 * MIB, nvme=0))
    case.file("held").touch()
    first = case.start("flusher", hold=HOLD, held_while=str(case.file("held")))
    trainer = case.start("trainer", leave=str(case.file("leave")))
    case.await_done(trainer)
    save(Store(case.objects, case.descriptor, url=case.common["url"]), "run/x", b"theirs")
    case.file("held").unlink()
    case.await_conflict(first)
    trainer.kill()
    first.kill()
    case.start("flusher")
    assert case.ask("asker", waits_for="run/x")["conflicts"] == ["run/x"]
    said = case.ask("asker", discards="run/x")
    assert (said["discarded"], said["conflicts"], said["leaks"]) == (1, [], [])


def test_a_file_that_is_moved_before_it_is_published_gives_its_memory_back(case):
    case = case(
        Mode([write("run/tmp", MIB, "staged"), ["rename", "run/tmp", "run/a", "staged"]], ram=120 * MIB, nvme=0)
    )
    case.file("held").touch()
    flusher = case.start("flusher", hold=HOLD, held_while=str(case.file("held")))
    trainer = case.start("trainer", leave=str(case.file("leave")))
    case.await_done(trainer)
    case.file("held").unlink()
    assert not case.ask("reader")["leaks"]
    case.file("leave").touch()
    assert trainer.wait() == 0
    case.check_all_went_down([case.mode.states[-1]], flusher)
    assert flusher.status != -signal.SIGKILL
