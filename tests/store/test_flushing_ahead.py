"""The flusher uploads chunks of large drafts while it moves the drafts to the nvme tier."""

import threading

import pytest
from support.saving import Training, bfloat16, safetensors
from support.tiered import MIB, content, save_at
from support.waiting import HANG_S, until, within

from tierfs.flusher import flusher, queue, state
from tierfs.flusher import upload as uploading
from tierfs.flusher.publish import StorePublisher
from tierfs.flusher.upload import Uploader, uploads_at_once
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.store import find, load, save, status, wait

SIZE = 3 * MIB


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(queue, "LARGE_BYTES_MIN", SIZE)


@pytest.fixture
def commits(monkeypatch):
    """An event. Commits of drafts to the nvme tier wait until it is set."""
    go_on, commit = threading.Event(), NvmeTier.commit

    def wait_and_commit(tier, drafts, **options):
        assert go_on.wait(HANG_S)
        return commit(tier, drafts, **options)

    monkeypatch.setattr(NvmeTier, "commit", wait_and_commit)
    yield go_on
    go_on.set()


@pytest.fixture
def priority(host, monkeypatch):
    """A list of the priorities that the flusher asks for its session: whether each is the low one."""
    asked = []
    save(host.store, "first", b"x")  # so that a flusher runs
    wait(host.store, "first", Level.OBJECT)
    monkeypatch.setattr(state, "AWAITED_S", 0)
    monkeypatch.setattr(host.flushing.priority, "lower_session", asked.append)
    return asked


def chunks_of(host):
    return list(host.objects.list(".tierfs/chunks/"))


def test_chunks_are_uploaded_before_the_nvme_tier_has_them_and_the_record_is_not(host, small, commits):
    data = content(SIZE)
    save(host.store, "a", data)
    until(lambda: chunks_of(host))
    assert status(host.store)["queue_files"] == 1
    assert find(host.plain(), "") == []
    commits.set()
    wait(host.store, "a", Level.OBJECT)
    assert load(host.plain(), "a") == data
    assert status(host.store)["counters"]["flusher_uploaded_bytes"] == SIZE


def test_a_smaller_draft_is_uploaded_when_it_is_there(host, small, commits):
    save(host.store, "a", content(SIZE - 1))
    assert not within(0.5, lambda: chunks_of(host))
    commits.set()
    wait(host.store, "a", Level.OBJECT)
    assert len(chunks_of(host)) == 1


@pytest.mark.parametrize("patience", [60, 0])
def test_uploads_pause_while_a_caller_waits_for_local(host, small, commits, monkeypatch, patience):
    monkeypatch.setattr(state, "PERSISTING_FIRST_S", patience)
    with monkeypatch.context() as held:
        held.setattr(Uploader, "next", lambda _: None)
        save(host.store, "a", content(SIZE))
        waiting = threading.Thread(target=wait, args=(host.store, "a", Level.LOCAL, 20))
        waiting.start()
        until(lambda: host.flushing.local_waits)
    try:
        assert bool(within(HANG_S if patience == 0 else 1.5, lambda: chunks_of(host))) == (patience == 0)
    finally:
        commits.set()
        waiting.join()
    wait(host.store, "a", Level.OBJECT)
    assert len(chunks_of(host)) == 1


@pytest.mark.parametrize(("processors", "uploads"), [(1, 4), (6, 6), (64, 16)])
def test_as_many_chunks_are_uploaded_at_once_as_there_are_processors(
    make_host, monkeypatch, with_processors, processors, uploads
):
    with_processors(processors)
    host = make_host(ram=512 * MIB, nvme=512 * MIB)
    under_way, go_on, put = [], threading.Event(), MemoryObjects.put

    def wait_and_put(objects, key, *arguments, **options):
        if key.startswith(".tierfs/chunks/"):
            under_way.append(key)
            assert go_on.wait(HANG_S)
        return put(objects, key, *arguments, **options)

    monkeypatch.setattr(MemoryObjects, "put", wait_and_put)
    data = content((uploads + 2) * 16 * MIB)
    save(host.store, "a", data)
    try:
        until(lambda: len(under_way) == uploads)
        assert not within(0.2, lambda: len(under_way) > uploads)
    finally:
        go_on.set()
    wait(host.store, "a", Level.OBJECT)
    assert load(host.plain(), "a") == data


def test_derived_chunks_are_uploaded_after_their_sources(make_host, monkeypatch):
    monkeypatch.setattr(uploading, "UPLOADS_MAX", 1)
    masters = {f"master.{n}": Training(seed=n).master for n in range(3)}
    moments = {f"moment.{n}": ("F32", Training(seed=100 + n).master.tobytes()) for n in range(9)}
    copies = {f"weight.{n}": ("BF16", bfloat16(masters[f"master.{n}"])) for n in range(3)}
    floats = {name: ("F32", master.tobytes()) for name, master in masters.items()}
    put_chunk, put = StorePublisher.put_chunk, []

    def note_and_put(publisher, raw, digests, context, *, rows, **options):
        put.append(context.tensors[0].name.partition(":")[2].partition(".")[0])
        assert bool(context.sources) == (put[-1] == "weight")
        assert all(rows[part.chunk] is not None for part in context.sources)
        return put_chunk(publisher, raw, digests, context, rows=rows, **options)

    monkeypatch.setattr(StorePublisher, "put_chunk", note_and_put)
    host = make_host(ram=256 * MIB, nvme=256 * MIB)
    data = safetensors(floats | moments | copies)
    save(host.store, "step_1/state", data)
    wait(host.store, "step_1/state", Level.OBJECT)
    first, then = [*["master"] * 3, "", *["moment"] * 4], ["weight", "moment"]
    assert put == [*first, "moment", *then, "moment", *then, *then]
    assert load(host.plain(), "step_1/state") == data


