"""Python's garbage collector is paused while DCP plans, and runs while bytes move."""

import gc
import threading

import pytest
from support.waiting import HANG_S, until

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tierfs import gc_pause
from tierfs.dcp import TierLoadPlanner, TierReader, TierWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture
def place(url):
    return f"tierfs::{url}/run/step_1"


@pytest.fixture(autouse=True)
def enabled():
    assert until(gc.isenabled)  # a plan that failed in another test may still pause it
    yield
    assert until(gc.isenabled)


def state():
    return {"w": torch.arange(1000.0), "step": 3}


def watched(cls, seen, *names):
    """Return a subclass that records whether the garbage collector is enabled when these methods are called."""

    def noting(name):
        def call(self, *arguments, **options):
            seen[name] = gc.isenabled()
            return getattr(cls, name)(self, *arguments, **options)

        return call

    return type(cls.__name__, (cls,), {name: noting(name) for name in names})


@pytest.mark.usefixtures("long_pause")
def test_a_save_and_a_load_set_off_no_collection(place):
    seen = {}
    names = ("create_local_plan", "create_global_plan", "finish_plan")
    planner = watched(DefaultSavePlanner, seen, *names, "resolve_data")
    dcp.save(state(), storage_writer=TierWriter(place), planner=planner(), no_dist=True)
    assert seen == dict.fromkeys([*names, "resolve_data"], False)
    assert until(gc.isenabled)
    seen.clear()
    planner = watched(TierLoadPlanner, seen, *names, "commit_tensor")
    target = {"w": torch.zeros(1000), "step": 0}
    dcp.load(target, storage_reader=TierReader(place), planner=planner(), no_dist=True)
    assert seen == dict.fromkeys([*names, "commit_tensor"], False)
    assert gc.isenabled()
    assert target["step"] == 3


def fail_to_plan(writer):
    """Save twice with a planner that fails. Return whether the garbage collector was enabled each time."""
    seen = []

    class Failing(DefaultSavePlanner):
        def create_local_plan(self):
            seen.append(gc.isenabled())
            raise ValueError("no plan")

    for _ in range(2):
        with pytest.raises(CheckpointException):
            dcp.save(state(), storage_writer=writer, planner=Failing(), no_dist=True)
    return seen


@pytest.fixture
def long_pause(monkeypatch):
    """Let collection pause for longer than a test takes."""
    monkeypatch.setattr(gc_pause, "PLANNING_S_MAX", 600)


@pytest.mark.usefixtures("long_pause")
def test_the_next_save_ends_what_a_planner_that_failed_left_off(place):
    writer = TierWriter(place)
    assert fail_to_plan(writer) == [False, False]
    assert not gc.isenabled()
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert until(gc.isenabled)


def test_a_failed_plans_pause_of_collection_ends_by_itself(place, monkeypatch):
    monkeypatch.setattr(gc_pause, "PLANNING_S_MAX", 0.05)
    fail_to_plan(TierWriter(place))
    assert until(gc.isenabled)


@pytest.mark.usefixtures("long_pause")
def test_a_save_on_another_thread_ends_only_what_it_began_itself(place):
    writer = TierWriter(place)
    fail_to_plan(writer)
    thread = threading.Thread(target=dcp.save, args=(state(),), kwargs={"storage_writer": writer, "no_dist": True})
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert not gc.isenabled()
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert until(gc.isenabled)


def test_garbage_collection_pauses_while_a_state_is_staged(url):
    # Thousands of new objects trigger a collection, which visits every object of torch.
    state = {f"layer{number}": torch.zeros(2) for number in range(3000)}
    writer = TierWriter(url)
    collected = []

    def note(phase, info):
        collected.append((phase, info["generation"]))

    gc.collect()
    gc.callbacks.append(note)
    try:
        staged = writer.stage(state)
    finally:
        gc.callbacks.remove(note)
    assert len(staged) == 3000
    assert gc.isenabled()
    assert [generation for phase, generation in collected if phase == "start" and generation > 0] == []
