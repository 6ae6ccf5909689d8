"""A resume is proven only if every part is the same and the replayed steps have the recorded losses."""

import random

import pytest
import torch
from support.small_training import Training

from tierfs.errors import NotFoundError
from tierfs.session import open_store, parse_url
from tierfs.store import delete
from tierfs.train import Manager

OPTIONS = {"ram": "0", "nvme": "0", "save": ()}


def train(run, training, steps, save_at=()):
    for step in steps:
        loss = float.fromhex(training.step())
        run.step(step, training.state, metrics={"loss": loss})
        if step in save_at:
            run.save(step, training.state).wait()


def again(training):
    return lambda _step: float.fromhex(training.step())


@pytest.fixture
def trained(root):
    """A run of twelve steps, saved at 3, 7 and 10."""
    with Manager(root, **OPTIONS) as run:
        train(run, Training(1), range(12), save_at=(3, 7, 10))
    return root


def outcomes(report):
    return {check.part: check.outcome for check in report.checks}


def test_a_resume_is_proven_part_by_part(trained):
    straight = Training(1)
    expected = [straight.step() for _ in range(14)]
    second = Training(2)
    with Manager(trained, **OPTIONS) as run:
        assert run.restore(second.state).step == 10
        report = run.verify_resume(second.state, again(second))
        assert report.is_proven
        assert report.replayed == (8, 9, 10)
        assert report.first_difference is None
        assert list(outcomes(report)) == [
            "step",
            "learning rate",
            "model",
            "optimizer",
            "scheduler",
            "scaler",
            "random generators",
            "data loader",
            "extra",
            "losses",
        ]
        assert str(report).startswith("step 10: PROVEN, 3 steps were replayed\n  step: same\n")
    # Training continues from the newest step, as if no step had been replayed.
    assert [second.step() for _ in range(3)] == expected[11:]


def test_losses_that_were_noted_before_a_restart_count_after_it(trained):
    second, third = Training(2), Training(3)
    with Manager(trained, **OPTIONS) as run:
        run.restore(second.state)
        train(run, second, range(11, 14), save_at=(13,))
    with Manager(trained, **OPTIONS) as run:
        assert run.verify_resume(third.state, again(third), steps=2).replayed == (11, 12)
        run.delete(10)
        assert run.verify_resume(third.state, again(third)).replayed == tuple(range(8, 14))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("step", lambda training: setattr(training.state, "step", 9)),
        ("learning rate", lambda training: training.optimizer.param_groups[0].update(lr=0.3)),
        ("model", lambda training: training.model[0].weight.data.mul_(1 + 2**-20)),
        ("optimizer", lambda training: next(iter(training.optimizer.state.values()))["exp_avg"].add_(1e-9)),
        ("random generators", lambda training: random.random()),
        ("data loader", lambda training: next(training.loader)),
    ],
)
def test_the_first_part_that_differs_is_named(trained, part, change):
    second = Training(2)
    with Manager(trained, **OPTIONS) as run:
        run.restore(second.state)
        change(second)
        report = run.verify_resume(second.state)
    assert not report.is_proven
    assert report.first_difference.part == part
    assert "NOT PROVEN" in str(report)


def test_a_loss_that_differs_in_its_last_bit_is_a_difference_without_a_tolerance(trained):
    second = Training(2)

    def slightly_off(_step):
        return float.fromhex(second.step()) * (1 + 2**-50)

    with Manager(trained, **OPTIONS) as run:
        report = run.verify_resume(second.state, slightly_off)
        assert report.first_difference.part == "losses"
        assert "step 8 on rank 0" in report.first_difference.detail
        assert run.verify_resume(second.state, slightly_off, tolerance=1e-12).is_proven


def test_unrecorded_parts_are_not_called_equal(root):
    first = Training(1)
    with Manager(root, **OPTIONS) as run:
        run.save(1, first.state)
        report = run.verify_resume(first.state, again(first))
        assert outcomes(report)["losses"] == "not recorded"
        assert not report.is_proven
        delete(*open_store(parse_url(f"{root}/step_1/.record")))
        report = run.verify_resume(first.state, again(first))
        assert outcomes(report)["model"] == "not recorded"
        assert not report.is_proven


def test_a_dict_can_be_proven_too(root):
    state = {"weight": torch.ones(3), "count": 1}
    with Manager(root, **OPTIONS) as run:
        run.save(1, state)
        other = {"weight": torch.zeros(3), "count": 0}
        assert run.restore(other).step == 1
        report = run.verify_resume(other)
        expected = {"weight": "same", "count": "same", "random generators": "same", "losses": "not recorded"}
        assert outcomes(report) == expected
        assert not report.is_proven


@pytest.mark.parametrize("apart", [300, 40])
def test_checkpoints_far_apart_are_replayed(root, apart):
    first, second = Training(1), Training(2)
    with Manager(root, **OPTIONS) as run:
        train(run, first, range(2 * apart + 1), save_at=(0, apart, 2 * apart))
    with Manager(root, **OPTIONS) as run:
        report = run.verify_resume(second.state, again(second), steps=100)
    assert report.replayed == tuple(range(apart + 1, apart + 1 + min(apart, 32 if apart > 256 else 40)))
    assert report.is_proven, str(report)


def test_a_replay_begins_at_a_full_checkpoint(root):
    first, second = Training(1), Training(2)
    with Manager(root, **OPTIONS) as run:
        train(run, first, range(5), save_at=(2,))
        run.save(4, first.state, kind="light")
        train(run, first, range(5, 9), save_at=(8,))
    with Manager(root, **OPTIONS) as run:
        report = run.verify_resume(second.state, again(second))
    assert report.replayed == tuple(range(3, 9))
    assert report.is_proven, str(report)


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda first: first.state.extra.update(seen=torch.float64), "extra"),
        (lambda first: first.model(torch.ones(1, 4)).sum().backward(), "restore"),
    ],
)
def test_a_state_that_is_not_all_compared_is_not_proven(root, spoil, part):
    first, second = Training(1), Training(2)
    first.state.extra["seen"] = second.state.extra["seen"] = 0
    with Manager(root, **OPTIONS) as run:
        train(run, first, range(4), save_at=(1,))
        spoil(first)
        run.save(3, first.state)
    with Manager(root, **OPTIONS) as run:
        report = run.verify_resume(second.state, again(second))
    assert not report.is_proven
    assert part in [check.part for check in report.checks if check.outcome != "same"]


def test_without_a_checkpoint_there_is_nothing_to_prove(root):
    with Manager(root, **OPTIONS) as run, pytest.raises(NotFoundError, match="nothing to resume from"):
        run.verify_resume(Training(1).state)
