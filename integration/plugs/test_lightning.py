"""Lightning with `TierCheckpoint`: a killed training goes on, and ``"last"`` and ``"best"`` find checkpoints by URL."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("lightning", reason="lightning is not installed: docs/how-to/integration-tests.md")

import fsspec
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from running import trained

import tierfs
from tierfs.errors import ConflictError, CorruptionError, InvalidInputError, StoreError
from tierfs.plugs.lightning import (
    FabricModelParallelStrategy,
    TierCheckpoint,
    TierCheckpointIO,
    TierModelParallelStrategy,
)

pytestmark = [pytest.mark.filterwarnings("default")]  # of other packages
EXAMPLE = Path(__file__).parent / "lightning_trainer.py"
LAST = 23


class Model(BoringModel):
    def training_step(self, batch, index):
        out = super().training_step(batch, index)
        self.log("score", out["loss"])
        return out


class Sharded(Model):
    def configure_model(self):
        if not isinstance(self.layer, torch.distributed.fsdp.FSDPModule):
            torch.distributed.fsdp.fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tierfs.init(f"file://{tmp_path}/store")
    yield f"tierfs::file://{tmp_path}/store/run"
    fsspec.url_to_fs(f"tierfs::file://{tmp_path}/store")[0].wait(f"{tmp_path}/store", timeout=60)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("tierfs:")]


def trainer(saves, epochs=1, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    batches = {"limit_train_batches": 4, "limit_val_batches": 1, "limit_test_batches": 1}
    return Trainer("cpu", max_epochs=epochs, callbacks=[saves], **{**quiet, **batches, **options})


def names(url):
    fs, path = fsspec.url_to_fs(url)
    return sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False) if name.endswith(".ckpt"))


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", "sharded", "fsdp"])
def test_killed_runs_end_like_one_that_was_not(url, tmp_path, strategy):
    whole, said, _ = trained(tmp_path, EXAMPLE, f"{url}-whole", 2, strategy)
    assert f"checkpoints go to {url}-whole; a save is done at staged" in said
    assert sorted(whole) == list(range(LAST + 1)), said
    first, said, code = trained(tmp_path, EXAMPLE, url, 2, strategy, kill=(6, signal.SIGKILL))
    assert code == -signal.SIGKILL, said
    second, said, code = trained(tmp_path, EXAMPLE, url, 2, strategy, kill=(13, signal.SIGTERM))
    assert min(second) in {4, 8}, said  # two ranks may be a step beyond the one whose line was read
    assert code == 128 + signal.SIGTERM, said
    third, said, code = trained(tmp_path, EXAMPLE, url, 1, strategy)
    assert (min(third), max(third), code) == (max(second) + 1, LAST, 0), said
    assert {**first, **second, **third} == pytest.approx(whole, rel=1e-5)


class Drawing(Model):
    """Its losses depend on the order of the data, and on dropout."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(64.0).repeat(32, 1).T / 64, shuffle=True, batch_size=8)

    def training_step(self, batch, index):
        loss = torch.nn.functional.dropout(self.layer(batch), 0.5).square().mean()
        self.losses.append(loss.item())
        return loss


def test_shuffling_and_dropout_go_on_as_if_never_stopped(url):
    torch.manual_seed(3)
    whole = Drawing()
    first = {name: value.clone() for name, value in whole.state_dict().items()}
    trainer(TierCheckpoint(f"{url}-whole"), 3, limit_train_batches=8).fit(whole)
    for epochs, begun in ((1, Drawing()), (3, Drawing())):
        begun.load_state_dict(first)
        torch.manual_seed(3 if epochs == 1 else 99)
        Drawing()  # draws what `whole` drew
        trainer(TierCheckpoint(url), epochs, limit_train_batches=8).fit(begun, ckpt_path="last")
    assert begun.losses == whole.losses[8:]


# -- what a run removes ----------------------------------------------------------------------------------------------


def test_top_k_stay_and_the_resumed_file_is_never_removed(url):
    def saves():
        return TierCheckpoint(url, monitor="score", save_top_k=2, save_last=True, every_n_epochs=1)

    trainer(saves(), 3).fit(Model())
    kept = [name for name in names(url) if name != "last.ckpt"]
    assert len(kept) == 2
    for name in kept:  # the better ones of four more epochs replace both, but for the resumed one
        trainer(saves(), 7).fit(Model(), ckpt_path=f"{url}/{name}")
        assert name in names(url)


