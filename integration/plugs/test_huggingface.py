"""`Trainer` with `TierCallback`: a killed training goes on at its newest checkpoint, and nothing is written elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed: docs/how-to/integration-tests.md")

import fsspec
from accelerate import Accelerator
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tierfs.errors import InvalidInputError, NotFoundError, TierfsError
from tierfs.plugs.huggingface import TierCallback, attach, from_pretrained, save_pretrained
from tierfs.train import Every, Latest, Manager

pytestmark = [pytest.mark.filterwarnings("default")]  # of other packages
EXAMPLE = Path(__file__).parent / "huggingface_trainer.py"
DEADLINE_S = 200


# -- processes -------------------------------------------------------------------------------------------------------


def end(pid, number, *, is_torchrun):
    """Send a signal to a group. torchrun passes SIGTERM on to its workers, which have groups of their own."""
    groups = [pid]
    if is_torchrun and number == signal.SIGKILL:
        groups += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for group in groups:
        os.killpg(group, number)


def losses_of(directory, url, *, ranks, kill=None):
    """Run the example, and return its losses by step and the rest of what it said.

    Args:
        directory: Working directory.
        url: Of the run.
        ranks: Their number.
        kill: A step and a signal: the whole group gets the signal after the step.
    """
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *run, str(EXAMPLE), url]
    losses, said = {}, []
    with subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        watch = subprocess.Popen(["sh", "-c", f"sleep {DEADLINE_S}; kill -9 -{running.pid}"], start_new_session=True)
        for line in running.stdout:
            said.append(line)
            if match := re.match(r"step (\d+) loss (\S+)", line):
                losses[int(match[1])] = float(match[2])
                if kill is not None and int(match[1]) == kill[0]:
                    end(running.pid, kill[1], is_torchrun=ranks > 1)
        os.killpg(watch.pid, signal.SIGKILL)
        watch.wait()
    text = "".join(said)
    assert ("DONE" in text) == (kill is None), text
    return losses, text


def first_of(url):
    """The step of the newest complete checkpoint."""
    with Manager(url, save=()) as manager:
        return manager.latest()


def test_a_killed_training_resumes_bit_for_bit(tmp_path, url):
    """With DDP: Accelerate does not shard on CPUs."""
    whole, _ = losses_of(tmp_path, f"{url}-whole", ranks=2)
    begun, _ = losses_of(tmp_path, url, ranks=2, kill=(18, signal.SIGKILL))
    newest = first_of(url)
    assert newest % 4 == 0, "a save that was killed is no checkpoint"
    resumed, said = losses_of(tmp_path, url, ranks=2)
    assert f"resumed at step {newest}" in said
    assert list(resumed) == list(range(newest + 1, 25))
    assert whole == begun | resumed
    assert not [each for each in tmp_path.rglob("*") if "tierfs:" in each.name]
    assert not list((tmp_path / "out").iterdir())


def test_sigterm_saves_at_one_step_and_other_ranks_go_on(tmp_path, url):
    whole, _ = losses_of(tmp_path, f"{url}-whole", ranks=1)
    begun, said = losses_of(tmp_path, url, ranks=2, kill=(10, signal.SIGTERM))
    step = int(re.search(r"training ends at step (\d+) because of SIGTERM", said)[1])
    assert first_of(url) == step
    resumed, said = losses_of(tmp_path, url, ranks=1)
    assert f"resumed at step {step}" in said
    assert begun | resumed == pytest.approx(whole, rel=1e-4)  # the order of sums differs


# -- one process -------------------------------------------------------------------------------------------------------


class Losses(TrainerCallback):
    """Notes each logged loss, and stops the training after a step."""

    def __init__(self, stop):
        self.stop, self.found = stop, {}

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.found[state.global_step] = logs["loss"]

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.stop:
            raise KeyboardInterrupt


class Interrupting(TrainerCallback):
    """Lets another program run in the middle of a training."""

    def __init__(self, program):
        self.program = program

    def on_train_begin(self, *_, **__):
        self.program()


def trainer_at(tmp_path, callback, *, stop=0, model=None, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, attention_dropout=0.1, tie_word_embeddings=True, **sizes)
    model = (model or (lambda each: each))(LlamaForCausalLM(config))
    data = [{"input_ids": each, "labels": each} for each in torch.randint(64, (22, 8))]
    settings = {"max_steps": 12, "save_steps": 3, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path / "out"), per_device_train_batch_size=2, use_cpu=True, **{**settings, **more})
    losses = Losses(stop)
    callbacks = [*callback, losses] if isinstance(callback, list) else [callback, losses]
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)
    trainer.losses = losses.found
    return trainer


def trained(*args, stop=0, resume=None, **more):
    trainer = trainer_at(*args, stop=stop, **more)
    if stop:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(resume)
    else:
        trainer.train(resume)
    return trainer


def parameters(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def adapted(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))


EVERY_EPOCH = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch", "eval_strategy": "epoch"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 2, "save_steps": 4},
        {"dataloader_num_workers": 2},
        {"model": adapted},
        {**EVERY_EPOCH, "gradient_accumulation_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 4},
    ],
    ids=["plain", "accumulation", "workers", "lora", "epochs", "evaluation"],
)
def test_a_training_that_stops_resumes_exactly(tmp_path, url, more):
    whole = trained(tmp_path, TierCallback(f"{url}-whole"), **more)
    begun = trained(tmp_path, TierCallback(url), stop=8, **more)
    resumed = trained(tmp_path, TierCallback(url), **more)
    assert 0 < min(resumed.losses) < 9
    assert whole.losses == begun.losses | resumed.losses
    torch.testing.assert_close(parameters(resumed.model), parameters(whole.model), rtol=0, atol=0)
    assert whole.state.log_history[-2]["epoch"] == resumed.state.log_history[-2]["epoch"]
    assert not list((tmp_path / "out").iterdir())


def test_the_best_step_outlives_rotation_and_is_loaded(tmp_path, url):
    more = {"eval_strategy": "steps", "eval_steps": 3, "learning_rate": 0.3, "load_best_model_at_end": True}
    rotation = {"metric_for_best_model": "loss", "save_total_limit": 1}
    trainer = trained(tmp_path, TierCallback(url), **more, **rotation)
    evaluated = {each["step"]: each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each}
    best = min(evaluated, key=evaluated.get)
    assert trainer.state.best_model_checkpoint == f"{url}/step_{best}"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated[best])
    with Manager(url, save=()) as manager:
        kept = {each.step for each in manager.checkpoints}
    assert {best, 12} <= kept
    assert kept != {3, 6, 9, 12}, "of the others, at most the newest in the object tier stays"


def test_a_damaged_step_is_passed_over(tmp_path, url):
    whole = trained(tmp_path, TierCallback(url, ack="object", ram="0", nvme="0"))
    fs, path = fsspec.url_to_fs(url)
    shard = next(name for name in fs.ls(f"{path}/step_12", detail=False) if name.endswith(".safetensors"))
    fs.rm(shard)
    resumed = trained(tmp_path, TierCallback(url))
    assert list(resumed.losses) == [10, 11, 12]
    torch.testing.assert_close(parameters(resumed.model), parameters(whole.model), rtol=0, atol=0)


def test_a_step_can_be_given(tmp_path, url):
    whole = trained(tmp_path, TierCallback(url))
    for given in (6, f"{url}/step_6", "checkpoint-6"):
        assert list(trained(tmp_path, TierCallback(url), resume=given).losses) == list(range(7, 13))
    assert trained(tmp_path, TierCallback(url), resume=True).losses == {}, "the last run ended"
    for given, error in ((99, NotFoundError), ("here", InvalidInputError), (False, InvalidInputError)):
        with pytest.raises(error):
            trained(tmp_path, TierCallback(url), resume=given)
    with pytest.raises(NotFoundError, match="no complete checkpoint"):
        trained(tmp_path, TierCallback(f"{url}-new"), resume=True)
    assert set(whole.losses) == set(range(1, 13))


def test_a_local_checkpoint_of_the_trainer_can_be_continued(tmp_path, url):
    plain = trained(tmp_path, [], max_steps=12)
    resumed = trained(tmp_path, TierCallback(url), resume=str(tmp_path / "out" / "checkpoint-6"))
    assert resumed.losses == {step: plain.losses[step] for step in range(7, 13)}
    assert first_of(url) == 12


def test_contradictions_are_refused(tmp_path, url):
    callback = TierCallback(url)
    for callbacks, more in (([callback, TierCallback(url)], {}), (callback, {"save_only_model": True})):
        with pytest.raises(InvalidInputError):
            trainer_at(tmp_path, callbacks, **more)
    late = trainer_at(tmp_path, [])
    late.add_callback(TierCallback(url))
    with pytest.raises(InvalidInputError, match="attach"):
        late.train()


def test_a_second_run_at_the_url_replaces_nothing(tmp_path, url):
    second = trainer_at(tmp_path, TierCallback(url), seed=7)
    second.add_callback(Interrupting(lambda: trained(tmp_path, TierCallback(url, keep=[Latest(9)]))))
    with pytest.raises(TierfsError, match="already exists"):
        second.train()
    whole = trained(tmp_path, TierCallback(f"{url}-whole"))
    resumed = trained(tmp_path, TierCallback(url), resume=6)
    torch.testing.assert_close(parameters(resumed.model), parameters(whole.model), rtol=0, atol=0)


def test_policies_and_other_callbacks_decide_when_to_save(tmp_path, url):
    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save |= state.global_step == 4

    trained(tmp_path, [TierCallback(url, save=[Every(steps=5)]), Asks()])
    with Manager(url, save=()) as manager:
        assert [each.step for each in manager.checkpoints] == [4, 5, 10, 12]


@pytest.mark.parametrize("model", [None, adapted], ids=["plain", "lora"])
def test_from_pretrained_reads_a_checkpoint_and_a_copy_of_it(tmp_path, url, model):
    trainer = trained(tmp_path, TierCallback(url, ack="object"), model=model)
    copy = tmp_path / "copy"
    subprocess.run([sys.executable, "-m", "tierfs.cli", "materialize", f"{url}/step_12", str(copy)], check=True)
    ids = torch.arange(8)[None]
    trainer.model.eval()
    wanted = trainer.model(input_ids=ids).logits
    if model is None:
        loaded = [AutoModelForCausalLM.from_pretrained(copy), from_pretrained(AutoModelForCausalLM, f"{url}/step_12")]
        save_pretrained(loaded[0], f"{url}-model")
        loaded.append(from_pretrained(AutoModelForCausalLM, f"{url}-model"))
    else:
        import peft

        base = [trainer_at(tmp_path, []).model for _ in range(2)]
        loaded = [peft.PeftModel.from_pretrained(base[0], str(copy))]
    for each in loaded:
        torch.testing.assert_close(each.eval()(input_ids=ids).logits, wanted, rtol=0, atol=0)


# -- Accelerate --------------------------------------------------------------------------------------------------------


def accelerated():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8)), 4, shuffle=True)
    accelerator = Accelerator(cpu=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def an_epoch(accelerator, model, optimizer, scheduler, loader):
    losses = []
    for (batch,) in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    scheduler.step()
    return losses


def test_an_accelerator_loads_all_of_its_state(tmp_path, url, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = accelerated()
    with attach(first[0], url) as manager:
        an_epoch(*first)
        assert first[0].save_state() == f"{url}/step_0"
        second = an_epoch(*first)
        first[0].save_state(7)
        third = an_epoch(*first)
        other = accelerated()
        attach(other[0], url)
        other[0].load_state("step_0")
        assert an_epoch(*other) == second
        assert other[0].load_state() == 7
        assert an_epoch(*other) == third
        assert other[0].save_iteration == 8
        parts = {"model": first[1], "optimizer": first[2].optimizer}
        manager.save(9, parts).wait()
        with pytest.raises(Exception, match="Missing key"):  # for example the random states
            other[0].load_state()
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
