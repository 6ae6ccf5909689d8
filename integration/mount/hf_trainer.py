"""Train a tiny model with transformers' Trainer, from its newest checkpoint if any: python hf_trainer.py OUTPUT_DIR."""

import os
import sys
import time

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

STEPS = 12


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 8) % 64
        return {"input_ids": ids, "labels": ids}


class Wait(transformers.TrainerCallback):
    """Waits for a kill once the checkpoint of a step is whole."""

    def on_save(self, args, state, control, **_):
        if [str(state.global_step)] == sys.argv[2:]:
            time.sleep(600)


if __name__ == "__main__":
    output = sys.argv[1]
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    torch.manual_seed(1)
    arguments = transformers.TrainingArguments(
        output_dir=output,
        max_steps=STEPS,
        save_steps=2,
        save_total_limit=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=Numbers(), callbacks=[Wait()]
    )
    last = get_last_checkpoint(output) if os.path.isdir(output) else None
    print("from", os.path.basename(last) if last else None, flush=True)
    trainer.train(resume_from_checkpoint=last)
    print("done", trainer.state.global_step, flush=True)