def test_a_run_removes_nothing_of_another_run(url):
    trainer(TierCheckpoint(url)).fit(Model())
    before = names(url)
    trainer(TierCheckpoint(url), 3).fit(Model())
    assert set(before) < set(names(url))
    trainer(TierCheckpoint(f"{url}-other"), 3).fit(Model(), ckpt_path=f"{url}/{before[0]}")
    assert set(before) < set(names(url))


# -- what "last" and "best" find -------------------------------------------------------------------------------------


def test_last_is_the_newest_without_save_last(url):
    trainer(TierCheckpoint(url, every_n_train_steps=3, save_top_k=-1), 2).fit(Model())
    second = trainer(TierCheckpoint(url), 3)
    second.fit(Model(), ckpt_path="last")
    assert second.ckpt_path == f"{url}/epoch=1-step=6.ckpt"
    assert second.global_step > 6


def test_last_of_an_unreadable_store_is_an_error(url, tmp_path, monkeypatch):
    trainer(TierCheckpoint(url)).fit(Model())
    fsspec.url_to_fs(url)[0].wait(f"{tmp_path}/store", timeout=60)
    (name,) = names(url)
    again = trainer(TierCheckpoint(url), 2)
    (record,) = (path for path in (tmp_path / "store/.tierfs/tree").rglob("*") if path.name.startswith(name))
    record.write_bytes(record.read_bytes()[:40])
    with pytest.raises((CorruptionError, StoreError)):
        again.fit(Model(), ckpt_path="last")
    assert again.global_step == 0


def test_best_is_found_by_another_process(url):
    saves = TierCheckpoint(url, monitor="score", save_top_k=1, save_weights_only=True)
    trainer(saves, 3).fit(Model())
    other = trainer(TierCheckpoint(url))
    other.test(Model(), ckpt_path="best")
    assert other.ckpt_path == saves.best_model_path
    assert saves.best_model_path.startswith(url)
    Model.load_from_checkpoint(saves.best_model_path)


def test_a_sharded_run_finds_last_and_best(url):
    def run(epochs):
        return trainer(TierCheckpoint(url), epochs, strategy=TierModelParallelStrategy(1, 1), devices=1)

    try:
        run(2).fit(Sharded())
        tested = run(2)
        tested.test(Sharded(), ckpt_path="best")
        assert tested.ckpt_path == f"{url}/epoch=1-step=8.ckpt"
        resumed = run(3)
        resumed.fit(Sharded(), ckpt_path="last")
        assert resumed.global_step == 12
        assert names(url) == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]
    finally:
        torch.distributed.destroy_process_group()


def test_best_before_any_save_is_lightnings_own_error(url):
    with pytest.raises(ValueError, match="not configured to save the best model"):
        trainer(TierCheckpoint(url)).test(Model(), ckpt_path="best")


def test_other_saves_of_the_trainer_stay_where_they_are_asked_for(url, tmp_path):
    """Slurm's requeue and other callbacks save to local paths beside the plug."""
    run = trainer(TierCheckpoint(url))
    run.fit(Model())
    run.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    again = trainer(TierCheckpoint(url), 2)
    again.fit(Model(), ckpt_path=str(tmp_path / "hpc_ckpt_1.ckpt"))
    assert again.global_step == 8


# -- hooks -----------------------------------------------------------------------------------------------------------


class Hooked(Model):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["average"] = torch.full((3,), float(self.trainer.global_step))

    def on_load_checkpoint(self, checkpoint):
        self.kept["module"] = checkpoint["average"]


class ShardedHooks(Hooked, Sharded):
    pass


