"""What others keep beside a checkpoint of `Trainer`: methods of a trainer's class, and callbacks."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed: docs/how-to/integration-tests.md")

import fsspec
from hooks_trainer import Net
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from tierfs.errors import FormatError, InvalidInputError
from tierfs.plugs.huggingface import TierCallback
from tierfs.plugs.scratch import Scratch
from tierfs.train import Manager
from tierfs.train.run import About
from tierfs.train.state import Wanted

pytestmark = [pytest.mark.filterwarnings("default")]  # of other packages
EXAMPLE = Path(__file__).parent / "hooks_trainer.py"


class Counting(Trainer):
    """Keeps a number beside its checkpoints, as TRL's trainers do with the state of their rollouts."""

    samples = 0

    def training_step(self, *args, **kwargs):
        self.samples += 8
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        (folder / "samples.json").write_text(json.dumps(self.samples))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.samples = json.loads(Path(resume_from_checkpoint, "samples.json").read_text())


class Listening(TrainerCallback):
    """Notes what lies in each checkpoint, and leaves a file there."""

    def __init__(self):
        self.saves = []

    def on_save(self, args, state, control, **_):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.saves.append((state.global_step, sorted(each.name for each in folder.iterdir() if each.name[0] != ".")))
        (folder / "sub" / "deep").mkdir(parents=True)
        (folder / "sub" / "deep" / "note").write_bytes(b"")
        (folder / "sub" / "random.bin").write_bytes(bytes(range(256)) * 5000)


