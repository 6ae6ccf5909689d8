"""The hooks of Accelerate, with which diffusers' scripts keep averaged weights and adapters."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed: docs/how-to/integration-tests.md")

import fsspec
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration

from tierfs.plugs.huggingface import attach

pytestmark = [pytest.mark.filterwarnings("default")]  # of other packages


class Average:
    """A model of averaged weights with its own files, as diffusers has them."""

    def __init__(self, model):
        self.shadow = {name: each.detach().clone() for name, each in model.state_dict().items()}

    def step(self, model):
        for name, each in model.state_dict().items():
            self.shadow[name].lerp_(each, 0.1)

    def save_pretrained(self, folder):
        Path(folder).mkdir()
        torch.save(self.shadow, Path(folder, "weights.bin"))

    def load_pretrained(self, folder):
        self.shadow = torch.load(Path(folder, "weights.bin"))


@pytest.fixture
def accelerated():
    def make(**more):
        AcceleratorState._reset_state(True)  # each call stands for a new process
        torch.manual_seed(0)
        accelerator, model = Accelerator(cpu=True, **more), torch.nn.Linear(2, 2)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    yield make
    AcceleratorState._reset_state(True)


def hooked(accelerator, average):
    """Register the two hooks of diffusers' training scripts."""

    def save(models, weights, output_dir):
        average.save_pretrained(os.path.join(output_dir, "unet_ema"))
        for each in models:
            torch.save(each.state_dict(), os.path.join(output_dir, "unet.bin"))
            weights.pop()

    def load(models, input_dir):
        average.load_pretrained(os.path.join(input_dir, "unet_ema"))
        for _ in range(len(models)):
            models.pop().load_state_dict(torch.load(os.path.join(input_dir, "unet.bin")))

    return accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)


def a_step(model, optimizer, average):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.step(model)


def test_the_hooks_of_diffusers_keep_averaged_weights(url, accelerated, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)  # it is read once
    accelerator, model, optimizer = accelerated()
    average = Average(model)
    with attach(accelerator, url):
        hooked(accelerator, average)
        a_step(model, optimizer, average)
        accelerator.save_state(1)
        a_step(model, optimizer, average)
    other, loaded, second = accelerated()
    fresh = Average(loaded)
    with attach(other, url):
        hooked(other, fresh)
        assert other.load_state() == 1
        a_step(loaded, second, fresh)
    assert torch.equal(loaded.weight, model.weight)
    assert all(torch.equal(fresh.shadow[name], each) for name, each in average.shadow.items())
    assert not list((tmp_path / "tmp").glob("tierfs-*"))


def test_an_older_step_brings_its_own_files(url, accelerated):
    accelerator, model, optimizer = accelerated()
    average = Average(model)
    kept = {}
    with attach(accelerator, url, ack="object", ram="0", nvme="0"):
        hooked(accelerator, average)
        for step in (1, 2):
            a_step(model, optimizer, average)
            accelerator.save_state(step)
            kept[step] = {name: each.clone() for name, each in average.shadow.items()}
    fs, path = fsspec.url_to_fs(url)
    fs.rm(next(name for name in fs.ls(f"{path}/step_2", detail=False) if name.endswith(".safetensors")))
    other, loaded, _ = accelerated()
    fresh = Average(loaded)
    with attach(other, url):
        hooked(other, fresh)
        assert other.load_state() == 1
    assert all(torch.equal(fresh.shadow[name], each) for name, each in kept[1].items())


def test_files_that_no_hook_loads_are_named(url, accelerated, caplog):
    accelerator, model, _ = accelerated()
    with attach(accelerator, url):
        saves, _ = hooked(accelerator, Average(model))
        accelerator.save_state(1)
        saves.remove()
        accelerator.save_state(2)
    other, _, _ = accelerated()
    with attach(other, url), caplog.at_level(logging.WARNING, "tierfs.plugs"):
        other.load_state(2)
        assert "no hook is registered" not in caplog.text
        other.load_state(1)
    assert "no hook is registered that loads them" in caplog.text
    assert re.search(r"loaded step 1 from .*: at the level \w+, saved \d+ seconds ago, in \d+\.\d s", caplog.text)


def test_registered_objects_and_the_total_limit_hold(url, accelerated, tmp_path):
    class Counter:
        count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator, _, _ = accelerated(project_config=project)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    with attach(accelerator, url, ack="object") as manager:
        for _ in range(4):
            counter.count += 1
            accelerator.save_state()
        manager.wait()
        assert [each.step for each in manager.checkpoints] == [2, 3]
    other, _, _ = accelerated()
    loaded = Counter()
    other.register_for_checkpointing(loaded)
    with attach(other, url):
        assert other.load_state() == 3
        assert other.save_iteration == 4
    assert loaded.count == 4
    assert not (tmp_path / "checkpoints").exists()
