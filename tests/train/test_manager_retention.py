"""Retention removes the checkpoints of this run that no policy keeps, but none that a restart may need."""

import logging
import os
import signal

import fsspec
import pytest
import torch

from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.host.pending.levels import Level
from tierfs.train import Best, Every, Latest, Manager
from tierfs.train.run import RunDirectory

OPTIONS = {"ram": "0", "nvme": "0"}


def state(step):
    return {"model": torch.full((300,), float(step)), "step": step}


def manager(root, **arguments):
    return Manager(root, **{"save": (), **OPTIONS, **arguments})


def save(run, *steps, loss=None):
    for step in steps:
        run.save(step, state(step), metrics=None if loss is None else {"loss": loss[step]}).wait()
        run.wait()


def steps(root):
    with manager(root) as run:
        return [each.step for each in run.checkpoints if each.is_complete]


def test_a_checkpoint_that_no_policy_keeps_is_removed(root, caplog):
    with caplog.at_level(logging.INFO, "tierfs.train"), manager(root, keep=[Latest(2), Every(steps=4)]) as run:
        save(run, *range(1, 10))
    assert steps(root) == [1, 4, 8, 9]
    assert "step_7 is removed: no policy keeps it" in caplog.text


@pytest.mark.parametrize("keep", [Latest(2), Best(2, "loss"), Every(steps=40)], ids=str)
def test_light_checkpoints_do_not_displace_full_ones(root, keep):
    for steps_saved in (range(10, 60, 10), range(60, 90, 10)):  # the second manager knows the kinds from a record
        with manager(root, keep=[keep], on_stale="ignore") as run:
            run.restore(state(0), kind="any")
            for step in steps_saved:
                kind = "full" if step in {10, 20} else "light"
                run.save(step, state(step), kind=kind, metrics={"loss": 1 / step}).wait()
                run.wait()
            kinds = [each.kind for each in run.checkpoints]
            assert 1 <= kinds.count("full") <= 2
            assert kinds.count("light") <= 4
            assert run.checkpoints[0].step in {10, 20}


def test_no_policies_remove_nothing(root):
    with manager(root) as run:
        save(run, 1, 2, 3)
    assert steps(root) == [1, 2, 3]


def test_the_best_ones_stay(root):
    with manager(root, keep=[Best(2, "loss")]) as run:
        save(run, 1, 2, 3, 4, 5, loss={1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 3.0})
        assert (run.best("loss"), run.best("loss", mode="max"), run.best("nothing")) == (2, 5, None)
    assert steps(root) == [2, 4, 5]


def test_a_pinned_step_stays_until_it_is_unpinned(root):
    with manager(root, keep=[Latest(1)]) as run:
        save(run, 1)
        run.pin(1)
        with pytest.raises(InvalidInputError, match="pinned"):
            run.delete(1)
        save(run, 2, 3)
        assert [(each.step, each.is_pinned) for each in run.checkpoints] == [(1, True), (3, False)]
        run.unpin(1)
        save(run, 4)
    assert steps(root) == [4]


def test_a_step_can_be_deleted(root):
    with manager(root) as run:
        save(run, 1, 2)
        run.delete(2)
        assert run.latest() == 1
        for missing in (run.delete, run.pin):
            with pytest.raises(NotFoundError):
                missing(2)


def test_a_step_goes_as_a_whole_while_its_metadata_waits(root, tmp_path):
    here, there = ({"ram": "16MiB", "nvme": "0", "state_dir": str(tmp_path / name)} for name in ("here", "there"))
    with manager(root, **here) as run:
        run.save(1, state(1)).wait("object")
        run.wait()
        files = fsspec.url_to_fs(root, ack="staged", **here)[0]
        metadata = f"{root}/step_1/.metadata"
        content = files.cat_file(metadata)
        flusher = files.status()["flusher"]["pid"]
        os.kill(flusher, signal.SIGSTOP)
        try:
            files.pipe_file(metadata, content)  # newer than the published one, so its removal waits, too
            run.delete(1)
            assert run.latest() is None
            with manager(root, **there) as other:
                assert other.restore(state(0)).step == 1
        finally:
            os.kill(flusher, signal.SIGCONT)
        files.wait(root, timeout=60)
    assert [path for path in files.find(root) if "/step_1/" in path] == []


def test_another_runs_checkpoints_are_left_alone(root):
    with manager(root) as run:
        save(run, 1, 2, 3)
    with manager(root, keep=[Latest(1)]) as run:  # a new run: it restores nothing
        save(run, 11, 12, 13)
    assert steps(root) == [1, 2, 3, 13]


def test_a_resumed_run_knows_its_own_and_keeps_what_it_was_restored_from(root):
    with manager(root, keep=[Latest(3)]) as run:
        save(run, 1, 2, 3)
    with manager(root, keep=[Latest(1)]) as run:
        assert run.restore(state(0), step=2).step == 2
        save(run, 3, 4)
    assert steps(root) == [2, 4]


def test_newer_steps_of_another_run_are_left_alone(root):
    with manager(root) as run:
        save(run, 1, 2, 3)
    with manager(root) as run:  # another run: it restores nothing
        save(run, 0)
    with manager(root, keep=[Latest(1)]) as run:
        assert run.restore(state(0)).step == 0
        save(run, 4, 5)
    assert steps(root) == [0, 1, 2, 3, 5]


def test_a_staged_checkpoint_does_not_replace_a_durable_one(root, monkeypatch):
    with manager(root, keep=[Latest(1)]) as run:
        save(run, 1)
        durable = RunDirectory.standing

        def standing(self, step):
            found = durable(self, step)
            if step > 1:
                found.level = Level.STAGED
            return found

        monkeypatch.setattr(RunDirectory, "standing", standing)
        save(run, 2, 3)
        assert [each.step for each in run.checkpoints] == [1, 3]
    assert steps(root) == [1, 3]


def test_a_damaged_step_does_not_count_as_the_newest(root, monkeypatch):
    with manager(root, keep=[Latest(1)]) as run:
        save(run, 1)
        monkeypatch.setattr(RunDirectory, "damage_of", lambda _, step: "bad" if step == 2 else "")
        save(run, 2)
    assert steps(root) == [1, 2]


def test_local_copies_have_policies_of_their_own(root, caplog):
    keep = {"ram": [Latest(1)]}
    with caplog.at_level(logging.INFO, "tierfs.train"), manager(root, ram="64MiB", keep=keep) as run:
        for step in (1, 2, 3):
            run.save(step, state(step)).wait("object")
            run.wait()
    assert steps(root) == [1, 2, 3]
    assert "step_1: " in caplog.text
    assert "step_3: " not in caplog.text


@pytest.mark.parametrize("keep", [{"tape": [Latest(1)]}, [7], {"nvme": ["latest"]}])
def test_an_invalid_keep_argument_is_refused(root, keep):
    with pytest.raises(InvalidInputError, match="keep="):
        manager(root, keep=keep)


def test_files_beside_a_checkpoint_come_and_go_with_it(root):
    def files(step, places):
        assert set(places) == {"model", "step", "rank_0.tierfs.rng", "tierfs.about"}
        return {"config.json": f"{step}".encode(), "tokens/index.json": places["model"].encode()}

    fs, path = fsspec.url_to_fs(root)
    with manager(root, keep=[Latest(1)], files=files) as run:
        save(run, 1, 2)
        assert fs.cat_file(f"{path}/step_2/config.json") == b"2"
        assert fs.cat_file(f"{path}/step_2/tokens/index.json").endswith(b".safetensors")
        assert not fs.exists(f"{path}/step_1")
