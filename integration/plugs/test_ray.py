"""Ray Train with its storage in a store: a killed run goes on, and checkpoints are uploaded and read back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("ray.train", reason="ray[train] is not installed: docs/how-to/integration-tests.md")

import ray.train
from running import trained

import tierfs
from tierfs.errors import InvalidInputError
from tierfs.plugs.ray import Notice, storage, upload
from tierfs.train import Context

pytestmark = [pytest.mark.filterwarnings("default")]  # of Ray
EXAMPLE = Path(__file__).parent / "ray_trainer.py"
LAST = 23
CONTEXT = Context(now_s=0.0, since_s=0.0)


@pytest.fixture
def url(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store"


def test_a_killed_run_goes_on_with_another_number_of_workers(url, tmp_path):
    first, said, code = trained(tmp_path, EXAMPLE, url, 2, kill=(11, signal.SIGKILL))
    assert code == -signal.SIGKILL, said
    assert f"results of Ray go to {url}; a save is done at local" in said
    second, said, code = trained(tmp_path, EXAMPLE, url, 1)
    assert (max(second), code) == (LAST, 0), said
    assert 1 < min(second) <= max(first) + 1
    both = first.keys() & second.keys()
    assert {step: second[step] for step in both} == pytest.approx({step: first[step] for step in both}, rel=1e-5)


def test_a_local_checkpoint_is_uploaded_and_read_back(url, tmp_path):
    from ray.train import RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchTrainer

    def report_once(config):  # nested, so that Ray sends the function itself
        before = ray.train.get_checkpoint()
        found = 0
        if before is not None:
            with before.as_directory() as directory:
                found = len((Path(directory) / "weights.bin").read_bytes())
        directory = Path(config["directory"])
        (directory / "weights.bin").write_bytes(b"weights" * (found + 1))
        ray.train.report(
            {"loss": 1.0, "found": found},
            checkpoint=ray.train.Checkpoint.from_directory(str(directory)),
            checkpoint_upload_fn=upload(ack="staged"),
            delete_local_checkpoint_after_upload=False,
        )

    log = tmp_path / "heard"

    class Hears(UserCallback):
        def after_report(self, run_context, metrics, checkpoint):  # in Ray's controller
            with log.open("a") as file:
                file.write(f"{checkpoint.path}\n")

    (tmp_path / "made").mkdir()
    ray.init(object_store_memory=100 << 20, include_dashboard=False)
    try:
        for found in (0, 7):
            trainer = TorchTrainer(
                report_once,
                train_loop_config={"directory": str(tmp_path / "made")},
                scaling_config=ScalingConfig(num_workers=1),
                run_config=RunConfig(name="run", callbacks=[Hears()], **storage(url)),
            )
            result = trainer.fit()
            assert result.metrics["found"] == found
        with result.checkpoint.as_directory() as directory:
            assert (Path(directory) / "weights.bin").read_bytes() == b"weights" * 8
    finally:
        ray.shutdown()
    assert len(log.read_text().split()) == 2


def test_a_notice_saves_once_for_each_node(monkeypatch):
    notice, answers = Notice(every=2), []
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: answers[-1])  # only a cloud takes nodes away
    asked = []
    for nodes in ({}, {"a": [0]}, {"a": [0]}, {"a": [0], "b": [1]}):
        answers.append(ray.train.PreemptionInfo(None, nodes) if nodes else None)
        asked.append(notice.should_save(2 * len(answers), [], context=CONTEXT))
    assert asked == [False, True, False, True]
    answers.append(ray.train.PreemptionInfo(None, {"c": [2]}))
    assert not notice.should_save(9, [], context=CONTEXT)


def test_another_url_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="go to tierfs URLs, not to"):
        storage(str(tmp_path))
