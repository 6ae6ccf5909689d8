"""The log of gradients: its share of a training step, its bytes, and the time to make steps again.

    python integration/bench/replay.py [--params 10M] [--steps 30] [--directory DIR] [--json]

The model of the demo learns bytes with AdamW. A training without a manager and one with `Replay` make their steps in
turn. ``share`` is the median, over the steps, of the time that a step takes longer than the plain one beside it.
``hook`` and ``manager.step`` are the parts of this time, and ``cpu share`` is their processor time, which a busy machine
blurs less. Then a training calls ``torch.distributed.checkpoint.async_save`` after each step. It runs alone, because a
save goes on beside the next step. A last run publishes its log with all codecs, once with gradients in bf16, and counts
the bytes of its objects.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from harness import SEED, Aims, machine, parser, private_slabs, say

import tierfs
from tierfs.demo.model import ByteGPT, ByteStream, shape_for, standard_library_text
from tierfs.train import Manager, Replay, TrainState
from tierfs.units import parse_size

WARM = 3
STORED_STEPS = 6


class Training:
    """A training of the demo's model."""

    def __init__(self, size: int, text: bytes, *, batch: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(SEED)
        self.model = ByteGPT(shape_for(size)).to(dtype)
        self.count = sum(each.numel() for each in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.stream = ByteStream(text, batch=batch, context=self.model.shape.context, rank=0, world_size=1, seed=SEED)
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, scheduler=None, dataloader=None, extra={"data": self.stream}
        )

    def step(self) -> float:
        """Make a step. Return its seconds."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(*self.stream.next_batch()))
        self.optimizer.step()
        return time.perf_counter() - begun


def saved_each_step(training: Training, directory: Path) -> Iterator[float]:
    """Make steps, and save after each one with torch's asynchronous save. Yield the seconds of each."""
    future: Any = None
    number = 0
    while True:
        took = training.step()
        begun = time.perf_counter()
        if future is not None:
            future.result()
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        future = dcp.async_save(state, checkpoint_id=directory / str(number % 2))
        number += 1
        yield took + time.perf_counter() - begun


def cost(base: Path, size: int, steps: int, batch: int, text: bytes) -> tuple[dict[str, Any], str, int]:
    """Measure the share of a step. Return figures, the URL of the run, and its last step."""
    url = f"tierfs::file://{base}/store/cost"
    plain, logged = (Training(size, text, batch=batch) for _ in range(2))
    options: dict[str, Any] = {"ram": size * 10 * (steps + WARM + 2) + size * 40 + (128 << 20), "nvme": "0"}
    took: dict[str, list[float]] = {name: [] for name in ("plain", "logged", "hook", "manager.step", "cpu share")}
    hooks: list[tuple[float, float]] = []
    logged.optimizer.register_step_pre_hook(lambda *_: hooks.append((time.perf_counter(), time.process_time())))
    with Manager(url, save=[Replay(ring=size * 10 * (steps + WARM + 2))], **options) as run:
        for step in range(steps + WARM):
            begun_cpu = time.process_time()
            alone = plain.step()
            alone_cpu = time.process_time() - begun_cpu
            begun = time.perf_counter()
            logged.step()
            between, between_cpu = time.perf_counter(), time.process_time()
            run.step(step, logged.state)
            ended, ended_cpu = time.perf_counter(), time.process_time()
            if step == 0:
                logged.optimizer.register_step_pre_hook(
                    lambda *_: hooks.append((time.perf_counter(), time.process_time()))
                )
                run.wait()
            if step >= WARM:
                took["plain"].append(alone)
                took["logged"].append(ended - begun)
                took["hook"].append(hooks[-1][0] - hooks[-2][0])
                cpu = ended_cpu - between_cpu + hooks[-1][1] - hooks[-2][1]
                took["cpu share"].append(cpu / alone_cpu)
                took["manager.step"].append(ended - between)
    each_saved = saved_each_step(Training(size, text, batch=batch), base / "async")
    saved_s = statistics.median([next(each_saved) for _ in range(steps + WARM)][WARM:])
    plain_s = statistics.median(took["plain"])
    figures = {
        "parameters": plain.count,
        "step ms": plain_s * 1e3,
        "hook ms": statistics.median(took["hook"]) * 1e3,
        "manager.step ms": statistics.median(took["manager.step"]) * 1e3,
        "share": statistics.median(
            other / alone - 1 for other, alone in zip(took["logged"], took["plain"], strict=True)
        ),
        "cpu share": statistics.median(took["cpu share"]),
        "share of async_save": saved_s / plain_s - 1,
    }
    return figures, url, steps + WARM - 1


def again(url: str, size: int, text: bytes, batch: int, last: int, step_s: float) -> dict[str, Any]:
    """Measure a restore with and without the steps made again."""
    options: dict[str, Any] = {"ram": size * 10 * (last + 4) + size * 40 + (128 << 20), "nvme": "0"}
    took = {}
    for name, chosen in (("checkpoint", 0), ("with its steps", None)):
        training = Training(size, text, batch=batch)
        with Manager(url, save=[Replay(ring=size * 10 * (last + 4))], **options) as run:
            begun = time.perf_counter()
            restored = run.restore(training.state, step=chosen)
            took[name] = time.perf_counter() - begun
            assert restored is not None
    assert restored is not None
    assert (restored.step, restored.stopped) == (last, "")
    a_step_s = (took["with its steps"] - took["checkpoint"]) / restored.replayed
    return {"steps": restored.replayed, "ms a step": a_step_s * 1e3, "share of training": a_step_s / step_s}


def stored(base: Path, size: int, text: bytes, dtype: torch.dtype, name: str) -> float:
    """Publish a log, and return the stored bytes for each parameter and step."""
    url = f"tierfs::file://{base}/{name}"
    tierfs.init(url)
    training = Training(size, text, batch=4, dtype=dtype)
    options: dict[str, Any] = {"ram": size * 120 + (192 << 20), "nvme": "0", "codecs": "all"}
    chunks = base / name / ".tierfs" / "chunks"
    with Manager(f"{url}/run", save=[Replay(ring=size * 10 * STORED_STEPS, level="object")], **options) as run:
        for step in range(STORED_STEPS + 1):
            training.step()
            saved = run.step(step, training.state)
            if saved is not None:
                saved.wait("object")
                before = sum(each.stat().st_size for each in chunks.rglob("*") if each.is_file())
        run.wait()
    files, path = fsspec.url_to_fs(f"{url}/run", ram=options["ram"], nvme="0")
    files.wait(path, "object", timeout=600)
    after = sum(each.stat().st_size for each in chunks.rglob("*") if each.is_file())
    return (after - before) / training.count / STORED_STEPS


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--params", default="10M", help="parameters of the model, roughly")
    arguments.add_argument("--steps", type=int, default=30, help="steps to measure")
    arguments.add_argument("--batch", type=int, default=4, help="rows of 128 bytes in a step")
    given = arguments.parse_args()
    size, text, aims = parse_size(given.params), standard_library_text(), Aims()
    with tempfile.TemporaryDirectory(dir=given.directory) as name, private_slabs():
        base = Path(name)
        os.environ["TIERFS_STATE_DIR"] = str(base / "host")
        tierfs.init(f"file://{base}/store")
        figures, url, last = cost(base, size, given.steps, given.batch, text)
        replayed = again(url, size, text, given.batch, last, figures["step ms"] / 1e3)
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
        bytes_each = {kind: stored(base, size, text, dtype, kind) for kind, dtype in kinds.items()}
    aims.at_most("share of a step for its log", figures["share"], 0.03)
    aims.at_most("share of a step's processor time for its log", figures["cpu share"], 0.03)
    aims.at_most("share of the training time to make steps again", replayed["share of training"], 0.25)
    aims.at_most("stored bytes for a parameter and step, gradients in fp32", bytes_each["fp32"], 3.3)
    aims.at_most("stored bytes for a parameter and step, gradients in bf16", bytes_each["bf16"], 1.45)
    report = {**machine(), "cost": figures, "steps made again": replayed, "stored": bytes_each, "aims": aims.found}
    say(report, as_json=given.json)
    return 0 if all(aim["holds"] for aim in aims.found) else 1


if __name__ == "__main__":
    sys.exit(main())
