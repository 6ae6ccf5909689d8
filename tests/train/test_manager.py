"""One rank saves, restores and inspects its checkpoints through the manager."""

import json
import logging
import threading
import time
from collections import Counter

import fsspec
import numpy as np
import pytest
import torch
from support.flipping import flip_shard
from support.forked import answer_of
from support.waiting import HANG_S, until
from torch.distributed.checkpoint import DefaultSavePlanner

from tierfs.errors import AlreadyExistsError, CorruptionError, InvalidInputError, NotFoundError, TierfsError
from tierfs.session import open_store, parse_url
from tierfs.store import load
from tierfs.store.status import request_metrics
from tierfs.train import Every, Manager

OPTIONS = {"ram": "0", "nvme": "0"}


def manager(root, **arguments):
    return Manager(root, **{"save": [Every(steps=2)], **OPTIONS, **arguments})


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(50, 20, generator=generator), "bias": torch.randn(7, generator=generator)},
        "optimizer": {"moment": torch.randn(50, 20, generator=generator), "step": seed},
        "note": f"seed {seed}",
    }


def blank():
    return {
        "model": {"weight": torch.zeros(50, 20), "bias": torch.zeros(7)},
        "optimizer": {"moment": torch.zeros(50, 20), "step": -1},
        "note": "",
    }


