"""Train a small Llama with its checkpoints in a store: ``torchrun --nproc-per-node=2 huggingface_trainer.py URL``.

Make the store once with ``tierfs init``. Kill the program at any time, and start it again on any number of ranks: it
goes on at its newest checkpoint.
"""

import json
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tierfs.plugs.huggingface import TierCallback


class Loss(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        time.sleep(0.2)  # as if the model were larger
        if state.is_world_process_zero and "loss" in logs:
            print("step", state.global_step, "loss", logs["loss"], flush=True)


url, more = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
data = [{"input_ids": each, "labels": each} for each in torch.randint(128, (40, 16))]
often = {"save_steps": 4, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
args = TrainingArguments("out", max_steps=24, per_device_train_batch_size=2, use_cpu=True, **often, **more)
args.gradient_accumulation_steps = 4 // args.world_size  # a step has eight samples on any number of ranks
trainer = Trainer(model, args, train_dataset=data, callbacks=[TierCallback(url), Loss()])
trainer.train()
print("DONE")
