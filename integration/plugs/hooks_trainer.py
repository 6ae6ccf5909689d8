"""Train with a class, callbacks and ranks that keep files of their own: ``hooks_trainer.py URL STEPS``. For torchrun."""

import json
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tierfs.plugs.huggingface import TierCallback


def say(line):
    sys.stdout.write(f"{line}\n")  # at once, where ranks share a pipe
    sys.stdout.flush()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x=None, labels=None):
        found = self.layer(x).squeeze(-1)
        return {"loss": ((found - labels) ** 2).mean(), "logits": found}


class Counting(Trainer):
    """Counts samples beside the checkpoint, one file a rank."""

    samples = 0

    def training_step(self, *args, **kwargs):
        self.samples += 1 + self.args.process_index
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        (folder / f"samples-{self.args.process_index}.json").write_text(json.dumps(self.samples))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        names = sorted(each.name for each in Path(resume_from_checkpoint).glob("samples-*"))
        mine = Path(resume_from_checkpoint, f"samples-{self.args.process_index}.json")
        self.samples = json.loads(mine.read_text()) if mine.exists() else 0
        say(f"rank {self.args.process_index} loaded {self.samples} of {names}")


class Writes(TrainerCallback):
    def on_save(self, args, state, control, **_):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if args.process_index == 0:
            say(f"saved {sorted(each.name for each in folder.glob('*.json'))}")


if __name__ == "__main__":
    url, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    data = [{"x": torch.ones(4) * each, "labels": torch.tensor(float(each))} for each in range(64)]
    args = TrainingArguments(
        "out",
        save_steps=4,
        max_steps=steps,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Counting(Net(), args, train_dataset=data, callbacks=[TierCallback(url), Writes()])
    trainer.train()
    say(f"rank {args.process_index} samples {trainer.samples}")
