"""Weights of a trainer reach rollouts through verl's own manager, and as engines alone in the cases that fail."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("verl.checkpoint_engine", reason="verl is not installed: docs/how-to/integration-tests.md")

import fsspec
from running import trained
from servers import ministack
from verl.checkpoint_engine import CheckpointEngineRegistry

import tierfs
import tierfs.plugs.verl
from tierfs.errors import AlreadyExistsError, InvalidInputError, NotFoundError

pytestmark = [pytest.mark.filterwarnings("default")]  # of verl
EXAMPLE = Path(__file__).parent / "verl_rollouts.py"
RAM = "256MiB"


@pytest.fixture
def url(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store/weights"


def engine(url, **options):
    return CheckpointEngineRegistry.new("tierfs", bucket_size=1000, url=url, **{"ram": RAM, **options})


def weights(value):
    return {
        "b": torch.full((700,), value),
        "a": torch.full((3, 700), value, dtype=torch.bfloat16),
        "c": torch.tensor(1),
    }


def send(trainer, value, *others):
    """Do what verl's manager does before and while weights are sent."""
    metadata = [each.prepare() for each in (trainer, *others)]
    for kwargs in type(trainer).build_topology(1, len(others), metadata):
        assert all(len(each) in {1, len(others)} for each in kwargs.values())
    for each in (trainer, *others):
        each.init_process_group(step=metadata[0])
    asyncio.run(trainer.send_weights(iter(weights(value).items()), global_steps=7))


def received(rollout):
    async def collect():
        return {name: tensor async for name, tensor in rollout.receive_weights(global_steps=7)}

    return asyncio.run(collect())


def steps(url):
    fs, path = fsspec.url_to_fs(url)
    return sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False))


def test_rollouts_read_only_what_changed(tmp_path):
    ministack.require()
    arguments = ("--ranks", 2, "--layers", 1, "--begin", 5, "--versions", 4)
    _, said, code = trained(tmp_path, EXAMPLE, tmp_path, *arguments)
    assert code == 0, said
    assert "weights for rollouts go to tierfs::s3://" in said
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    first, *later, last = lines
    assert last["left"] == ["step_2", "step_3"]
    assert all(0.1 < share < 1 for share in first["read"])
    assert len(later) == 3
    assert all(0 < share < 0.1 for line in later for share in line["read"]), lines


def test_each_version_reaches_a_rollout_whole(url):
    trainer, rollout = engine(url, is_master=True), engine(url)
    for value in (1.0, 2.0):
        send(trainer, value, rollout)
        found = received(rollout)
        assert all(torch.equal(found[name], each) for name, each in weights(value).items())
        assert found.keys() == weights(value).keys()
    assert rollout.prepare() is None


def test_other_ranks_of_the_trainer_make_weights_and_save_none(url):
    other, made = engine(url), []
    asyncio.run(other.send_weights(made.append(name) or (name, each) for name, each in weights(1.0).items()))
    assert made == ["b", "a", "c"]
    assert not fsspec.url_to_fs(url)[0].exists(fsspec.url_to_fs(url)[1])


def test_a_restarted_trainer_goes_on_and_removes_its_own_versions(url):
    first = engine(url, is_master=True, keep=1)
    for _ in range(3):
        send(first, 1.0)
        first.finalize()
    assert steps(url) == ["step_2"]
    second, everything = engine(url, is_master=True, keep=1), engine(url, is_master=True, keep=0)
    for trainer in (second, second, everything, everything):
        send(trainer, 1.0)
        trainer.finalize()
    assert steps(url) == ["step_2", "step_4", "step_5", "step_6"]


def test_a_version_of_another_job_is_not_replaced(url):
    one, other = engine(url, is_master=True), engine(url, is_master=True)
    send(one, 1.0)
    other.init_process_group(step=0)
    with pytest.raises(AlreadyExistsError):
        asyncio.run(other.send_weights(iter(weights(2.0).items())))


def test_a_rollout_waits_for_a_version_and_not_for_ever(url):
    trainer, rollout = engine(url, is_master=True), engine(url, timeout=0.5)
    rollout.init_process_group(step=0)
    with pytest.raises(NotFoundError, match=r"step_0 was not complete in 0\.5 s: see the trainer"):
        received(rollout)
    send(trainer, 1.0)
    assert received(rollout)["c"] == 1


def test_a_rollout_without_room_says_so(url):
    send(engine(url, is_master=True), 1.0)
    rollout = engine(url, ram=0)
    rollout.init_process_group(step=0)
    with pytest.raises(InvalidInputError, match="give it room with ram="):
        received(rollout)
