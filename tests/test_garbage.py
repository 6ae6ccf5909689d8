"""Garbage is collected later, and never not at all."""

import gc
import os
import threading
import time

import pytest

from tierfs import garbage
from tierfs.garbage import Uncollected


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    assert gc.isenabled()


def until_enabled(seconds=20.0):
    ends = time.monotonic() + seconds
    while not gc.isenabled() and time.monotonic() < ends:
        time.sleep(0.001)
    return gc.isenabled()


def test_nothing_is_collected_in_a_block_and_after_an_error_it_is():
    with pytest.raises(ValueError, match="out"), Uncollected():
        assert not gc.isenabled()
        raise ValueError("out")
    assert gc.isenabled()


def test_of_several_that_overlap_the_last_that_ends_counts():
    first, second = Uncollected(), Uncollected(60)
    first.end()
    first.end()
    assert not gc.isenabled()
    second.end()
    assert gc.isenabled()


def test_where_it_is_never_ended_it_ends_by_itself():
    forgotten, other = Uncollected(0.05), Uncollected()
    other.end()
    assert until_enabled()
    forgotten.end()
    with Uncollected():
        assert not gc.isenabled(), "it was counted twice"


def test_a_thread_that_is_not_needed_any_more_ends():
    one = Uncollected(60)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "tierfs-uncollected"]
    one.end()
    thread.join(20)
    assert not thread.is_alive()


def test_where_no_thread_can_be_started_nothing_is_put_off(monkeypatch):
    monkeypatch.setattr(garbage, "start_daemon", lambda *_, **__: None)
    one = Uncollected(60)
    assert gc.isenabled()
    one.end()


def test_where_starting_the_thread_fails_nothing_is_put_off(monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(garbage, "start_daemon", fail)
    with pytest.raises(MemoryError):
        Uncollected(60)
    assert gc.isenabled()


@pytest.mark.parametrize("at", ["disable", "enable"])
@pytest.mark.parametrize("what", ["a handler of signals", "a fork"])
def test_whatever_comes_in_between_garbage_is_collected_in_the_end(monkeypatch, at, what):
    """A handler that saves, or another thread's fork, while it is about to be turned off or on, and right after."""
    real, children = getattr(gc, at), []

    def between():
        monkeypatch.setattr(gc, at, real)
        if what == "a fork":
            child = os.fork()
            if not child:
                with Uncollected():
                    found = not gc.isenabled()
                os._exit(0 if found and gc.isenabled() else 1)
            children.append(child)
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
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(children)
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
    child = os.fork()
    if not child:
        found = gc.isenabled()
        one.end()  # its parent's
        with Uncollected():
            found = found and not gc.isenabled()
        os._exit(0 if found and gc.isenabled() else 1)
    one.end()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
