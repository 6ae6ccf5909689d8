"""Seconds for which a save blocks Hugging Face's Trainer: its own save to a local disk and to s3fs, and `TierCallback`.

``python integration/bench/plug_saves.py`` takes two minutes. ``--layers 2`` makes a smaller model. The save to s3fs is the
Trainer's own save, which a callback then copies to a bucket. All save the same steps of the same model in turn.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import s3fs
import torch
from harness import Aims, parser, say
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import tierfs
from tierfs.plugs.huggingface import TierCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
import s3server

STEPS, SAVES = 14, (6, 8, 10, 12, 14)
"""The first saves, at steps 2 and 4, make the memory of the two copies that may be in flight, and are left out."""


class Upload(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Copies each checkpoint to a bucket, as programs do that keep the Trainer's own saves there."""

    def __init__(self, fs: Any, bucket: str) -> None:
        self._fs, self._bucket = fs, bucket

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        name = f"checkpoint-{state.global_step}"
        self._fs.put(f"{args.output_dir}/{name}", f"{self._bucket}/{name}", recursive=True)


def blocked(folder: Path, layers: int, width: int, pause_s: float, callbacks: list[Any]) -> tuple[float, int]:
    """Train, and return the median seconds of a save and the bytes of the state."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": width,
        "intermediate_size": width * 43 // 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, **sizes))
    data = [{"input_ids": each, "labels": each} for each in torch.randint(8192, (STEPS, 16))]
    once = {"max_steps": STEPS, "save_steps": 2, "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(str(folder), per_device_train_batch_size=1, use_cpu=True, save_total_limit=2, **once)
    trainer = Trainer(model, args, train_dataset=data, callbacks=callbacks)
    after_step, took_s = trainer._maybe_log_save_evaluate, dict[int, float]()

    def timed(*given: Any, **named: Any) -> None:
        begun = time.perf_counter()
        after_step(*given, **named)
        step = trainer.state.global_step
        took_s[step] = took_s.get(step, 0.0) + time.perf_counter() - begun
        time.sleep(pause_s)  # training goes on; a save in the background ends

    trainer._maybe_log_save_evaluate = timed
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints its figures
        trainer.train()
    return statistics.median(took_s[step] for step in SAVES), 3 * sum(each.nbytes for each in model.parameters())


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--layers", type=int, default=4, help="layers of the model, of 3 million parameters each at the default width"
    )
    arguments.add_argument("--width", type=int, default=512, help="width of the model")
    arguments.add_argument("--pause", type=float, default=1.0, help="seconds of training after each step")
    given = arguments.parse_args()
    size = given.layers, given.width, given.pause
    aims = Aims()
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir=given.directory) as directory:
        base = Path(directory)
        os.environ["TIERFS_STATE_DIR"] = str(base / "state")
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed, if it is installed, would print that it chose this
        tierfs.init(f"file://{base}/store")
        with s3server.running() as port:
            fs, bucket = s3fs.S3FileSystem(**s3server.options(port)), s3server.new_bucket(port)
            local_s, length = blocked(base / "local", *size, [])
            ours_s, _ = blocked(base / "ours", *size, [TierCallback(f"tierfs::file://{base}/store/run")])
            s3_s, _ = blocked(base / "s3", *size, [Upload(fs, bucket)])
    aims.at_most("blocked by TierCallback, of the local disk", ours_s / local_s, 0.3)
    seconds = {"local disk": local_s, "s3fs": s3_s, "TierCallback": ours_s}
    say({"MiB": length / 2**20, "seconds blocked": seconds, "aims": aims.found}, as_json=given.json)
    return int(not all(each["holds"] for each in aims.found))


if __name__ == "__main__":
    sys.exit(main())
