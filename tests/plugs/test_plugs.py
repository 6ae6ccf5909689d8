"""What all plugs share: one line about what a run goes on from, and a limit of checkpoints in all."""

from __future__ import annotations

import logging
import time

import pytest

pytest.importorskip("torch")  # of `tierfs.checkpoint`

from tierfs.checkpoint.retention import Best, SavedCheckpoint
from tierfs.plugs import Total, say_loaded


def saved(*steps, pinned=(), **metrics):
    return [
        SavedCheckpoint(
            f"step_{each}", each, each, is_pinned=each in pinned, metrics={"loss": metrics.get(f"s{each}", 9.0)}
        )
        for each in steps
    ]


def kept(policy, checkpoints):
    answers = policy.preserve(checkpoints, context=None)
    return [each.step for each, is_kept in zip(checkpoints, answers, strict=True) if is_kept]


@pytest.mark.parametrize(
    ("policy", "pinned", "wanted"),
    [
        (Total(3), (), [3, 4, 5]),
        (Total(3), (1,), [1, 4, 5]),
        (Total(3, Best(1, "loss")), (1,), [1, 2, 5]),
        (Total(3, Best(1, "loss")), (), [2, 4, 5]),
        (Total(1), (1,), [1, 5]),
        (Total(9), (1,), [1, 2, 3, 4, 5]),
    ],
)
def test_a_limit_counts_the_resumed_and_the_best_one(policy, pinned, wanted):
    assert kept(policy, saved(1, 2, 3, 4, 5, pinned=pinned, s2=1.0)) == wanted


def test_a_limit_of_nothing_keeps_nothing():
    assert kept(Total(2), []) == []


@pytest.mark.parametrize(
    ("age_s", "words"),
    [(3, "3 seconds"), (300, "5 minutes"), (7300, "2 hours"), (400_000, "5 days"), (-5, "0 seconds")],
)
def test_a_load_is_said_with_step_level_age_and_time(caplog, age_s, words):
    with caplog.at_level(logging.WARNING, "tierfs.plugs"):
        say_loaded("tierfs://runs/a", 12, "local", time.time() - age_s, 0.25)
        say_loaded("tierfs://runs/b.ckpt", None, "object", time.time() - age_s, 61.0)
    assert caplog.messages == [
        f"tierfs: loaded step 12 from tierfs://runs/a: at the level local, saved {words} ago, in 0.2 s",
        f"tierfs: loaded tierfs://runs/b.ckpt: at the level object, saved {words} ago, in 61.0 s",
    ]
