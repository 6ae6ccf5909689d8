"""Which checkpoints each retention rule keeps, and which ones no rule drops."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.checkpoint.retention import (
    Best,
    Every,
    Geometric,
    Latest,
    SavedCheckpoint,
    Within,
    decide,
    parse_rule,
)
from tierfs.errors import InvalidInputError
from tierfs.host.pending.levels import Level

HOUR_NS = 3600 * 10**9
NOW_NS = 1000 * HOUR_NS


def at(step, **known):
    return SavedCheckpoint(f"step_{step}", step, NOW_NS - (1000 - step) * HOUR_NS, **known)


def kept(saved, *rules):
    return [each.saved.step for each in decide(saved, rules, NOW_NS) if each.is_kept]


SAVES = [at(step) for step in range(100, 1001, 100)]


def test_latest_keeps_the_newest():
    assert kept(SAVES, Latest(3)) == [800, 900, 1000]


def test_the_newest_is_named_once_by_the_highest_level_that_it_has():
    saves = [at(1, level=Level.OBJECT), at(2, level=Level.LOCAL), at(3, level=Level.NONE), at(4, level=None)]
    reasons = {each.saved.step: each.reasons for each in decide(saves, [Latest(1)], NOW_NS)}
    assert reasons[1] == ("the newest at object",)
    assert reasons[2] == ("the newest at local",)
    assert reasons[3] == ("the newest of all",)
    assert reasons[4] == ("one of the latest 1",)


def test_every_keeps_the_first_in_so_many_steps():
    saves = [at(step) for step in (0, 60, 103, 150, 190, 305, 400)]
    assert kept(saves, Every(steps=100)) == [0, 103, 305, 400]


def test_geometric_keeps_fewer_of_what_is_older():
    saves = [at(step) for step in range(900, 1001)]
    found = kept(saves, Geometric(2))
    assert len(found) <= 9
    assert found[-1] == 1000
    assert found[0] == 900


def test_a_power_of_the_base_begins_a_range_of_its_own():
    assert kept([at(0), at(100), at(990), at(1000)], Geometric(10)) == [0, 100, 990, 1000]


def test_best_keeps_by_a_metric_and_of_equal_ones_the_newest():
    saves = [
        at(step, metrics={"loss": loss}) for step, loss in ((1, 3.0), (2, 1.0), (3, 1.0), (4, float("nan")), (5, 2.0))
    ]
    assert kept(saves, Best(1, "loss")) == [3, 5]
    assert kept(saves, Best(1, "loss", "max")) == [1, 5]
    assert kept(saves, Best(1, "other")) == [5]


@pytest.mark.parametrize("rule", [Latest(2), Best(2, "loss"), Every(steps=400), Geometric(4), Within("10h")], ids=str)
def test_each_rule_looks_at_full_and_light_ones_apart(rule):
    saves = [at(step, metrics={"loss": 1 / step}) for step in range(100, 1001, 100)]
    full = [each for each in saves if each.step % 500 == 0]
    light = [replace(each, kind="light") for each in saves if each.step % 500]
    assert kept([*full, *light], rule) == sorted(kept(full, rule) + kept(light, rule))
    assert 1000 in kept([*full, *light], rule)


def test_within_keeps_by_time():
    assert kept(SAVES, Within("8d")) == [900, 1000]


def test_pinned_and_incomplete_ones_are_kept_and_count_for_nothing():
    saves = [at(1, is_pinned=True), at(2), at(3), at(4, is_complete=False, level=None)]
    assert kept(saves, Latest(1)) == [1, 3, 4]


def test_a_run_that_was_taken_back_keeps_what_it_saved_last():
    saves = [at(900), SavedCheckpoint("step_500", 500, NOW_NS)]
    assert kept(saves, Latest(1)) == [500, 900]


def test_no_rule_is_refused():
    with pytest.raises(InvalidInputError):
        decide(SAVES, [], NOW_NS)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("latest:3", Latest(3)),
        ("every:10000", Every(steps=10000)),
        ("best:2:val_loss", Best(2, "val_loss")),
        ("best:2:acc:max", Best(2, "acc", "max")),
        ("within:2d", Within("2d")),
        ("geometric", Geometric()),
        ("geometric:3", Geometric(3.0)),
    ],
)
def test_rules_are_read_from_the_command_line(text, rule):
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    "text",
    ["latest", "latest:0", "latest:x", "best:2", "best:2:", "best:2::max", "within:2", "geometric:1", "all", "every:0"],
)
def test_an_unknown_rule_is_refused(text):
    with pytest.raises(InvalidInputError):
        parse_rule(text)


RULES = st.one_of(
    st.builds(Latest, st.integers(1, 5)),
    st.builds(Every, steps=st.integers(1, 50)),
    st.builds(Geometric, st.floats(1.1, 10)),
    st.builds(Best, st.integers(1, 5), st.just("loss"), st.sampled_from(["min", "max"])),
    st.builds(Within, st.sampled_from(["0s", "5h", "2d", "1w"])),
)
ONE = st.builds(
    lambda step, hours, level, complete, pinned, metrics: (step, hours, level, complete, pinned, metrics),
    st.none() | st.integers(0, 100),
    st.integers(0, 200),
    st.sampled_from(Level),
    st.booleans(),
    st.booleans(),
    st.dictionaries(st.just("loss"), st.floats()),
)
MANY = st.lists(ONE, max_size=20).map(
    lambda items: [
        SavedCheckpoint(
            f"c{number}", step, NOW_NS - hours * HOUR_NS, level if complete else None, complete, pinned, metrics
        )
        for number, (step, hours, level, complete, pinned, metrics) in enumerate(items)
    ]
)


@given(MANY, st.lists(RULES, min_size=1, max_size=3))
def test_some_checkpoints_stay_under_any_rules(saved, rules):
    decisions = decide(saved, rules, NOW_NS)
    left = [each.saved for each in decisions if each.is_kept]
    assert {each.saved.path for each in decisions} == {each.path for each in saved}
    assert all(each in left for each in saved if each.is_pinned or not each.is_complete)
    complete = [each for each in saved if each.is_complete]
    for level in Level:
        reached = [each for each in complete if each.level >= level]
        if reached:
            assert max(reached, key=lambda each: each.order) in left, "the newest at a level"
    if complete:
        assert any(each.is_complete for each in left), "something can be loaded"
    # A second pass drops nothing more, and an additional rule keeps at least as much.
    assert all(each.is_kept for each in decide(left, rules, NOW_NS))
    more = {each.saved.path for each in decide(saved, [*rules, Latest(2)], NOW_NS) if each.is_kept}
    assert {each.path for each in left} <= more


def test_every_keeps_the_first_in_so_many_minutes():
    minute_ns = 60 * 10**9
    begin_ns = NOW_NS - NOW_NS % (10 * minute_ns)
    saved = [
        SavedCheckpoint(path=f"step_{n}", step=n, created_ns=begin_ns + at * minute_ns)
        for n, at in enumerate((0, 4, 11, 12, 29, 31))
    ]
    assert kept(saved, Every(minutes=10)) == [0, 2, 4, 5]
    assert str(Every(steps=5, minutes=10)) == "the first one in 5 steps or 10 minutes"


@pytest.mark.parametrize(
    "wrong",
    [{}, {"minutes": 0}, {"minutes": math.nan}, {"minutes": "20"}, {"steps": 0}, {"steps": 1.5}, {"steps": "5"}],
)
def test_every_needs_a_distance(wrong):
    with pytest.raises(InvalidInputError, match="Every"):
        Every(**wrong)


@pytest.mark.parametrize(
    "rule",
    [
        lambda: Latest(2.0),
        lambda: Latest(True),
        lambda: Best("2", "loss"),
        lambda: Best(2, 3),
        lambda: Geometric("2"),
        lambda: Within(2),
    ],
)
def test_a_rule_refuses_values_of_another_type(rule):
    with pytest.raises(InvalidInputError):
        rule()