def same(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def test_the_newest_step_comes_back_bit_for_bit(root):
    with manager(root) as run:
        saved = [run.step(step, state(step)) for step in range(1, 6)]
    assert [handle.step for handle in saved if handle is not None] == [2, 4]
    found = blank()
    with manager(root) as run:
        restored = run.restore(found)
    assert (restored.step, restored.kind, restored.passed_over) == (4, "full", ())
    assert same(found, state(4))


def test_memory_of_the_first_saves_is_made_from_the_first_step_on(root):
    model = torch.nn.Linear(1000, 2000)
    with Manager(root, save=[Every(steps=100)], ram="128MiB", nvme="0") as run:
        ram = open_store(parse_url(f"tierfs::{root.removeprefix('tierfs::')}?ram=128MiB&nvme=0"))[0].tiers.ram
        run.step(1, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
        until(lambda: ram.usage().store_bytes >= 2 * 3 * 8 << 20)


def test_the_newest_step_of_many_is_found_with_few_requests(root):
    with manager(root) as run:
        for step in range(20):
            run.save(step, state(step)).wait()
    with manager(root) as run:
        before = requests(run)
        assert run.latest() == 19
        # Two listings, which alone grow with the steps; the lines, metadata, one shard file, a look for a mark of damage.
        assert 0 < sum((requests(run) - before).values()) <= 6


def requests(run):
    counts = request_metrics(run._run.open()[0].objects)["object_requests"]
    return Counter({method: count["requests"] for method, count in counts.items()})


def test_a_restore_says_which_tier_it_read(root, tmp_path):
    data = torch.arange(1 << 19)
    here, there = ({"ram": "32MiB", "nvme": "0", "state_dir": str(tmp_path / name)} for name in ("here", "there"))
    with manager(root, **here) as run:
        run.save(1, {"model": data}).wait("object")
        assert run.restore({"model": torch.zeros_like(data)}).tier == "ram"
    with manager(root, **there) as run:
        assert run.restore({"model": torch.zeros_like(data)}).tier == "object"
    with manager(root) as run:
        assert run.restore({"model": torch.zeros_like(data)}).tier == "object"


def test_an_empty_root_restores_nothing(root):
    with manager(root) as run:
        assert run.restore(blank()) is None
        assert run.latest() is None
        assert run.checkpoints == []


def test_changes_after_a_save_are_not_in_it(root):
    live = state(1)
    with manager(root) as run:
        run.save(1, live)
        live["model"]["weight"].zero_()
    found = blank()
    with manager(root) as run:
        run.restore(found)
    assert same(found, state(1))


def test_a_save_tells_how_far_it_is(root):
    with manager(root, ram="64MiB") as run:
        handle = run.save(7, state(7), metrics={"loss": 0.5})
        handle.wait("object")
        assert (handle.level, handle.progress, handle.done, handle.error) == ("object", 1.0, True, None)
        assert handle.blocked_s > 0
        (found,) = run.checkpoints
        assert (found.step, found.level, found.is_complete, found.metrics) == (7, "object", True, {"loss": 0.5})
        assert run.latest("object") == 7


def test_a_damaged_step_is_marked_and_passed_over(root, caplog):
    with manager(root) as run:
        for step in (1, 2, 3):
            run.save(step, state(step)).wait("object")
    flip_shard(f"{root}/step_3")
    found = blank()
    with manager(root) as run, caplog.at_level(logging.ERROR, "tierfs.train"):
        restored = run.restore(found)
        assert run.latest() == 2
        assert "damaged" in run.checkpoints[-1].problem
    assert restored.step == 2
    assert [step for step, _ in restored.passed_over] == [3]
    assert "step_3 is skipped" in caplog.text
    assert same(found, state(2))


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_host_loads_its_own_copy_of_a_marked_step(root, tmp_path, caplog, is_sound):
    own = {"ram": "64MiB", "state_dir": str(tmp_path / "own")}
    with manager(root, **own) as run:
        for step in (1, 2):
            run.save(step, state(step)).wait("object")
        flip_shard(f"{root}/step_2")
        with manager(root, state_dir=str(tmp_path / "other")) as other:
            assert other.restore(blank()).step == 1
        if not is_sound:
            fs, path = fsspec.url_to_fs(root, **own)
            fs.evict(path, "ram")
        found = blank()
        assert run.restore(found).step == (2 if is_sound else 1)
    assert same(found, state(2 if is_sound else 1))


def test_a_marked_step_may_be_saved_anew(root):
    with manager(root) as run:
        run.save(1, state(1)).wait("object")
        flip_shard(f"{root}/step_1")
        for _ in range(2):  # the first restore finds the damage, the second its mark
            with pytest.raises(CorruptionError, match="none can be loaded"):
                run.restore(blank())
        run.save(1, state(9), force=True).wait("object")
        found = blank()
        assert run.restore(found).step == 1
    assert same(found, state(9))


def test_a_damaged_step_is_an_error_if_that_is_wished(root):
    with manager(root) as run:
        for step in (1, 2):
            run.save(step, state(step)).wait("object")
    flip_shard(f"{root}/step_2")
    with manager(root, on_corrupt="raise") as run, pytest.raises(CorruptionError, match="step_2"):
        run.restore(blank())


def test_one_step_or_some_names_can_be_restored(root):
    with manager(root) as run:
        for step in (1, 2):
            run.save(step, state(step))
    found = blank()
    with manager(root) as run:
        assert run.restore(found, step=1, only=["model.*"]).step == 1
        assert same(found, {**blank(), "model": state(1)["model"]})
        run.restore(found, only="note")
        assert found["note"] == "seed 2"
        with pytest.raises(NotFoundError, match="step_5"):
            run.restore(found, step=5)
        with pytest.raises(InvalidInputError, match=r"no value that matches only=\['modle\.\*'\]"):
            run.restore(found, only=["modle.*"])


def test_a_light_save_leaves_the_optimizer_out_and_says_so(root):
    with manager(root, save=[Every(steps=4)], light=[Every(steps=2)]) as run:
        saved = [run.step(step, state(step)) for step in range(1, 7)]
        assert [handle.kind for handle in saved if handle is not None] == ["light", "full", "light"]
    found = blank()
    with manager(root) as run:
        restored = run.restore(found, kind="any")
        assert [each.kind for each in run.checkpoints] == ["light", "full", "light"]
    assert (restored.step, restored.kind, restored.is_exact) == (6, "light", False)
    assert "optimizer" in restored.notes[0]
    assert same(found, {**state(6), "optimizer": blank()["optimizer"]})


def test_a_restore_prefers_a_full_checkpoint_to_a_newer_light_one(root, caplog):
    with manager(root, save=[Every(steps=4)], light=[Every(steps=2)]) as run:
        for step in range(1, 7):
            run.step(step, state(step))
    found = blank()
    with manager(root) as run:
        restored = run.restore(found)
        assert (restored.step, restored.kind, restored.notes) == (4, "full", ())
        assert restored.passed_over == ((6, "it is a light checkpoint"),)
        assert same(found, state(4))
        assert "light" not in caplog.text
        run.delete(4)
        restored = run.restore(found)
        assert (restored.step, restored.kind, restored.passed_over) == (6, "light", ())
        assert "step_6 is a light checkpoint" in caplog.text
        assert run.save(7, state(7), kind="light").kind == "light"
        run.save(7, state(7)).wait()  # it replaces the light one of its step
        assert (run.restore(found).step, run.checkpoints[-1].kind) == (7, "full")
    assert same(found, state(7))


def test_other_content_for_a_step_needs_overwrite(root):
    with manager(root) as run:
        first = run.save(1, state(1))
        assert run.save(1, state(1)) is first
        again = run.save(1, state(1), force=True)
        again.wait()
        assert again.was_there
        with pytest.raises(AlreadyExistsError, match="overwrite=True"):
            run.save(1, state(2), force=True).wait()
        run.save(1, state(2), overwrite=True, force=True).wait()
        found = blank()
        run.restore(found)
    assert same(found, state(2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_corrupt": "ignore"},
        {"ack": "never"},
        {"save": [7]},
        {"no_such": 1},
        {"on_error": "ignore"},
        {"max_failures": 0},
        {"max_age": "soon"},
        {"on_stale": "delete"},
        {"timeout": -1},
        {"timeout": float("nan")},
    ],
    ids=str,
)
def test_an_invalid_argument_is_refused(root, wrong):
    with pytest.raises(InvalidInputError):
        manager(root, **wrong)


def test_a_save_is_cancelled_only_before_it_begins(root):
    begun, goes_on = threading.Event(), threading.Event()

    def planner():
        begun.set()
        goes_on.wait(HANG_S)
        return DefaultSavePlanner()

    with manager(root, planner=planner) as run:
        first = run.save(1, state(1))
        assert begun.wait(HANG_S)
        second = run.save(2, state(2))
        assert not first.cancel()
        assert second.cancel()
        goes_on.set()
        first.wait()
        with pytest.raises(TierfsError, match="cancelled"):
            second.wait()
        assert second.cancel()
        assert [each.step for each in run.checkpoints] == [1]


@pytest.mark.parametrize("wrong", [-1, 5.0, 10**18, "7", None])
def test_a_step_that_could_not_be_found_again_is_refused(root, wrong):
    with manager(root) as run:
        with pytest.raises(InvalidInputError, match="a step is an integer from 0"):
            run.save(wrong, state(1))
        with pytest.raises(InvalidInputError, match="a step is an integer from 0"):
            run.step(wrong, state(1))


@pytest.mark.parametrize("metric", [torch.tensor(1.0, requires_grad=True), np.float32(1), np.int64(1), True])
def test_a_metric_may_be_any_number_and_a_step_any_integer(root, metric):
    with manager(root) as run:
        run.step(np.int64(2), state(2), metrics={"loss": metric}).wait()
        assert (run.best("loss"), run.best("loss", "max")) == (2, 2)
        assert run.checkpoints[0].metrics == {"loss": 1.0}


@pytest.mark.parametrize("wrong", ["much", None, torch.ones(2), 1j, 10**400])
def test_a_metric_that_is_not_a_number_is_refused(root, wrong):
    with manager(root) as run:
        with pytest.raises(InvalidInputError, match="'loss' is not a number"):
            run.step(1, state(1), metrics={"loss": wrong})
        with pytest.raises(InvalidInputError, match="'loss' is not a number"):
            run.save(1, state(1), metrics={"loss": wrong})


def test_metrics_are_those_of_their_step(root):
    metrics, loss = {}, torch.zeros(())
    with manager(root, save=[Every(steps=3)]) as run:
        for step in range(1, 4):
            metrics["loss"] = loss.fill_(step)
            run.step(step, state(step), metrics=metrics)
        metrics.clear()
        run.wait()
    (history,) = json.loads(load(*open_store(parse_url(f"{root}/step_3/.record"))))["history"]
    assert history == [[step, {"loss": float(step).hex()}] for step in (1, 2, 3)]


def test_a_closed_manager_saves_nothing(root):
    with manager(root) as run:
        run.save(1, state(1))
    for call in (run.save, run.step):
        with pytest.raises(InvalidInputError, match="the manager is closed"):
            call(2, state(2))
    run.close()


@pytest.mark.parametrize(("first", "second"), [(torch.int8, torch.uint8), (torch.Size([1]), torch.Size([2]))])
def test_a_value_that_nothing_compares_is_saved_again(root, first, second):
    found = {"weight": torch.zeros(3), "note": None}
    with manager(root) as run:
        run.save(1, {"weight": torch.ones(3), "note": first}).wait()
        run.save(1, {"weight": torch.ones(3), "note": second}, force=True).wait()
        run.restore(found)
    assert found["note"] == second


@pytest.mark.parametrize("wrong", [None, torch.nn.Linear(1, 1), [torch.ones(1)]])
def test_a_state_that_is_no_mapping_is_refused(root, wrong):
    with manager(root) as run:
        with pytest.raises(InvalidInputError, match="give a TrainState or a dict"):
            run.save(1, wrong)
        with pytest.raises(InvalidInputError, match="give a TrainState or a dict"):
            run.restore(wrong)
        assert run.errors == []
        with pytest.raises(InvalidInputError, match="'tierfs', which is reserved"):
            run.save(1, {"tierfs": torch.ones(1)})


def test_a_forked_child_cannot_save_with_its_parents_manager(root):
    with manager(root) as run:
        run.save(1, state(1)).wait()
        answer = answer_of(lambda: run.save(2, state(2)))
        assert "InvalidInputError" in answer
        assert "belongs to its parent" in answer
        run.save(3, state(3)).wait()


def test_a_wait_may_have_an_infinite_timeout(root):
    with manager(root, planner=lambda: time.sleep(0.2) or DefaultSavePlanner(), timeout=float("inf")) as run:
        handle = run.save(1, state(1))
        run.wait(timeout=float("inf"))
        handle.wait(timeout=float("inf"))
        run.save(2, state(2)).wait(timeout=float("inf"))
