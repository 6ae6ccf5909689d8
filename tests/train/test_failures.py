"""A failed save does not end the run, and is reported."""

import logging

import pytest
import torch
from support.flipping import flip_shard

from tierfs.errors import CorruptionError, NotFoundError, StoreError, TierfsError
from tierfs.train import Every, Latest, Manager, handle
from tierfs.train import save as saving
from tierfs.train.save import RunWriter

OPTIONS = {"ram": "0", "nvme": "0"}


def state(step):
    return {"model": torch.full((300,), float(step)), "step": step}


def manager(root, **arguments):
    return Manager(root, **{"save": [Every(steps=1)], **OPTIONS, **arguments})


@pytest.fixture
def failing(monkeypatch):
    """The steps whose saves fail. Empty until the test adds some."""
    steps = set()
    write = RunWriter.write_data

    def write_data(self, plan, planner):
        if int(self.running.target.url.rpartition("_")[2]) in steps:
            raise StoreError("the disk is full")
        return write(self, plan, planner)

    monkeypatch.setattr(RunWriter, "write_data", write_data)
    return steps


def make(run, *steps):
    for step in steps:
        handle = run.step(step, state(step))
        run.wait()
        assert handle.done


def test_a_failed_save_is_counted_and_the_run_goes_on(root, failing, caplog):
    failing.update({2, 3})
    with manager(root) as run:
        make(run, 1, 2, 3, 4)
        assert [each.step for each in run.errors] == [2, 3]
        assert "the disk is full" in str(run.errors[0].error)
        assert run.latest() == 4
        failing.add(5)
        make(run, 5)
        assert (run.latest(), run.restore(state(0)).step) == (4, 4)
    assert "step_2 could not be saved; training continues" in caplog.text


def test_too_many_failures_in_a_row_end_the_run(root, failing):
    failing.update({2, 4, 5, 6})
    with manager(root, max_failures=3) as run:
        make(run, 1, 2, 3, 4, 5, 6)
        with pytest.raises(TierfsError, match="3 saves in a row failed, the last one, step 6: the disk is full"):
            run.step(7, state(7))
    with manager(root, on_error="raise") as run:
        make(run, 2)
        with pytest.raises(TierfsError, match="1 saves in a row failed"):
            run.step(3, state(3))


def test_a_newest_durable_step_that_is_too_old_ends_the_run(root, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(handle.time, "monotonic", lambda: now_s[0])
    levels = {1: "object", 2: "staged", 3: "staged"}
    watched = handle.Health("warn", 3, "1m")

    class Ended:
        def __init__(self, step):
            self.step, self.level = step, levels[step]

    for step in (1, 2, 3):
        watched.note(Ended(step), None)
        now_s[0] += 20
        assert not watched.is_old()
    now_s[0] += 1
    assert watched.is_old()
    with pytest.raises(TierfsError, match="max_age"):
        watched.check(handle.Agreed(is_old=True))


def test_max_age_is_asked_for_at_each_step(root):
    with manager(root, save=(), max_age="0.05s") as run:
        run.step(1, state(1))
        with pytest.raises(TierfsError, match="no step reached the object tier"):
            for step in range(2, 10**9):
                run.step(step, state(step))


def test_a_save_that_is_read_back_damaged_fails_and_is_marked(root, monkeypatch):
    with manager(root, verify_after_save=True) as run:
        make(run, 1)
        assert run.errors == []
        damage = run._saves._read_back

        def damage_in(handle):
            flip_shard(f"{root}/step_{handle.step}")
            return damage(handle)

        monkeypatch.setattr(run._saves, "_read_back", damage_in)
        make(run, 2)
        (failed,) = run.errors
        assert isinstance(failed.error, CorruptionError)
        assert (run.latest(), run.checkpoints[-1].is_complete) == (1, True)


def test_a_save_that_cannot_be_read_back_is_not_called_damaged(root, monkeypatch):
    def fail(*_arguments):
        raise StoreError("the object tier is down", transient=True)

    with manager(root, verify_after_save=True) as run:
        monkeypatch.setattr("tierfs.train.save.verify_checkpoint", fail)
        make(run, 1)
        (failed,) = run.errors
        assert not isinstance(failed.error, CorruptionError)
        assert "cannot be verified: the object tier is down" in str(failed.error)
        assert run.latest() == 1
        with pytest.raises(TierfsError, match="cannot be verified"):
            run.save(1, state(1)).wait()
        monkeypatch.undo()
        run.save(1, state(1)).wait()


def test_a_step_that_was_not_trained_is_told(root, caplog):
    with manager(root) as run, caplog.at_level(logging.WARNING, "tierfs.train"):
        make(run, 1)
        assert run.errors == []
        assert "every tensor is the same" not in caplog.text
        run.step(2, {**state(1), "step": 2})
        run.wait()
        assert "step_2: every tensor is the same as at step 1" in caplog.text
        assert run.latest() == 2
    with manager(root, on_stale="raise") as run:
        make(run, 3)
        run.step(4, {**state(3), "step": 4})
        run.wait()
        assert ([each.step for each in run.errors], run.latest()) == ([4], 3)


class Broken:
    """A user's keep policy that raises."""

    def __init__(self, error):
        self.error = error

    def preserve(self, checkpoints, *, context):
        raise self.error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("no loss yet"), "with ZeroDivisionError: no loss yet"),
        (NotFoundError("no loss yet"), "a keep policy failed: no loss yet"),
        (SystemExit(3), "with TierfsError: interrupted by SystemExit(3)"),
    ],
)
def test_a_keep_policy_that_raises_does_not_end_the_saves(root, caplog, error, text):
    with manager(root, keep=[Latest(1), Broken(error)]) as run:
        make(run, 1, 2, 3, 4)
        assert [each.step for each in run.errors] == [1, 2, 3, 4]
        assert "retention failed after the save" in str(run.errors[0].error)
        assert text in str(run.errors[0].error)
        assert [each.step for each in run.checkpoints] == [1, 2, 3, 4]
    assert "step_4: retention failed after the save; training continues" in caplog.text
    with manager(root, keep=[Broken(error)], on_error="raise") as run:
        make(run, 5)
        with pytest.raises(TierfsError, match="retention failed after the save"):
            run.step(6, state(6))


def test_a_save_for_which_no_thread_starts_fails(root, monkeypatch):
    with manager(root) as run:
        with monkeypatch.context() as patch:
            patch.setattr(saving, "start_daemon", lambda *_, **__: None)
            handle = run.step(1, state(1))
            with pytest.raises(TierfsError, match="cannot start a thread"):
                handle.wait(timeout=5)
            run.wait(timeout=5)
        make(run, 2)
        assert [each.step for each in run.errors] == [1]
        assert run.latest() == 2
