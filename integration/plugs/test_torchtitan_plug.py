"""`TierCheckpointManager` of torchtitan: a killed training goes on, past a damaged step, with its generators."""

from __future__ import annotations

import logging
import random
import re
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchtitan.components.checkpoint", reason="torchtitan is not installed")

import fsspec
import tyro
from running import trained
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from tierfs.errors import InvalidInputError
from tierfs.plugs.torchtitan import TierCheckpointManager
from tierfs.train import Every

pytestmark = [pytest.mark.filterwarnings("default")]  # of torchtitan
RUN = ("-m", "torch.distributed.run", "--standalone")
EXAMPLE = Path(__file__).parent / "torchtitan_trainer.py"
LAST = 23


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def manager(url, progress, base=TierCheckpointManager, **options):
    model = torch.nn.Linear(3, 3)
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = OptimizersContainer(
        OptimizersContainer.Config(param_groups=[group], implementation="for-loop"), model_parts=[model]
    )
    return model, base.Config(enable=True, folder=url, interval=1, **options).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer(optimizers, lambda step: 1),
        states={"train_state": progress},
        sd_adapter=None,
    )


def test_killed_runs_end_like_one_that_was_not(url, tmp_path):
    def run(ranks, where=url, **options):
        return trained(tmp_path, *RUN, f"--nproc-per-node={ranks}", EXAMPLE, where, **options)

    whole, said, _ = run(2, f"{url}-whole")
    assert f"checkpoints go to {url}-whole; a save is done at staged" in said
    assert sorted(whole) == list(range(1, LAST + 1)), said
    first, said, code = run(2, kill=(7, signal.SIGKILL))
    assert code == -signal.SIGKILL, said
    second, said, code = run(2, kill=(13, signal.SIGTERM))
    assert min(second) in {1, 5, 9}, said  # a save that the kill prevented is no checkpoint
    assert code != 0, said
    third, said, code = run(1)
    assert (min(third), max(third), code) == (max(second) + 1, LAST, 0), said
    assert {**first, **second, **third} == pytest.approx(whole, rel=1e-5)


def test_a_resume_passes_over_damage_and_restores_generators(url, tmp_path):
    progress = Progress()
    model, saves = manager(url, progress, save=[Every(minutes=60)], keep_latest_k=0)
    drawn = {}
    for progress.step in (1, 2):
        torch.nn.init.constant_(model.weight, progress.step)
        saves.save(progress.step)
        drawn[progress.step] = random.random(), torch.rand(1).item()
    saves.close()
    fs, path = fsspec.url_to_fs(url)
    fs.wait(path, "object", timeout=60)
    fs.pipe_file(f"{path}/step_2/.metadata", b"damaged")
    again, saves = manager(url, progress := Progress())
    assert saves.load()
    assert progress.step == 1
    assert torch.equal(again.weight, torch.full((3, 3), 1.0))
    assert (random.random(), torch.rand(1).item()) == drawn[1]
    saves.close()


def test_the_last_save_has_the_model_alone_and_is_not_resumed(url):
    _, saves = manager(url, progress := Progress(), export_dtype="bfloat16")
    for progress.step in (1, 2):
        saves.save(progress.step, last_step=progress.step == 2)
    kinds = {each.step: each.kind for each in saves.manager.checkpoints}
    assert kinds == {1: "full", 2: "light"}
    saves.close()
    _, saves = manager(url, progress := Progress())
    assert saves.load()
    assert progress.step == 1
    saves.close()


def test_a_run_of_torchtitans_own_manager_is_continued(url):
    from torchtitan.components.checkpoint import CheckpointManager

    model, saves = manager(url, progress := Progress(), CheckpointManager, last_save_model_only=False)
    progress.step = 3
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        saves.save(3, last_step=True)
    saves.close()
    again, saves = manager(url, progress := Progress())
    assert saves.load()
    assert progress.step == 3
    assert torch.equal(again.weight, model.weight)
    saves.close()


class Kept:
    """A state of the user's own, with the methods that torchtitan calls."""

    value = 0

    def state_dict(self):
        return {"value": torch.tensor(self.value)}

    def load_state_dict(self, state):
        self.value = int(state["value"])


def test_states_and_the_models_own_hooks_are_saved_and_loaded(url, caplog):
    def renamed(module, state, prefix, metadata):
        state[f"{prefix}doubled"] = state.pop(f"{prefix}weight") * 2

    def back(module, state, prefix, *_):
        state[f"{prefix}weight"] = state.pop(f"{prefix}doubled") / 2

    found = []
    for value in (5, 0):
        model, saves = manager(url, Progress())
        model.register_state_dict_post_hook(renamed)
        model.register_load_state_dict_pre_hook(back)
        saves.states["kept"] = kept = Kept()
        kept.value = value
        if value:
            saves.save(1)
        else:
            with caplog.at_level(logging.WARNING, "tierfs.plugs"):
                assert saves.load()
        found.append((model.weight.detach().clone(), kept.value))
        saves.close()
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1] == 5
    assert re.search(r"loaded step 1 from .*: at the level \w+, saved \d+ seconds ago, in \d+\.\d s", caplog.text)


@pytest.mark.parametrize("name", ["dcp_save", "dcp_load", "_states_to_load", "_should_save"])
def test_a_method_that_is_not_called_may_not_be_overridden(url, name):
    kind = type("Changed", (TierCheckpointManager,), {name: lambda self, *_, **__: None})
    with pytest.raises(InvalidInputError, match=f"Changed overrides {name}"):
        kind(TierCheckpointManager.Config(enable=True, folder=url))


def test_levels_are_options_of_the_command_line(url):
    config = tyro.cli(TierCheckpointManager.Config, args=["--folder", url, "--ack", "local", "--grace", "2m"])
    assert (config.folder, config.ack, config.grace) == (url, "local", "2m")


def test_a_local_folder_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="go to tierfs URLs, not to"):
        manager(str(tmp_path), Progress())
