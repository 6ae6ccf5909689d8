"""The pause of Python's garbage collector delays collections, but always ends."""

import contextlib
import errno
import gc
import os
import threading
import time
import traceback
import weakref

import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from support.forked import answer_of
from support.private_memory import PrivateMemory
from support.waiting import HANG_S, until

from tierfs import gc_pause as garbage
from tierfs.errors import TierfsError
from tierfs.gc_pause import Uncollected
from tierfs.host.nvme.chunk_file import ChunkFiles, ChunkPage
from tierfs.objects import FsspecObjects, LocalObjects


@pytest.fixture(autouse=True)
def enabled():
    assert until(lambda: not waiting())  # the pause of another test's save lasts for a moment
    gc.enable()
    yield
    assert gc.isenabled()
    assert until(lambda: not waiting())


def waiting():
    """The threads of pauses of limited time."""
    return [thread for thread in threading.enumerate() if thread.name == "tierfs-uncollected"]


def test_collection_pauses_in_a_block_and_resumes_after_errors():
    with pytest.raises(ValueError, match="out"), Uncollected():
        assert not gc.isenabled()
        raise ValueError("out")
    assert gc.isenabled()


def test_overlapping_pauses_end_with_the_last_one():
    first, second = Uncollected(), Uncollected(60)
    first.end()
    first.end()
    assert not gc.isenabled()
    second.end()
    assert gc.isenabled()


def test_a_pause_that_is_never_ended_times_out():
    forgotten, other = Uncollected(0.05), Uncollected()
    other.end()
    assert until(gc.isenabled)
    forgotten.end()
    with Uncollected():
        assert not gc.isenabled(), "it was counted twice"


def test_the_pause_of_a_save_lasts_until_its_plans_are_gone():
    one = Uncollected(60, linger_s=0.2)
    one.end()
    one.end()
    assert not gc.isenabled()
    assert until(gc.isenabled)


def test_saves_without_a_gap_let_the_collector_run(monkeypatch):
    monkeypatch.setattr(garbage, "PLANNING_S_MAX", 0.2)

    def save():
        Uncollected(60, linger_s=0.1).end()
        time.sleep(0.01)
        return gc.isenabled()

    assert not save()
    assert until(save)


def test_a_thread_that_is_not_needed_any_more_ends():
    one = Uncollected(60)
    (thread,) = waiting()
    one.end()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_pause_without_a_thread_does_not_begin(monkeypatch):
    monkeypatch.setattr(garbage, "start_daemon", lambda *_, **__: None)
    one = Uncollected(60)
    assert gc.isenabled()
    one.end()


def test_a_pause_whose_thread_fails_does_not_begin(monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(garbage, "start_daemon", fail)
    with pytest.raises(MemoryError):
        Uncollected(60)
    assert gc.isenabled()


def pauses():
    """Whether collection pauses in a block and goes on behind it."""
    with Uncollected():
        found = not gc.isenabled()
    return found and gc.isenabled()


@pytest.mark.parametrize("at", ["disable", "enable"])
@pytest.mark.parametrize("what", ["a handler of signals", "a fork"])
def test_collection_is_enabled_after_any_interruption(monkeypatch, at, what):
    # A signal handler pauses the collector, or another thread forks, just before and just after gc.disable or
    # gc.enable.
    real, answers = getattr(gc, at), []

    def between():
        monkeypatch.setattr(gc, at, real)
        if what == "a fork":
            answers.append(answer_of(pauses))
        else:
            with Uncollected(60):
                pass
        monkeypatch.setattr(gc, at, interrupted)

    def interrupted():
        between()
        real()
        between()

    monkeypatch.setattr(gc, at, interrupted)
    with Uncollected(60):
        assert not gc.isenabled()
    monkeypatch.undo()
    assert gc.isenabled()
    assert set(answers) <= {"True"}
    with Uncollected():
        assert not gc.isenabled()


def test_a_program_that_collects_by_itself_goes_on_doing_so():
    gc.disable()
    try:
        with Uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_forked_child_collects_whatever_its_parent_put_off():
    one = Uncollected(60)

    def collects():
        found = gc.isenabled()
        one.end()  # this object belongs to the parent
        return found and pauses()

    assert answer_of(collects) == "True"
    one.end()


class Lent(bytearray):
    """A bytearray that supports weak references, so that a test can see when it is freed."""


def _fail(*_, **__):
    raise OSError(errno.EIO, "the disk is on fire")


def _read_by_the_system(lent, path, patch):
    objects = LocalObjects(path)
    objects.put("a", [bytes(8)])
    patch.setattr(os, "preadv", _fail)
    objects.get("a", [(0, memoryview(lent))])


def _read_by_fsspec(lent, path, patch):
    fs = PrivateMemory()
    objects = FsspecObjects(fs, "bucket")
    objects.put("a", [bytes(8)])
    patch.setattr(fs, "cat_file", _fail)
    objects.get("a", [(0, memoryview(lent))])


def _read_by_an_asynchronous_fsspec(lent, path, patch):
    fs = PrivateMemory()
    objects = FsspecObjects(AsyncFileSystemWrapper(fs, asynchronous=False, skip_instance_cache=True), "bucket")
    objects.put("a", [bytes(8)])
    patch.setattr(fs, "cat_file", _fail)
    objects.get("a", [(0, memoryview(lent))])


def _written_by_fsspec(lent, path, patch):
    fs = PrivateMemory()
    patch.setattr(fs, "pipe_file", _fail)
    patch.setattr(fs, "open", _fail)
    FsspecObjects(fs, "bucket").put("a", [lent])


def _streamed_by_the_system(lent, path, patch):
    objects = LocalObjects(path)
    objects.put("a", [bytes(8)])

    def use(_, take):
        lent.extend(take(8))
        _fail()

    objects.stream("a", 8, use)


def _written_to_the_nvme_tier(lent, path, patch):
    patch.setattr(os, "pwritev", _fail)
    page = ChunkPage(bytes(17), b"", len(lent))
    ChunkFiles(path).write(path / "new", page, memoryview(lent), now_ns=0)


@pytest.mark.parametrize(
    "fails",
    [
        _read_by_the_system,
        _streamed_by_the_system,
        _read_by_fsspec,
        _read_by_an_asynchronous_fsspec,
        _written_by_fsspec,
        _written_to_the_nvme_tier,
    ],
)
def test_a_translated_error_gives_lent_memory_back(fails, tmp_path, monkeypatch):
    lent = Lent(8)
    alive = weakref.ref(lent)
    gc.disable()
    try:
        with monkeypatch.context() as patch, pytest.raises(TierfsError):
            fails(lent, tmp_path, patch)
        del lent
        assert alive() is None
    finally:
        gc.enable()


def test_the_frames_that_raised_stay_in_a_traceback():
    @contextlib.contextmanager
    def translating():
        try:
            yield
        except OSError as error:
            raise ValueError from garbage.untied(error)

    with pytest.raises(ValueError) as caught, translating():
        _fail()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert names == ["test_the_frames_that_raised_stay_in_a_traceback", "_fail"]