def test_an_upload_that_is_under_way_makes_way_for_who_waits_for_local(
    make_host, small, commits, monkeypatch, with_processors
):
    with_processors(2)
    host = make_host(ram=256 * MIB, nvme=256 * MIB)
    put_chunk, put, go_on = StorePublisher.put_chunk, [], threading.Event()

    def wait_and_put(publisher, raw, *arguments, **options):
        put.append(len(raw))
        assert go_on.wait(HANG_S)
        return put_chunk(publisher, raw, *arguments, **options)

    monkeypatch.setattr(StorePublisher, "put_chunk", wait_and_put)
    data = content(96 * MIB)
    save(host.store, "a", data)
    until(lambda: len(put) == uploads_at_once())
    waiting = threading.Thread(target=wait, args=(host.store, "a", Level.LOCAL, 20))
    waiting.start()
    until(lambda: host.flushing.local_waits)
    go_on.set()
    try:
        until(lambda: status(host.store)["counters"].get("flusher_ahead_stops"))
        assert len(put) == uploads_at_once()
    finally:
        commits.set()
        waiting.join()
    wait(host.store, "a", Level.OBJECT)
    assert len(put) == 6, "no chunk twice"
    assert load(host.plain(), "a") == data


def test_an_object_tier_that_is_away_keeps_nothing_from_the_nvme_tier(host, small):
    data = content(SIZE)
    with host.held():
        save(host.store, "a", data)
        wait(host.store, "a", Level.LOCAL)
        report = status(host.store)
        assert report["tiers"]["nvme"]["drafts"] == 1
    wait(host.store, "a", Level.OBJECT)
    assert load(host.plain(), "a") == data


def test_a_failed_early_upload_is_retried(host, small, commits):
    with host.held():
        save(host.store, "a", content(SIZE))
        until(lambda: status(host.store)["counters"].get("flusher_ahead_stops"))
        report = status(host.store)
        assert (report["failing_files"], report["counters"].get("flusher_failures", 0)) == (0, 0)
    commits.set()
    wait(host.store, "a", Level.OBJECT)
    assert status(host.store)["counters"]["flusher_ahead_stops"] == 1


def test_the_session_gives_way_while_drafts_are_in_flight(host, priority):
    with host.held():
        save(host.store, "a", content(SIZE))
        until(lambda: True in priority)
    wait(host.store, "a", Level.OBJECT)
    del priority[:]
    until(lambda: priority)  # a look when nothing is in flight
    assert not any(priority)


def test_the_session_does_not_give_way_while_a_client_waits(host, priority, commits):
    save(host.store, "a", content(SIZE))
    until(lambda: True in priority)
    waiting = threading.Thread(target=wait, args=(host.store, "a", Level.LOCAL, HANG_S))
    waiting.start()
    try:
        until(lambda: host.flushing.local_waits)
        del priority[:]
        host.flusher.nudge()
        until(lambda: priority)
        assert not any(priority)
    finally:
        commits.set()
        waiting.join()


def test_a_wait_for_much_does_not_change_the_priority(host, priority, commits, monkeypatch):
    monkeypatch.setattr(flusher, "SMALL_BYTES_MAX", SIZE - 1)
    save(host.store, "a", content(SIZE))
    waiting = threading.Thread(target=wait, args=(host.store, "a", Level.LOCAL, HANG_S))
    waiting.start()
    try:
        until(lambda: host.flushing.local_waits)
        del priority[:]
        host.flusher.nudge()
        until(lambda: priority)
        assert all(priority)
    finally:
        commits.set()
        waiting.join()


@pytest.fixture
def burst(host, monkeypatch):
    """A client's wait for a small file defers uploads until a test ends it."""
    save_at(host.store, "first", b"x", Level.LOCAL)  # so that a flusher runs
    wait(host.store, "first", Level.OBJECT)
    monkeypatch.setattr(state, "BURST_S", HANG_S)


@pytest.mark.usefixtures("burst")
def test_uploads_wait_for_the_end_of_a_burst_of_small_files(host):
    save_at(host.store, "a", content(SIZE), Level.LOCAL)
    assert not within(0.5, lambda: chunks_of(host))
    wait(host.store, "a", Level.OBJECT)  # a wait for the object tier ends it
    assert len(chunks_of(host)) == 1


@pytest.mark.usefixtures("burst")
def test_a_burst_defers_uploads_for_a_bounded_time(host, monkeypatch):
    monkeypatch.setattr(state, "PERSISTING_FIRST_S", 0.2)
    save_at(host.store, "a", content(SIZE), Level.LOCAL)
    until(lambda: chunks_of(host))


def test_a_burst_does_not_keep_a_full_tier_from_making_room(make_host, monkeypatch):
    host = make_host(nvme=4 * MIB)
    monkeypatch.setattr(state, "BURST_S", HANG_S)
    for name in "abcd":
        save_at(host.store, name, content(3 * MIB // 2), Level.LOCAL)
    assert not status(host.store)["counters"].get("flusher_nvme_passed_by")