def trainer_of(tmp_path, callbacks, *, kind=Counting, model=None, **more):
    torch.manual_seed(0)
    data = [{"x": torch.ones(4) * each, "labels": torch.tensor(float(each))} for each in range(64)]
    settings = {"save_steps": 4, "max_steps": 8, "report_to": [], "disable_tqdm": True, **more}
    args = TrainingArguments(str(tmp_path / "out"), per_device_train_batch_size=4, use_cpu=True, **settings)
    return kind(model or Net(), args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def left_in(tmp_path):
    return list((tmp_path / "out").iterdir())


def test_a_class_and_callbacks_see_what_trainer_shows_them(tmp_path, url):
    outcomes = {}
    for name in ("plain", "tierfs"):
        for steps in (8, 16):
            heard = Listening()
            callbacks = [heard, TierCallback(url)] if name == "tierfs" else [heard]
            trainer = trainer_of(tmp_path / name, callbacks, max_steps=steps)
            trainer.train(resume_from_checkpoint=True if name == "plain" and steps == 16 else None)
            outcomes[name, steps] = trainer.samples, [step for step, _ in heard.saves], trainer.model.layer.weight
            assert all({"samples.json", "trainer_state.json"} <= set(files) for _, files in heard.saves)
    for steps in (8, 16):
        assert outcomes["plain", steps][:2] == outcomes["tierfs", steps][:2]
        assert torch.equal(outcomes["plain", steps][2], outcomes["tierfs", steps][2])
    assert outcomes["tierfs", 16][:2] == (128, [12, 16])
    assert not left_in(tmp_path / "tierfs")


def test_only_what_others_write_goes_through_the_disk(tmp_path, url):
    heard = Listening()
    trainer_of(tmp_path, [heard, TierCallback(url)]).train()
    assert heard.saves == [(step, ["samples.json", "trainer_state.json"]) for step in (4, 8)]
    with Manager(url, save=()) as manager:
        restored = manager.restore({}, only=["hook_files.*"])
        names = {each for each in restored.not_loaded if each.startswith("hook_files.")}
        assert names == {"hook_files.samples.json", "hook_files.sub/deep/note", "hook_files.sub/random.bin"}


def test_files_of_all_hooks_come_back_byte_for_byte(tmp_path, url):
    seen = {}

    class Looks(Counting):
        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            folder = Path(resume_from_checkpoint)
            seen["weight"] = self.model.layer.weight.clone()
            seen["state"] = json.loads((folder / "trainer_state.json").read_text())["global_step"]
            seen["name"] = folder.name
            seen.update({each: (folder / each).read_bytes() for each in ("sub/random.bin", "sub/deep/note")})

    first = trainer_of(tmp_path, [Listening(), TierCallback(url)], kind=Looks)
    first.train()
    trainer_of(tmp_path, [TierCallback(url)], kind=Looks, max_steps=12).train()
    assert torch.equal(seen.pop("weight"), first.model.layer.weight), "its super() loads the weights"
    files = {"sub/random.bin": bytes(range(256)) * 5000, "sub/deep/note": b""}
    assert seen == {"state": 8, "name": "checkpoint-8", **files}


def test_each_part_of_a_save_can_be_overridden(tmp_path, url):
    calls = []

    class Parts(Trainer):
        def save_model(self, output_dir=None, _internal_call=False):
            calls.append("model")
            super().save_model(output_dir, _internal_call)

        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            Path(output_dir).mkdir(exist_ok=True)
            Path(output_dir, "projector").write_text("p")

        def _save_optimizer_and_scheduler(self, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)
            Path(output_dir, "second").write_text("o")

        def _save_rng_state(self, output_dir):
            super()._save_rng_state(output_dir)
            Path(output_dir, "dice").write_text("r")

        def _save_scaler(self, output_dir):
            super()._save_scaler(output_dir)
            Path(output_dir, "scale").write_text("s")

        def _load_scaler(self, checkpoint):
            super()._load_scaler(checkpoint)
            if checkpoint is not None:
                calls.append(Path(checkpoint, "scale").read_text())

        def _load_optimizer_and_scheduler(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                calls.append(Path(checkpoint, "second").read_text() + Path(checkpoint, "projector").read_text())

        def _load_rng_state(self, checkpoint):
            super()._load_rng_state(checkpoint)
            calls.append(Path(checkpoint, "dice").read_text())

    heard = Listening()
    trainer = trainer_of(tmp_path, [heard, TierCallback(url)], kind=Parts)
    trainer.train()
    assert heard.saves[0][1] == ["dice", "projector", "scale", "second", "trainer_state.json"]
    trainer_of(tmp_path, [TierCallback(url)], kind=Parts, max_steps=12).train()
    assert calls == ["model", "model", "op", "s", "r", "model"]
    trainer.save_model(str(tmp_path / "model"))  # what the user asks for is written
    assert {"model.safetensors", "projector"} <= {each.name for each in (tmp_path / "model").iterdir()}


def test_an_override_may_save_a_whole_model_of_its_own(tmp_path, url):
    class Merges(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            self.save_model(str(folder / "merged"))

    heard = Listening()
    trainer_of(tmp_path, [heard, TierCallback(url)], kind=Merges).train()
    assert heard.saves[0][1] == ["merged", "trainer_state.json"]
    with Manager(url, save=()) as manager:
        assert "hook_files.merged/model.safetensors" in manager.restore({}, only=["hook_files.*"]).not_loaded


def test_other_callbacks_may_ask_for_a_save(tmp_path, url):
    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save |= state.global_step == 3

        def on_log(self, args, state, control, **_):
            control.should_save |= state.global_step == 5

        def on_evaluate(self, args, state, control, **_):
            control.should_save |= state.global_step == 6

    more = {"logging_steps": 5, "eval_strategy": "steps", "eval_steps": 6}
    heard = Listening()
    trainer_of(tmp_path, [heard, TierCallback(url, save=[]), Asks()], **more).train()
    assert [step for step, _ in heard.saves] == [3, 5, 6, 8]
    with Manager(url, save=()) as manager:
        assert [each.step for each in manager.checkpoints] == [3, 5, 6, 8]


class Stateful(TrainerCallback, ExportableState):
    """Counts the steps that it heard of, and has a state for `Trainer`."""

    def __init__(self, heard=0):
        self.heard = heard

    def on_step_end(self, *_, **__):
        self.heard += 1

    def state(self):
        return {"args": {"heard": self.heard}, "attributes": {}}


def test_a_callbacks_own_state_comes_back(tmp_path, url):
    for steps in (8, 12):
        more = {"max_steps": steps, "restore_callback_states_from_checkpoint": True}
        trainer = trainer_of(tmp_path, [Stateful(), TierCallback(url)], **more)
        trainer.train()
    (found,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, Stateful)]
    assert found.heard == 12


def test_uploads_to_the_hub_at_each_save_are_refused(tmp_path, url):
    trainer = trainer_of(tmp_path, [])
    trainer.args.push_to_hub, trainer.args.hub_strategy = True, "every_save"
    with pytest.raises(InvalidInputError, match="hub_strategy='end'"):
        TierCallback(url).attach(trainer)


def test_what_a_hook_raises_ends_the_training(tmp_path, url):
    class Fails(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            raise LookupError("no rollouts")

    with pytest.raises(LookupError, match="no rollouts"):
        trainer_of(tmp_path, [TierCallback(url)], kind=Fails).train()
    assert not left_in(tmp_path)


def test_a_killed_process_leaves_nothing_that_counts(tmp_path, url):
    class Dies(Counting):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            if self.state.global_step == 8:
                os._exit(9)

    if (pid := os.fork()) == 0:
        try:
            trainer_of(tmp_path, [TierCallback(url)], kind=Dies).train()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert [each.name for each in left_in(tmp_path)] == ["checkpoint-8"]
    trainer = trainer_of(tmp_path, [TierCallback(url)])
    trainer.train()
    assert trainer.samples == 64
    assert not left_in(tmp_path)


def test_a_checkpoint_of_the_user_is_not_touched(tmp_path, url):
    plain = trainer_of(tmp_path, [])
    plain.train()
    with pytest.raises(InvalidInputError, match="checkpoint-8 is there"):
        trainer_of(tmp_path, [TierCallback(url)]).train(str(tmp_path / "out" / "checkpoint-4"))
    resumed = trainer_of(tmp_path, [TierCallback(url)], max_steps=12)
    resumed.train(str(tmp_path / "out" / "checkpoint-8"))
    assert resumed.samples == 96
    assert {each.name for each in left_in(tmp_path)} == {"checkpoint-4", "checkpoint-8"}


def test_a_step_with_damaged_files_is_passed_over(tmp_path, url):
    trainer_of(tmp_path, [Listening(), TierCallback(url, ack="object", ram="0", nvme="0")]).train()
    fs, path = fsspec.url_to_fs(url)
    for name in fs.ls(f"{path}/step_8", detail=False):
        if name.endswith(".safetensors"):
            fs.rm(name)
    resumed = trainer_of(tmp_path, [TierCallback(url)], max_steps=12)
    resumed.train()
    assert resumed.samples == 96


def test_a_trainers_own_attributes_keep_their_values(tmp_path, url):
    trainers = [trainer_of(tmp_path / name, [], kind=Counting) for name in ("plain", "tierfs")]
    TierCallback(url).attach(trainers[1])
    for each in trainers:
        each.train()
    more = vars(trainers[1]).keys() - vars(trainers[0]).keys()
    assert not [name for name in more if not name.startswith("tierfs")], "TRL's trainers have a `_step`, for example"


def test_methods_set_on_the_object_are_refused(tmp_path, url):
    trainer = trainer_of(tmp_path, [])
    trainer._save_checkpoint = lambda *_: None
    with pytest.raises(InvalidInputError, match="override it in its class"):
        TierCallback(url).attach(trainer)


@pytest.mark.parametrize("best", [False, True], ids=["latest", "best"])
def test_the_total_limit_holds_after_resumes_too(tmp_path, url, best):
    more = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    more |= {"greater_is_better": True}
    for steps in (8, 16):
        callback = TierCallback(url, ack="object")
        limits = {"save_steps": 2, "save_total_limit": 3, **(more if best else {})}
        trainer_of(tmp_path, [callback], kind=Trainer, max_steps=steps, **limits).train()
        with Manager(url, save=()) as manager:
            kept = [each.step for each in manager.checkpoints]
        assert len(kept) == 3
        assert kept[-1] == steps


def test_the_best_model_is_loaded_without_the_files_of_its_step(tmp_path, url, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = []

    class Best(Counting):
        def _load_best_model(self):
            super()._load_best_model()
            loaded.append(self.state.best_global_step)

    more = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = trainer_of(tmp_path, [TierCallback(url)], kind=Best, greater_is_better=True, **more)
    trainer.train()
    assert loaded == [4]
    assert {each.name for each in tmp_path.iterdir()} == {"out", "store"}
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


def test_files_of_all_ranks_come_back(tmp_path, url):
    said = []
    for ranks, steps in ((2, 4), (2, 8), (1, 12)):
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, "-W", "ignore", *run, str(EXAMPLE), url, str(steps)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert ("is not restored exactly" in done.stderr) is (ranks == 1), done.stderr  # others saved it
        said.append(sorted(line for line in done.stdout.splitlines() if line.startswith("rank")))
    both = "['samples-0.json', 'samples-1.json']"
    assert said == [
        ["rank 0 samples 4", "rank 1 samples 8"],
        [f"rank 0 loaded 4 of {both}", "rank 0 samples 8", f"rank 1 loaded 8 of {both}", "rank 1 samples 16"],
        [f"rank 0 loaded 8 of {both}", "rank 0 samples 12"],
    ]
    assert not left_in(tmp_path)


def test_a_resume_says_step_level_age_and_time(tmp_path, url, caplog):
    trainer_of(tmp_path, [TierCallback(url, ack="object")]).train()
    with caplog.at_level(logging.WARNING, "tierfs.plugs"):
        trainer_of(tmp_path, [TierCallback(url)], max_steps=9).train()
    line = rf"loaded step 8 from {re.escape(url)}: at the level object, saved \d+ seconds ago, in \d+\.\d s"
    assert len([each for each in caplog.messages if re.search(line, each)]) == 1


def test_names_of_files_that_leave_the_directory_are_refused():
    for name in ("../evil", "/etc/evil", "a/../../evil", "a//b", "."):
        scratch = Scratch()
        scratch.make()
        about = About(step=1, state={"hook_files": {name: 4}})
        try:
            with pytest.raises(FormatError, match="leaves its directory"):
                scratch.to_load(Wanted("full", about, [], []))
        finally:
            scratch.remove()


def test_two_trainings_do_not_share_the_files_of_their_hooks(tmp_path):
    one, other = Scratch(), Scratch()
    one.make(str(tmp_path), "checkpoint-4")
    with pytest.raises(InvalidInputError, match="checkpoint-4 is there"):
        other.make(str(tmp_path), "checkpoint-4")
    one.take()
    shutil.rmtree(one.path)  # as another training does when it begins
    other.make(str(tmp_path), "checkpoint-4")
    with pytest.raises(InvalidInputError, match="was used by another training"):
        one.take()
