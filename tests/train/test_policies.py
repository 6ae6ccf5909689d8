"""When each policy asks for a save, and which checkpoints it keeps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.checkpoint.retention import Every, Latest, SavedCheckpoint, check_policies, decide
from tierfs.errors import InvalidInputError
from tierfs.train import Manager
from tierfs.train.policies import (
    DEADLINES_S,
    Context,
    Deadline,
    Preemption,
    YoungDaly,
    as_save_policies,
    deadline_of,
    young_daly_s,
)

NOW_S = 1_700_000_000.0
seconds = st.floats(0.001, 1e5)


def context(**known):
    return Context(**{"now_s": NOW_S, "since_s": 0.0, **known})


@pytest.fixture(autouse=True)
def nobody_says_when_the_job_ends(monkeypatch):
    for name in DEADLINES_S:
        monkeypatch.delenv(name, raising=False)


@given(st.integers(1, 1000), st.integers(0, 10_000))
def test_every_asks_at_each_multiple_of_its_steps(steps, step):
    (policy,) = as_save_policies([Every(steps=steps)])
    assert policy.is_uniform
    assert policy.should_save(step, [], context=context()) is (step > 0 and step % steps == 0)


@given(seconds, seconds)
def test_every_asks_when_its_minutes_are_over(minutes, since_s):
    (policy,) = as_save_policies([Every(minutes=minutes)])
    assert not policy.is_uniform
    assert policy.should_save(7, [], context=context(since_s=since_s)) is (since_s >= minutes * 60)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_preemption_saves_and_stops(is_preempted):
    known = context(is_preempted=is_preempted)
    assert Preemption().should_save(3, [], context=known) is is_preempted
    assert Preemption().should_stop(3, [], context=known) is is_preempted


@given(
    asked=st.floats(1, 100),
    step_s=st.floats(0.01, 100),
    save_s=st.floats(0, 1000),
    agree_every=st.integers(1, 10),
)
def test_a_deadline_leaves_time_for_a_save_and_two_steps(asked, step_s, save_s, agree_every):
    end_s = asked * agree_every * step_s
    policy = Deadline(at_s=NOW_S + end_s)
    known = {"step_s": step_s, "save_s": save_s, "agree_every": agree_every}
    times_s = [at * agree_every * step_s for at in range(101)]
    stops = [policy.should_save(1, [], context=context(now_s=NOW_S + now_s, **known)) for now_s in times_s]
    assert stops == sorted(stops)
    first = stops.index(True)
    about_s = 1e-6 + 1e-9 * end_s
    if first:  # even the first call may be too late
        assert end_s - times_s[first] >= save_s + 2 * step_s - about_s
    # The next call would be too late.
    assert end_s - (times_s[first] + agree_every * step_s) < save_s + 2 * step_s + about_s


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_END_TIME": "1700000000"}, 1_700_000_000),
        ({"SLURM_JOB_END_TIME": " "}, None),
        ({"SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP": "1700000000123"}, 1_700_000_000.123),
        (
            {
                "SLURM_JOB_END_TIME": "1700000500",
                "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP": "1700000100",
            },
            1_700_000_100,
        ),
    ],
)
def test_the_earliest_deadline_counts(environment, expected):
    assert deadline_of(environment) == expected


def test_a_deadline_that_is_no_number_is_named():
    with pytest.raises(InvalidInputError, match="SLURM_JOB_END_TIME='soon'"):
        deadline_of({"SLURM_JOB_END_TIME": "soon"})


def test_without_a_deadline_nothing_is_asked_for():
    assert not Deadline().should_save(1, [], context=context(step_s=1e9, save_s=1e9))


@given(seconds, seconds)
def test_the_interval_grows_with_cost_and_with_time_between_failures(cost_s, mtbf_s):
    interval_s = young_daly_s(cost_s, mtbf_s)
    assert 0 <= interval_s <= mtbf_s * 3
    if cost_s < mtbf_s / 100:
        assert interval_s == pytest.approx(math.sqrt(2 * cost_s * mtbf_s), rel=0.12)
        assert young_daly_s(cost_s, mtbf_s * 4) > interval_s


def test_policies_ask_for_nothing_during_a_save():
    policy = YoungDaly(mtbf="1h")
    known = {"since_s": 1e6, "step_s": 1.0, "blocked_s": 1.0}
    assert policy.should_save(1, [], context=context(**known))
    assert not policy.should_save(1, [], context=context(**known, is_saving=True))


def lost_by_policy(gaps_s, step_s, cost_s):
    """Return the seconds lost to repeated work and to saves under ``YoungDaly``. A gap lies between two failures."""
    policy = YoungDaly(mtbf=f"{np.mean(gaps_s):.0f}s")
    kept_s = 0.0
    measured_s = 0.0  # cost of a save, as the manager measures it
    for gap_s in gaps_s:
        now_s = saved_s = made_s = 0.0
        while (now_s := now_s + step_s) < gap_s:
            made_s += step_s
            known = Context(now_s=now_s, since_s=now_s - saved_s, step_s=step_s, blocked_s=measured_s)
            if policy.should_save(1, (), context=known):
                now_s += cost_s
                if now_s >= gap_s:
                    break
                saved_s, measured_s = now_s, cost_s
                kept_s, made_s = kept_s + made_s, 0.0
    return gaps_s.sum() - kept_s


def lost_by_interval(gaps_s, step_s, cost_s, steps):
    cycle_s = steps * step_s + cost_s
    return gaps_s.sum() - (np.floor(gaps_s / cycle_s) * steps * step_s).sum()


@pytest.mark.parametrize(("step_s", "cost_s", "mtbf_s"), [(1.0, 0.5, 400.0), (2.0, 6.0, 900.0), (10.0, 1.0, 3000.0)])
def test_young_daly_loses_little_more_than_the_best_fixed_interval(step_s, cost_s, mtbf_s):
    random = np.random.default_rng(7)
    count = int(100_000 * step_s / mtbf_s)  # about 100,000 steps
    # Take one gap from each part of the distribution, so that no interval is best by chance.
    gaps_s = random.permutation(-mtbf_s * np.log1p(-(np.arange(count) + random.random(count)) / count))
    best_s = min(lost_by_interval(gaps_s, step_s, cost_s, steps) for steps in range(1, 500))
    assert lost_by_policy(gaps_s, step_s, cost_s) <= best_s * 1.05


class Odd:
    """A user's keep policy."""

    def preserve(self, checkpoints, *, context):
        return [each.step % 2 == 1 for each in checkpoints]


