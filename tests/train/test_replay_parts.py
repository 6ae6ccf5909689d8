"""Whatever part of a state changes at a step, its log has the change, or ends there aloud."""

import logging

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from support.replay_parts import CASES, LeftUnused

from tierfs.train import Manager, Replay

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),  # torchdata calls it
]
OPTIONS = {"ram": "256MiB", "nvme": "0", "timeout": 60.0}
STEPS, MADE = 12, 9


def manager(root):
    return Manager(root, save=[Replay(ring="64MiB", prove_every=4)], **OPTIONS)


def train(run, training, steps):
    losses = []
    for step in steps:
        losses.append(training.step(step))
        run.step(step, training.state, metrics={"loss": losses[-1]})
        run.wait()
    return losses


@pytest.mark.parametrize(
    ("case", "as_dict"),
    [(case, as_dict) for case in CASES for as_dict in (False, True)],
)
def test_a_run_goes_on_exactly_or_its_log_says_why_not(memory_root, case, as_dict, caplog):
    whole = case(as_dict=as_dict)
    losses, contents = [], []
    for step in range(STEPS):
        losses.append(whole.step(step))
        contents.append(whole.content())
    with manager(memory_root) as run, caplog.at_level(logging.WARNING):
        assert train(run, case(as_dict=as_dict), range(MADE)) == losses[:MADE]
    assert case.ends in caplog.text
    if not case.ends:
        assert "logged" not in caplog.text
    resumed = case(as_dict=as_dict)
    resumed.resume()
    with manager(memory_root) as run:
        restored = run.restore(resumed.state)
        assert (restored.step, restored.stopped) == (case.last, "")
        assert restored.notes == ((case.note,) if case.note else ())
        if case.note:
            return
        assert {name for name, each in resumed.content().items() if each != contents[restored.step][name]} == set()
        if restored.replayed and case.is_proven:
            report = run.verify_resume(resumed.state, resumed.step)
            assert report.is_proven, str(report)
            assert resumed.content() == contents[restored.step]
        assert train(run, resumed, range(restored.step + 1, STEPS)) == losses[restored.step + 1 :]
    assert resumed.content() == contents[-1]


def test_gradients_that_always_stay_unused_end_the_log(memory_root, caplog):
    with manager(memory_root) as run, caplog.at_level(logging.WARNING):
        train(run, LeftUnused(), range(18))
    assert "gradients were left unused at 16 steps: zero those of the model before manager.step()" in caplog.text
    resumed = LeftUnused()
    with manager(memory_root) as run:
        restored = run.restore(resumed.state)
    assert (restored.step, restored.replayed) == (0, 0)
    assert restored.notes == ("the save was in the middle of a gradient accumulation: gradients are not saved",)
