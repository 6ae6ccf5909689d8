"""A run that goes back to an earlier step stays there: it begins a new line, and leaves newer steps behind."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.flipping import flip_shard

from tierfs.dcp import TierWriter
from tierfs.errors import AlreadyExistsError, CorruptionError, FormatError, StoreError
from tierfs.session import open_store, parse_url
from tierfs.store import delete
from tierfs.store import save as save_file
from tierfs.train import Every, Latest, Manager
from tierfs.train.save import RunWriter

OPTIONS = {"ram": "0", "nvme": "0"}


def state(number):
    return {"model": torch.full((300,), float(number))}


def manager(root, **arguments):
    return Manager(root, **{"save": [Every(steps=5)], "on_stale": "ignore", **OPTIONS, **arguments})


def train(run, begin, end, number):
    """Make the steps after ``begin``. Every content has a number that tells where it was made."""
    for step in range(begin + 1, end + 1):
        run.step(step, state(number + step))
    run.wait()


def found(root, **arguments):
    """Return the step that a new process restores, and the number of its content."""
    live = state(-1)
    with manager(root) as run:
        restored = run.restore(live, **arguments)
    return restored.step, live["model"][0].item()


@pytest.fixture
def trained(root):
    """The root of a run that saved the steps 5, 10, 15, 20 and 25."""
    with manager(root) as run:
        train(run, 0, 25, 0)
    return root


def go_back(root, step, end, number, **arguments):
    with manager(root, **arguments) as run:
        assert run.restore(state(-1), step=step).step == step
        train(run, step, end, number)
        return run.errors


@pytest.mark.parametrize(("end", "expected"), [(11, (10, 10)), (16, (15, 115)), (27, (25, 125))])
def test_a_rollback_outlives_the_process(trained, end, expected, caplog):
    assert go_back(trained, 10, end, 100) == []
    assert "leaves the newer steps [15, 20, 25] behind" in caplog.text
    assert found(trained) == expected
    with manager(trained) as run:
        assert (run.latest(), run.restore(state(-1)).step) == (expected[0], expected[0])
        train(run, expected[0], 32, 200)
        assert run.errors == []
    assert found(trained) == (30, 230)


def test_newer_steps_that_are_passed_over_are_named_once(trained, caplog):
    go_back(trained, 10, 11, 100)
    caplog.clear()
    with manager(trained) as run:
        restored = run.restore(state(-1))
    assert [step for step, _ in restored.passed_over] == [25, 20, 15]
    assert restored.passed_over[0][1] == "the run went back to an earlier step and left it behind"
    assert [record.getMessage() for record in caplog.records if "[25, 20, 15]" in record.getMessage()] != []
    assert caplog.text.count("passed over") == 1


def test_a_restore_without_a_step_after_it_changes_nothing(trained):
    assert found(trained, step=10) == (10, 10)
    assert found(trained) == (25, 25)
    with manager(trained) as run:
        run.restore(state(-1), step=10)
        assert run.verify_resume(state(-1)).step == 10
    assert found(trained) == (25, 25)


def test_rollbacks_of_rollbacks(trained):
    go_back(trained, 20, 21, 100)  # no save
    go_back(trained, 15, 26, 200)  # 20, 25
    go_back(trained, 5, 12, 300)  # 10, before the earlier rollbacks
    assert found(trained) == (10, 310)
    assert go_back(trained, 20, 26, 400) == []  # onto the line that the last rollback left
    assert found(trained) == (25, 425)
    with manager(trained) as run:
        steps = []
        while (step := run.latest()) is not None:
            steps.append(step)
            run.delete(step)
            if step == 25:
                assert found(trained) == (20, 220)
    assert steps == [25, 20, 15, 5]


def test_a_killed_replacement_leaves_the_rollback_in_force(trained, monkeypatch):
    def finish(self, metadata, results):
        if self.notes is not None:
            self.notes("ab" * 16)
        raise StoreError("killed")  # after the notes, before the metadata

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "finish", finish)
        assert [each.step for each in go_back(trained, 10, 15, 100)] == [15]
    assert found(trained) == (10, 10)


def test_steps_that_were_left_fall_to_retention_first(trained):
    with manager(trained) as run:
        run.pin(20)
    assert go_back(trained, 10, 16, 100, keep=[Latest(3)]) == []
    with manager(trained) as run:
        assert [each.step for each in run.checkpoints] == [5, 10, 15, 20]
        assert run.restore(state(-1)).step == 15
        train(run, 15, 20, 100)
        assert isinstance(run.errors[0].error, AlreadyExistsError)  # 20 is pinned
        run.unpin(20)
    with manager(trained, keep=[Latest(3)]) as run:
        run.restore(state(-1))
        train(run, 15, 19, 200)
        run.save(19, state(219))
        run.wait()
        assert [each.step for each in run.checkpoints] == [10, 15, 19]


def by_torch(root):
    dcp.save(state(5000), storage_writer=TierWriter(f"{root}/step_5000", **OPTIONS), no_dist=True)


def by_an_old_run(root):
    with manager(root) as run:
        run.save(5000, state(5000)).wait()


@pytest.mark.parametrize("others", [by_torch, by_an_old_run])
@pytest.mark.parametrize("is_earlier", [True, False])
def test_a_foreign_checkpoint_does_not_win_over_the_run(root, others, is_earlier, caplog):
    if is_earlier:
        others(root)
    elif others is by_an_old_run:
        pytest.skip("the later of two runs goes on")
    with manager(root) as run:
        train(run, 0, 12, 0)
    if not is_earlier:
        others(root)
    assert found(root) == (10, 10)
    assert "passed over" in caplog.text
    with manager(root, keep=[Latest(1)]) as run:
        run.restore(state(-1))
        train(run, 4994, 5000, 7)
        assert run.errors == []
    assert found(root) == (5000, 5007)


def test_a_run_that_never_restored_replaces_nothing(trained):
    with manager(trained, keep=[Latest(1)]) as run:
        train(run, 0, 7, 100)
        assert isinstance(run.errors[0].error, AlreadyExistsError)
        run.save(8, state(108))
        run.wait()
    assert found(trained) == (8, 108)
    assert found(trained, step=25) == (25, 25)


def test_without_lines_the_newest_checkpoint_wins_whoever_saved_it(trained):
    store, path = open_store(parse_url(trained))
    by_torch(trained)
    save_file(store, f"{path}/.run/lines", b"{")
    with manager(trained) as run, pytest.raises(FormatError, match="remove it, then restore the step"):
        run.restore(state(-1))
    store, path = open_store(parse_url(trained))
    delete(store, f"{path}/.run/lines")
    assert found(trained) == (5000, 5000)


def test_a_damaged_line_does_not_go_on_from_a_foreign_checkpoint(root):
    with manager(root) as run:
        train(run, 0, 5, 0)
    flip_shard(f"{root}/step_5")
    by_torch(root)
    with manager(root) as run, pytest.raises(CorruptionError, match="step 5: "):
        run.restore(state(-1))


def test_light_steps_that_were_passed_over_are_replaced(root, caplog):
    caplog.set_level(logging.WARNING, "tierfs.train")
    with manager(root, light=[Every(steps=2)]) as run:
        train(run, 0, 8, 0)
    with manager(root, light=[Every(steps=2)]) as run:
        assert run.restore(state(-1)).step == 5
        train(run, 5, 9, 100)
        assert run.errors == []
    assert found(root, kind="any") == (8, 108)