def test_the_users_own_policy_keeps_checkpoints():
    saved = [SavedCheckpoint(f"step_{step}", step, step) for step in range(1, 7)]
    decisions = decide(saved, [Odd(), Latest(2)], 10, context())
    assert [each.saved.step for each in decisions if each.is_kept] == [1, 3, 5, 6]


@pytest.mark.parametrize("wrong", [7, "latest", Every])
def test_an_object_that_is_no_policy_is_refused(wrong):
    with pytest.raises(InvalidInputError, match="should_save"):
        as_save_policies([wrong() if wrong is Odd else wrong] if wrong is not Every else [Latest(1)])
    with pytest.raises(InvalidInputError, match="preserve"):
        check_policies([wrong if wrong is not Every else Preemption()])


@pytest.mark.parametrize("argument", ["save", "light", "keep"])
@pytest.mark.parametrize("wrong", [Every(steps=5), None, "latest"])
def test_an_argument_that_is_no_list_of_policies_is_refused(root, argument, wrong):
    with pytest.raises(InvalidInputError, match=f"{argument}=.*: give a list"):
        Manager(root, **{"save": (), argument: wrong})


@pytest.mark.parametrize(
    "make", [lambda: YoungDaly(mtbf="soon"), lambda: Preemption(grace="30"), lambda: Preemption(grace=30)]
)
def test_a_time_needs_a_unit(make):
    with pytest.raises(InvalidInputError, match="like 2d"):
        make()