class Data(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.kept = None

    def train_dataloader(self):
        return BoringModel().train_dataloader()

    def state_dict(self):
        return {"at": self.trainer.global_step}

    def load_state_dict(self, state_dict):
        self.kept = state_dict["at"]


class Hooks(Callback):
    def __init__(self):
        self.kept = {}

    def state_dict(self):
        return {"saves": 7}

    def load_state_dict(self, state_dict):
        self.kept["state"] = state_dict["saves"]

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["of_callback"] = trainer.global_step

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.kept["callback"] = checkpoint["of_callback"]


class Hears(Logger):
    name = version = ""

    def __init__(self):
        super().__init__()
        self.heard = []

    def log_metrics(self, metrics, step):
        pass

    def log_hyperparams(self, *params):
        pass

    def after_save_checkpoint(self, checkpoint_callback):
        self.heard.append(checkpoint_callback.best_model_path)


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_each_hook_of_lightning_is_called_with_its_state(url, kind, caplog):
    is_sharded = kind == "sharded"
    more = {"strategy": TierModelParallelStrategy(1, 1), "devices": 1} if is_sharded else {}
    model = ShardedHooks if is_sharded else Hooked
    logs, module, data, hooks = Hears(), model(), Data(), Hooks()
    try:
        first = trainer(TierCheckpoint(url), 1, logger=logs, **more)
        first.callbacks.append(hooks)
        first.fit(module, datamodule=Data())
        more = {"strategy": TierModelParallelStrategy(1, 1), "devices": 1} if is_sharded else {}
        second = trainer(TierCheckpoint(url), 2, **more)
        second.callbacks.append(hooks)
        with caplog.at_level(logging.WARNING, "tierfs.plugs"):
            second.fit(module := model(), datamodule=data, ckpt_path="last")
    finally:
        if is_sharded:
            torch.distributed.destroy_process_group()
    assert logs.heard == [f"{url}/epoch=0-step=4.ckpt"]
    assert torch.equal(module.kept["module"], torch.full((3,), 4.0))
    assert (data.kept, hooks.kept) == (4, {"state": 7, "callback": 4})
    said = [each for each in caplog.messages if "loaded" in each]
    assert len(said) == 1
    line = rf"loaded step 4 from {re.escape(url)}/epoch=0-step=4.ckpt: at the level \w+, saved \d+ seconds ago, in \d+\.\d s"
    assert re.search(line, said[0])


# -- refusals --------------------------------------------------------------------------------------------------------


def test_local_paths_and_stock_sharded_strategies_are_refused(url):
    with pytest.raises(InvalidInputError, match="go to tierfs URLs"):
        TierCheckpoint("checkpoints")
    with pytest.raises(InvalidInputError, match="give strategy=TierModelParallelStrategy"):
        trainer(TierCheckpoint(url), strategy=ModelParallelStrategy(1, 1), devices=1).fit(Model())


# -- two runs, Fabric ------------------------------------------------------------------------------------------------


def test_two_runs_at_one_url_lose_nothing(url):
    """Each run's files are whole. A name that both take at once goes to one of them, and the other one hears of it."""
    errors = []

    def run():
        try:
            for at in range(8):
                TierCheckpointIO(ack="object").save_checkpoint({"at": at, "data": torch.ones(1000)}, f"{url}/last.ckpt")
        except ConflictError as error:
            errors.append(error)

    runs = [threading.Thread(target=run) for _ in range(2)]
    for each in runs:
        each.start()
    for each in runs:
        each.join()
    assert len(errors) < len(runs)
    assert TierCheckpointIO().load_checkpoint(f"{url}/last.ckpt")["data"].sum() == 1000


def test_fabric_saves_and_loads_one_file(url):
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[TierCheckpointIO(ack="local")])
    model, path = torch.nn.Linear(3, 3), f"{url}/fabric.ckpt"
    fabric.save(path, {"model": model, "step": 5})
    other = {"model": torch.nn.Linear(3, 3), "step": 0}
    fabric.load(path, other)
    assert other["step"] == 5
    assert torch.equal(other["model"].weight, model.weight)


def test_fabric_saves_and_loads_sharded_models(url):
    def parallelize(model, mesh):
        return torch.distributed.fsdp.fully_shard(model, mesh=mesh["data_parallel"])

    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricModelParallelStrategy(parallelize, 1, 1))
    fabric.launch()
    try:
        states = []
        for step in (5, 0):
            model = fabric.setup_module(torch.nn.Linear(3, 3))
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            states.append({"model": model, "optimizer": optimizer, "step": step})
        fabric.save(f"{url}/sharded", states[0])
        assert fabric.load(f"{url}/sharded", states[1]) == {}
        assert states[1]["step"] == 5
        for name, value in states[0]["model"].state_dict().items():
            assert torch.equal(states[1]["model"].state_dict()[name].full_tensor(), value.full_tensor())
        with pytest.raises(InvalidInputError, match="has no epoch"):
            fabric.load(f"{url}/sharded", {**states[1], "epoch": 0})
    finally:
        torch.distributed.destroy_process_group()
